"""What ltx's source may not do: use torch's private names, leave out a device, ask which kind its ranks are."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.core.base import private
from ltx.errors import UnsupportedError
from tests.kinds import Params
from tests.programs import printed
from tests.train_on import on_ranks, refuses, trained

LTX = Path(__file__).parents[3] / "ltx"
#: Uses elsewhere, by file. They only go down.
ELSEWHERE = {
    "checkpoint/storage.py": 1,
    "core/base/containers.py": 1,
    "core/base/traced.py": 4,
    "core/comm/operations.py": 2,
    "core/optim/kernel.py": 1,
    "core/transforms/calls_again.py": 1,
    "core/transforms/swap.py": 1,
    "hooks/ddp.py": 1,
    "nn.py": 2,
}


def uses(tree: ast.AST) -> int:
    """On how many lines a file imports private names from torch, or looks them up there."""
    lines = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            names = [node.attr]
        if any(name.startswith("_") and not name.startswith(("__", "_foreach_")) for name in names):
            lines.add(node.lineno)
    return len(lines)


@cache
def files() -> dict[str, ast.Module]:
    return {path.relative_to(LTX).as_posix(): ast.parse(path.read_text()) for path in LTX.rglob("*.py")}


def test_private_names_of_torch() -> None:
    found = Counter({name: uses(tree) for name, tree in files().items()})
    assert found.pop("core/base/private.py")
    assert dict(+found) == ELSEWHERE


PATHS = sorted(set(re.findall(r'"(torch[\w.]*:[\w.]+)"', Path(private.__file__).read_text())))


def test_every_name_is_looked_up_in_one_way() -> None:
    assert len(PATHS) > 40
    assert private._gone == []


@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_is_gone_is_told_with_the_version(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str, found: Any = pkgutil.resolve_name) -> Any:
        if name == path:
            raise AttributeError(name)
        return found(name)

    monkeypatch.setattr(pkgutil, "resolve_name", without)
    spec = importlib.util.spec_from_file_location("private_once_more", private.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.warns(UserWarning, match=re.escape(path.replace(":", "."))) as caught:
        spec.loader.exec_module(module)
    (told,) = caught
    assert str(told.message).startswith(f"torch {torch.__version__} doesn't have these private names")
    for stand_in in (x for x in vars(module).values() if type(x).__name__ == "_Gone"):
        assert not isinstance(torch.ones(1), stand_in)
        for use in (stand_in, lambda x=stand_in: x.try_get()):
            refuses(UnsupportedError, "a private name that torch", use)


LATER = """
import warnings
import torch
del torch._assert_async, torch._C._will_engine_execute_node
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import ltx
    import ltx.checkpoint, ltx.profile
print(*(one.message for one in caught), sep="\\n")
print(ltx.vmap(ltx.psum)(torch.ones(2)).tolist())
"""


def test_ltx_is_imported_all_the_same() -> None:
    told, value = printed("-c", LATER).splitlines()
    assert "torch._C._will_engine_execute_node, torch._assert_async" in told
    assert value == "[2.0, 2.0]"


# What ltx keeps on the host is there whatever ``torch.set_default_device`` says: of users whose default is a GPU.
#: Functions of torch that make a tensor on the default device, unless they are given one.
FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand"}
FACTORIES |= {"randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}


def without_device(tree: ast.AST) -> list[int]:
    """The lines that call one of them without a device."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_the_search() -> None:
    lines = 'torch.zeros(1)\ntorch.zeros(1, device="cpu")\ntorch.zeros(**like)\nx.zeros(1)\ntorch.tensor(\n1)'
    assert without_device(ast.parse(lines)) == [1, 5]


def test_every_tensor_is_made_on_a_device() -> None:
    assert {name: lines for name, tree in files().items() if (lines := without_device(tree))} == {}


HOOKS = ("fp16", ltx.hooks.ByteGrad(), ltx.hooks.PowerSGD(), ltx.hooks.error_feedback(ltx.hooks.TopK(0.5)), None)


def squares(params: Params, x: Tensor) -> ltx.Weighted:
    return ltx.Weighted((x @ params["w"] + params["b"]).square().sum(), len(x))


@pytest.mark.full(but=2)
@pytest.mark.parametrize("hook", HOOKS, ids=str)
@on_ranks(2)
def test_training(hook: Any) -> None:
    """As with the CPU, where the default is a device whose tensors have no values."""
    torch.manual_seed(int(ltx.axis_index()))
    x, strategy, found = torch.randn(5, 4, 3), ltx.DDPStrategy(comm_hook=hook) if hook else None, []
    for default in ("cpu", "meta"):
        params = {"w": torch.linspace(-1, 1, 12).view(3, 4), "b": torch.ones(4)}
        with torch.device(default):
            adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=0.1)
            optimizer = ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), adamw)
            state, metrics = trained(squares, optimizer, params, x, strategy, guard="skip")
            ltx.barrier()
            told = float(metrics[-1].loss), float(ltx.psum(2.0)), len(ltx.all_gather_object("a"))
            found.append((ltx.tree.flatten(state.params)[0], told))
    torch.testing.assert_close(*found, rtol=0, atol=0)


# Outside of the rooms of ranks and of the network nobody asks what the ranks of an axis are: they are told to act.
#: A kind of an axis, the names of the kinds' classes, and the communicator of one of them.
KINDS = {"simulated"}
CLASSES = {"ProcessRanks", "VmapRanks"}
#: Uses of a communicator (``axis.comm``), which only go down.
MOST = 33


def asks(tree: ast.AST) -> Counter[str]:
    """How often each of these is used in a file; fields of objects of their own (``self.comm``) aren't an axis'."""
    found = Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found[node.attr] += node.attr in {*KINDS, *CLASSES, "comm"}
        found[getattr(node, "id", "")] += isinstance(node, ast.Name) and node.id in CLASSES
    return +found


def test_nobody_asks_what_ranks_are() -> None:
    outside = {name: tree for name, tree in files().items() if not name.startswith(("core/ranks/", "core/comm/"))}
    found = {name: asks(tree) for name, tree in outside.items()}
    assert {name for name, uses in found.items() if uses.keys() - {"comm"}} == set()
    communicators = {name: uses["comm"] for name, uses in found.items() if uses["comm"]}
    assert sum(communicators.values()) <= MOST, communicators
    assert sum(communicators.values()) > MOST - 5, f"write MOST = {sum(communicators.values())}"


def test_one_file_knows_the_class_of_tensors_on_meshes() -> None:
    """The core's trees refuse them, and know nothing else of them."""
    own = {"DTensor", "to_local", "full_tensor", "from_local", "redistribute", "device_mesh", "_local_tensor"}
    knowing = {
        name
        for name, file in files().items()
        for node in ast.walk(file)
        if own & {getattr(node, field, None) for field in ("attr", "id", "name")}
        or (isinstance(node, ast.Constant) and node.value in ("DTensor", "torch.distributed.tensor"))
    }
    assert knowing == {"core/base/tree.py", "tensor_parallel.py"}
