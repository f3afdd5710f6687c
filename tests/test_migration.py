"""docs/coming-from/lightning-names.md: each name that Lightning documents has a row, of what exists, and a test."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from tests.programs import printed
from tests.train_on import refuses, said

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "coming-from" / "lightning-names.md"


HERE, STEP = "test_migration.py::", "contract/training/test_train_step.py::"
INIT = STEP + "test_init_takes_rank_0s_values_and_copies"
DONE = "contract/strategies/test_conformance.py::test_processes_do_what_the_reference_says"
WORLD = "internal/runtime/test_launchers.py::test_placements"
FIELDS = "internal/world/test_init.py::test_process_fields_of_a_strategy"
ALONE = "contract/conformance/test_properties.py::test_a_world_of_one_is_one_simulated_rank"
TOLD = "contract/strategies/test_failures.py::test_peers_are_told_and_the_step_can_be_done_again"
REDUCED = "contract/collectives/test_reduce.py::test_defaults_and_what_passes_through"

#: What several classes have in common.
SHARED = {
    "accelerator": "internal/runtime/test_launchers.py::test_devices",
    "parallel_devices": WORLD,
    "cluster_environment": WORLD,
    "checkpoint_io": "contract/checkpoint/test_resume.py::test_every_strategy_goes_on_bit_for_bit",
    "precision_plugin": "contract/training/test_mixed_precision.py::test_what_overflows_on_one_rank_is_skipped_by_all",
    "barrier": "contract/comm/test_axis_comm.py::test_signatures_that_differ",
    "broadcast": "internal/collectives/test_objects.py::test_objects_arrive",
    "reduce": REDUCED,
    "teardown": "internal/world/test_init.py::test_teardown_after_an_exception_and_again",
    "root_device": "internal/runtime/test_launchers.py::test_devices",
}


def shared(*names: str) -> dict[str, str]:
    return {name: SHARED[name] for name in names}


#: By section of the page: each documented name, and the tests (file::function) that show what stands for it.
NAMES: dict[str, dict[str, str]] = {
    "HorovodStrategy": {
        "HorovodStrategy": DONE,
        **shared("accelerator", "parallel_devices", "checkpoint_io", "precision_plugin", "teardown", "root_device"),
        "all_gather(result, group, sync_grads)": "contract/collectives/test_uneven.py::test_all_gather_and_scatter",
        "barrier(*args)": "internal/collectives/test_objects.py::test_barriers",
        "broadcast(obj, src)": "internal/collectives/test_objects.py::test_objects_arrive",
        "model_to_device": "internal/world/test_init.py::test_to_device_moves_what_can_move",
        "post_backward(closure_loss)": (STEP + "test_the_norm_is_that_of_the_global_gradient"),
        'reduce(tensor, group, reduce_op="mean")': REDUCED,
        "setup(trainer)": f"internal/strategies/test_bagua.py::test_scaled_learning_rates {INIT}",
        "handles_gradient_accumulation": (
            "contract/strategies/test_horovod.py::test_calls_in_between_send_nothing_and_leave_parameters_alone"
        ),
    },
    "ParallelStrategy": {
        "ParallelStrategy": "contract/test_extend.py::test_a_strategy",
        **shared("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
        "all_gather": "contract/collectives/test_scatter.py::test_without_sync_grads_the_result_is_a_constant",
        "block_backward_sync": "contract/transforms/test_block.py::test_blocked_then_synchronised_is_the_plain_step",
        "reconciliate_processes(trace)": TOLD,
        "reduce_boolean_decision(decision)": "contract/collectives/test_reduce.py::test_boolean_decisions",
        "is_global_zero": WORLD,
        **shared("teardown", "root_device"),
    },
    "BaguaStrategy": {
        "BaguaStrategy": DONE,
        "algorithm": DONE,
        "flatten": DONE,
        **shared("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
        "**bagua_kwargs": "internal/strategies/test_bagua.py::test_replace_changes_the_algorithm_too",
        **shared("barrier", "broadcast", "reduce"),
        "teardown": "internal/strategies/test_async.py::test_nodes_go_at_their_own_pace_and_end_together",
        "lightning_module": "contract/transforms/test_data_parallel.py::test_ways_to_wrap",
    },
    "DDPStrategy": {
        "DDPStrategy": STEP + "test_fifty_steps_are_those_of_ddp",
        **shared("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
        "ddp_comm_state": "contract/hooks/test_from_torch.py::test_power_sgd_as_under_ddp",
        "ddp_comm_hook": "contract/strategies/test_values.py::test_wrappers",
        "ddp_comm_wrapper": "contract/strategies/test_values.py::test_wrappers",
        "model_averaging_period": (
            "contract/strategies/test_local_sgd.py::test_local_steps_send_nothing_and_periods_send_the_parameters_once "
            + DONE
        ),
        "process_group_backend": FIELDS,
        "timeout": FIELDS,
        "start_method": "contract/runtime/test_launch.py::test_a_strategys_way_to_start",
        "**kwargs": HERE + "test_ddps_own_arguments_are_refused",
        **shared("barrier", "broadcast", "reduce", "teardown", "root_device"),
        "on_exception(exception)": ("contract/transforms/test_data_parallel.py::test_equal_to_ddp_and_to_one_process"),
        "optimizer_step(optimizer, closure, model)": (STEP + "test_a_step_that_raises_leaves_the_state_as_it_was"),
        "setup": INIT,
        "setup_environment": "internal/world/test_init.py::test_teardown_after_an_exception_and_again",
        "is_distributed": WORLD,
    },
    "utilities.distributed": {
        "AllGatherGrad(tensor, group)": "contract/collectives/test_scatter.py::test_all_gather_grad_on_a_subgroup",
        "AllGatherGrad.forward": "contract/collectives/test_scatter.py::test_all_gather_grad_on_a_subgroup",
        "AllGatherGrad.backward": "contract/collectives/test_scatter.py::test_all_gather_grad_on_a_subgroup",
        "all_gather_ddp_if_available(tensor, group, sync_grads)": ALONE,
        "gather_all_tensors(result, group)": "contract/collectives/test_uneven.py::test_gather_all_tensors",
        "init_dist_connection(cluster_environment, backend, global_rank, world_size, **kwargs)": (
            "internal/world/test_init.py::test_second_call_with_other_arguments_says_which"
        ),
        "register_ddp_comm_hook(model, ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)": (
            "contract/strategies/test_values.py::test_wrappers"
        ),
        "sync_ddp(result, group, reduce_op)": REDUCED,
        "sync_ddp_if_available": ALONE,
    },
}


CODE = re.compile(r"`([^`]+)`")


def rows() -> dict[str, dict[str, tuple[str, str]]]:
    """By section and name: the cells beside it."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        lines = [axis_comm for axis_comm in body.splitlines() if axis_comm.startswith("| `")]
        cells = [[cell.strip() for cell in axis_comm.strip("|").split(" | ")] for axis_comm in lines]
        assert all(len(row) == 3 for row in cells), title
        found[title] = {theirs.strip("`"): (ours, differs) for theirs, ours, differs in cells}
        assert len(found[title]) == len(lines), f"{title}: a name has two rows"
    return found


def resolve(node: ast.expr) -> Any:
    """What an expression such as ``ltx.train_step(step, optimizer).init(params)`` names; raises if there is none.

    A call stands for the class of its result. Its arguments needn't exist, but there must be parameters for them;
    positional ones bear their parameters' names.
    """
    match node:
        case ast.Name("ltx"):
            return ltx
        case ast.Attribute(value, name):
            owner = resolve(value)
            fields = getattr(owner, "__dataclass_fields__", {})
            return fields[name] if name in fields else getattr(owner, name)
        case ast.Call(func, args, keywords):
            called = resolve(func)
            signature = inspect.signature(called)
            if inspect.isfunction(called) and "." in called.__qualname__ and "self" in signature.parameters:
                signature = signature.replace(parameters=list(signature.parameters.values())[1:])
            bound = signature.bind_partial(*args, **{keyword.arg: keyword.value for keyword in keywords})
            for name, value in bound.arguments.items():
                if isinstance(value, ast.Name) and value.id != name:
                    raise TypeError(f"{ast.unparse(node)}: the parameter is called {name!r}")
            return called if inspect.isclass(called) else typing.get_type_hints(called).get("return")
    raise TypeError(f"{ast.unparse(node)} isn't a name")


def named(text: str) -> Any:
    return resolve(ast.parse(text, mode="eval").body)


def test_every_name_has_a_row() -> None:
    of_page, of_tests = ({section: sorted(names) for section, names in of.items()} for of in (rows(), NAMES))
    assert of_page == of_tests


@pytest.mark.parametrize("section", NAMES)
def test_every_row_names_what_exists(section: str) -> None:
    for theirs, (ours, differs) in rows()[section].items():
        assert ours.startswith("`ltx."), theirs
        assert differs.endswith("."), theirs
        for text in CODE.findall(ours):
            named(text)


def test_everything_of_ltx_on_the_page_exists() -> None:
    texts = [text for text in CODE.findall(PAGE.read_text(encoding="utf-8")) if text.startswith("ltx.")]
    assert len(texts) > 100
    for text in texts:
        named(text)


@pytest.mark.parametrize(
    "text",
    [
        "ltx.no_such_name",
        "ltx.World.no_such_property",
        "ltx.DDPStrategy(no_such_field=...)",
        "ltx.reduce(value, group=...)",
        "ltx.reduce(tensor)",
        "ltx.shutdown(now)",
        "ltx.train_step(step, optimizer).no_such_method",
        "ltx.train_step(step, optimizer).init(state)",
    ],
)
def test_names_that_do_not_exist_are_found_out(text: str) -> None:
    said((AttributeError, TypeError), named, text)


def test_behind_every_row_stands_a_test() -> None:
    nodes = {node for names in NAMES.values() for shown in names.values() for node in shown.split()}
    for node in nodes:
        file, name = node.split("::")
        defined = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        assert name in {item.name for item in defined if isinstance(item, ast.FunctionDef)}, node


def test_ddps_own_arguments_are_refused() -> None:
    for name in ("find_unused_parameters", "static_graph", "bucket_cap_mb", "gradient_as_bucket_view"):
        refuses(TypeError, f"unexpected keyword argument '{name}'", ltx.DDPStrategy, **{name: True})


DIFFS = ("accelerate", "ddp", "fabric", "horovod", "lightning")


def diff_of(page: str) -> tuple[str, list[str]]:
    """A page's text and the lines of its loop, before and after."""
    text = (PAGE.parent / f"{page}.md").read_text(encoding="utf-8")
    return text, re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0].splitlines()


@pytest.mark.parametrize("page", DIFFS)
def test_so_many_lines_change(page: str) -> None:
    text, lines = diff_of(page)
    changed = [str(sum(line[:1] == sign and bool(line[1:].strip()) for line in lines)) for sign in "-+"]
    assert re.findall(r"(\d+) lines go, (\d+) come", text) == [tuple(changed)]


@pytest.mark.full
@pytest.mark.timeout(240)
def test_loops_before_and_after(tmp_path: Path) -> None:
    """DDP's loop and ltx's save the same weights; those of the others train as well."""
    weights = {}
    for page, gone in (("ddp", "+"), *((page, "-") for page in DIFFS)):
        folder = tmp_path / f"{page}{gone}"
        folder.mkdir()
        program = "\n".join(line[1:] for line in diff_of(page)[1] if line[:1] != gone)
        (folder / "train.py").write_text(program, encoding="utf-8")
        printed("-m", "ltx", "run", "-n", "2", "train.py", cwd=folder, timeout_s=60)
        weights[page + gone] = torch.load(folder / "model.pt")
    torch.testing.assert_close(weights["ddp-"], weights["ddp+"], rtol=1e-4, atol=1e-5)
