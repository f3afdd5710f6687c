"""A world of one is like n: what `ltx.grad` takes on several ranks it takes on one, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.map import map as recorded_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import ltx
from ltx.errors import UnsupportedError
from tests.kinds import Ranks
from tests.train_on import refuses


class Square(torch.autograd.Function):
    """Written before there was `setup_context`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return 2 * g * ctx.saved_tensors[0]


def square_then_change(x: Tensor) -> Tensor:
    y = x * 1.0
    squares = y * y
    y.add_(1.0)  # what `squares` has saved
    return squares


def square_op() -> Callable[[Tensor], Tensor]:
    """A custom operator, made where it is used: it can't be sent to workers."""

    def square(x: Tensor) -> Tensor:
        return x * x

    def saved(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    made = torch.library.custom_op("ltx_reports::square", square, mutates_args=(), schema="(Tensor x) -> Tensor")
    made.register_autograd(lambda ctx, g: 2 * g * ctx.saved_tensors[0], setup_context=saved)
    return made


CHANGED = "what was saved is changed"
SQUARES: dict[str, Callable[[Tensor], Tensor] | None] = {
    "a custom operator": None,
    "a Function without setup_context": Square.apply,
    "recomputed": lambda x: checkpoint(Square.apply, x, use_reentrant=False),
    CHANGED: square_then_change,
}


def given(name: str, seed: int) -> list[Any]:
    """The gradient by each way to ask for it, and the right one."""
    w, x = torch.randn((), generator=torch.Generator().manual_seed(seed)), torch.tensor([1.0, 2.0])
    square = SQUARES[name] or square_op()
    plain = ltx.data_parallel(lambda w, x: square(w * x).sum())
    with_aux = ltx.data_parallel(lambda w, x: (square(w * x).sum(), {"name": "aux", "w": w}))
    with torch.autograd.graph.allow_mutation_on_saved_tensors() if name == CHANGED else nullcontext():
        found = [
            ltx.grad(plain)(w, x),
            ltx.grad_and_value(plain)(w, x)[0],
            ltx.grad_and_value(with_aux, has_aux=True)(w, x)[0],
            ltx.grad(ltx.accumulate(plain, 2))(w, x) * 2,
            ltx.grad(ltx.block_backward_sync(plain))(w, x),
        ]
    return [*map(float, found), float(10 * w)]


@pytest.mark.parametrize("name", SQUARES)
def test_what_torch_func_has_no_rules_for(ranks: Ranks, seed: int, name: str) -> None:
    *found, right = given(name, seed)
    assert found == pytest.approx([right] * len(found))
    for of_rank in () if name == CHANGED else ranks(2).run(given, name, seed):
        assert of_rank == pytest.approx([*found, right])


def test_the_value_is_apart_and_what_is_closed_over_has_its_derivative() -> None:
    w = torch.tensor(3.0)
    grad, value = ltx.grad_and_value(ltx.data_parallel(lambda w: w))(w)
    value += 1
    assert (float(grad), float(w), grad.requires_grad, value.requires_grad) == (1.0, 3.0, False, False)
    scale = torch.tensor(2.0, requires_grad=True)
    grad = ltx.grad(ltx.data_parallel(lambda w: scale * w * w))(w)
    (twice,) = torch.autograd.grad(grad, scale)
    assert (float(grad.detach()), float(twice)) == (12.0, 6.0)


def summed(carried: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    total = carried + ltx.psum(x)
    return total, total * 1.0


RECORDED: dict[str, tuple[Callable[[Tensor], Any], list[float] | None]] = {
    "cond, branches alike": (
        lambda x: torch.cond(torch.tensor(True), lambda a: ltx.psum(a) + 0 * a, lambda a: a * 1.0, (x,)),
        [3.0, 3.0],
    ),
    "cond, a condition of each rank's own": (
        lambda x: torch.cond(x > 1, lambda a: ltx.psum(a), lambda a: a * 1.0, (x,)),
        [1.0, 3.0],
    ),
    "cond, one branch the same on all ranks": (
        lambda x: torch.cond(torch.tensor(True), lambda a: ltx.psum(a), lambda a: a * 1.0, (x,)),
        None,
    ),
    "scan": (lambda x: scan(summed, torch.zeros(()), x.expand(2))[0], [6.0, 6.0]),
    "scan, without a collective": (
        lambda x: scan(lambda c, x: (c + x, c * 1.0), torch.zeros(()), x.expand(2))[0],
        None,
    ),
    "while_loop": (
        lambda x: while_loop(lambda i, c: i < 1, lambda i, c: (i + 1, c + ltx.psum(c)), (torch.tensor(0), x))[1],
        None,
    ),
    "map": (lambda x: recorded_map(lambda a: ltx.psum(a) * 2, x.expand(2)), None),
}


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functions_that_torch_records_under_vmap(name: str) -> None:
    function, right = RECORDED[name]
    x = torch.tensor([1.0, 2.0])
    if right is None:
        refuses(UnsupportedError, "record their functions as graphs", ltx.vmap(function), x)
    else:
        assert ltx.vmap(function)(x).tolist() == right
    assert ltx.vmap(ltx.psum)(x).tolist() == [3.0, 3.0]
