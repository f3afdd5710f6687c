"""torch.compile of a whole training step: forward, backward, reductions and optimizer as one graph."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

import ltx
from ltx.errors import DonatedStateError, UnsupportedError
from tests.contract.training.compiled import COMPILING, STEPS, trained
from tests.kinds import Ranks
from tests.train_on import refuses


def assert_alike(state: Any, other: Any) -> None:
    for part in ("params", "opt_state", "sync_state"):
        mine, others = (ltx.tree.flatten(getattr(each, part))[0] for each in (state, other))
        if part == "sync_state":
            mine, others = mine[:-2], others[:-2]  # its count of steps is in a tensor there, and in the structure here
        for x, y in zip(mine, others, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.full
def test_models_of_other_sizes_one_after_the_other() -> None:
    """From the second on Dynamo takes sizes for variables."""
    step = ltx.data_parallel(lambda params, x: (x @ params["w"]).square().mean())
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.AdamW, lr=0.1))
    compiled = torch.compile(train, fullgraph=True, backend="aot_eager")
    for size in (3, 4, 5, 7):
        state, x = train.init({"w": torch.randn(size, 2 * size)}), torch.randn(size + 3, size)
        got, expected = compiled(state, x)[0], train(state, x)[0]
        torch.testing.assert_close(got.params, expected.params)


@pytest.mark.full
@pytest.mark.parametrize("name", STEPS)
def test_two_ranks(name: str, ranks: Ranks) -> None:
    results = ranks(2).run(trained, name, "aot_eager")
    for state, other in results:
        assert_alike(state, other)
    for x, y in zip(*(ltx.tree.flatten(other.params)[0] for _, other in results), strict=True):
        assert torch.equal(x, y)


@pytest.mark.full
@pytest.mark.timeout(180)
def test_inductor(ranks: Ranks) -> None:
    for state, other in ranks(2).run(trained, "adamw", "inductor", timeout_s=170):  # a C++ compiler's time
        assert_alike(state, other)


def starts_and_waits() -> list[str]:
    """A gradient's collectives in the order of Inductor's code."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    params = {str(i): {"b": torch.randn(32), "w": torch.randn(32, 32)} for i in range(3)}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in params.values():
            x = torch.tanh(x @ layer["w"] + layer["b"])
        return x.square().mean()

    step = ltx.data_parallel(loss, ltx.DDPStrategy(bucket_bytes=4224, first_bucket_bytes=4224))  # of one layer
    with fresh_cache():
        _, code = run_and_get_code(torch.compile(torch.func.grad(step), fullgraph=True), params, torch.randn(4, 32))
    return re.findall(r"_c10d_functional\.(all_reduce|wait_tensor)[_.]", "".join(code))


@pytest.mark.full
@pytest.mark.timeout(180)
def test_all_buckets_are_started_before_the_first_is_waited_for(ranks: Ranks) -> None:
    """Without more ado Inductor waits for the first one at once here, since that lowers the peak of memory."""
    for order in ranks(2).run(starts_and_waits, timeout_s=170):
        assert order == ["all_reduce"] * 3 + ["wait_tensor"] * 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", lambda step: 0.1 / (1 + step)), ("momentum", lambda step: 0.9), ("lr", ltx.optim.adjustable(0.1))],
)
def test_hyperparameters_that_change_are_refused(name: str, value: Any) -> None:
    sgd = ltx.optim.from_torch(torch.optim.SGD, **{"lr": 0.1, "momentum": 0.9, name: value})
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), sgd)
    refused = (UnsupportedError, torch._dynamo.exc.TorchDynamoException)
    with pytest.raises(refused, match=f"can't ask for the {name} of each step"):
        torch.compile(train, fullgraph=True, backend="eager")(train.init(torch.ones(2)), torch.ones(2))


@pytest.mark.full
def test_the_state_of_a_module_is_compiled_for_once() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model = torch.nn.Linear(3, 1)
    train = ltx.train_step(ltx.data_parallel(lambda p, x: ltx.functional_call(model, p, (x,)).sum()), SGD())
    (compiled, state), x = (torch.compile(train, backend=backend, fullgraph=True), train.init(model)), torch.randn(2, 3)
    for _ in range(3):
        state, _ = compiled(state, x)
    assert len(graphs) == COMPILING
    with pytest.raises(DonatedStateError, match="compiled steps don't move a module"):
        model(x)
    state, _ = train(state, x)
    assert torch.equal(model.weight, state.params["weight"])


@pytest.mark.full
def test_a_step_that_dynamo_gives_up_on_is_refused() -> None:
    """It would run as it is on this rank, while others may wait in a graph."""
    train = ltx.train_step(ltx.data_parallel(lambda w, xs: sum((w * x).sum() for x in xs)), SGD())
    compiled, state = torch.compile(train, backend="eager"), train.init(torch.ones(2))
    with torch._dynamo.config.patch(recompile_limit=2):
        for count in (1, 2):
            state, _ = compiled(state, [torch.ones(2)] * count)
        refuses(UnsupportedError, "has given up on this step", compiled, state, [torch.ones(2)] * 4)
    train(state, [torch.ones(2)])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_simulated_ranks_of_one_state(optimizer: Any) -> None:
    train = ltx.train_step(
        ltx.data_parallel(lambda w, x: (w * x).sum().square()), ltx.optim.from_torch(optimizer, lr=0.1)
    )

    def step(state: Any, xs: Any) -> Any:
        return ltx.vmap(train, in_dims=(None, 0))(state, xs)[0]

    state, xs = train.init(torch.ones(3)), torch.randn(4, 3)
    wanted, got = step(state, xs), torch.compile(step, fullgraph=True, backend="eager")(state, xs)
    torch.testing.assert_close(got.params, wanted.params)


def test_dynamo_traces_a_step_once() -> None:
    """It begins anew where a graph has a 0-dim float64 tensor on the CPU that it needn't read."""
    traces: list[int] = []

    @torch.compiler.assume_constant_result
    def noted() -> float:
        traces.append(1)
        return 0.0

    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum() + noted()), SGD(momentum=0.9))
    torch.compile(train, fullgraph=True, backend="aot_eager")(train.init(torch.ones(2)), torch.ones(2))
    assert len(traces) == 1


TORCH = torch.torch_version.TorchVersion(torch.__version__)
SGD, ADAMW = (partial(ltx.optim.from_torch, each, lr=0.1) for each in (torch.optim.SGD, torch.optim.AdamW))


@pytest.mark.parametrize(
    ("optimizer", "dynamic", "scale"),
    [
        (SGD(), None, None),  # which has no state, and an empty dict is a constant to Dynamo
        *(
            pytest.param(optimizer, dynamic, ltx.DynamicLossScale(init=8.0), marks=pytest.mark.full)
            for optimizer, dynamic in (
                (SGD(), None),
                (SGD(momentum=0.9), False),
                (ltx.optim.chain(ltx.optim.clip_by_global_norm(0.5), ADAMW()), None),
                (ltx.optim.partition({"w": SGD(momentum=0.9), "b": ADAMW()}, {"w": "w", "b": "b"}), True),
            )
        ),
    ],
    ids=str,
)
def test_the_first_call_alone_compiles(
    optimizer: ltx.optim.Optimizer, dynamic: bool | None, scale: ltx.DynamicLossScale | None, seed: int
) -> None:
    """Counts of steps and updates are variables of the graph; Dynamo, unasked, takes a number for one when it changes.

    With buffers, and a loss scale, which counts steps too.
    """
    step = ltx.data_parallel(lambda p, n, x: ((p["w"] * x + p["b"]).square().mean(), n + 1))
    train = ltx.train_step(ltx.mixed_precision(step, ltx.Precision(keep=(1,), loss_scale=scale)), optimizer)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(train, fullgraph=True, backend=backend, dynamic=dynamic)
    params = {"w": torch.randn(4), "b": torch.randn(4)}
    state, other = (train.init(params, torch.zeros(())) for _ in range(2))
    # From torch 2.14 on Dynamo takes the first count of an optimizer without state for a constant.
    compiling = COMPILING + (str(optimizer) == str(SGD()) and scale is None and TORCH >= "2.14")
    for count in (1, 2, 3):
        x = torch.randn(4)
        (state, _), (other, _) = train(state, x), compiled(other, x)
        assert (other.step, other.buffers.item(), len(graphs)) == (count, count, min(count, compiling))
    torch.testing.assert_close(other.params, state.params)
