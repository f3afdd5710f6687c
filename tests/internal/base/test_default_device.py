"""What ltx keeps on the host is there whatever ``torch.set_default_device`` says: of users whose default is a GPU."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from tests.kinds import Params, Ranks
from tests.train_on import trained

LTX = Path(__file__).parents[3] / "ltx"
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
    found = {path.relative_to(LTX).as_posix(): ast.parse(path.read_text()) for path in LTX.rglob("*.py")}
    assert {path: lines for path, tree in found.items() if (lines := without_device(tree))} == {}


HOOKS = ("fp16", ltx.hooks.ByteGrad(), ltx.hooks.PowerSGD(), ltx.hooks.error_feedback(ltx.hooks.TopK(0.5)), None)


def squares(params: Params, x: Tensor) -> ltx.Weighted:
    return ltx.Weighted((x @ params["w"] + params["b"]).square().sum(), len(x))


@pytest.mark.full(but=2)
@pytest.mark.parametrize("hook", HOOKS, ids=str)
def test_training(hook: Any, ranks: Ranks) -> None:
    """As with the CPU, where the default is a device whose tensors have no values."""

    def run() -> list[Any]:
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
        return found

    for usual, elsewhere in ranks(2).run(run):
        torch.testing.assert_close(elsewhere, usual, rtol=0, atol=0)
