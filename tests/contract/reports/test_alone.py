"""A world of one is like n: what `ltx.grad` takes on several ranks it takes on one, too. Vectorized calls."""

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
from torch._vmap_internals import _vmap
from torch.autograd.functional import hessian, jacobian
from torch.func import grad, vjp, vmap
from torch.utils.checkpoint import checkpoint

import ltx
from ltx.errors import UnsupportedError
from tests.contract.conformance.table import OPS, Op, common_shift, draw, jacobian_of_sum, loss, total
from tests.covering import some
from tests.kinds import Ranks
from tests.train_on import on_ranks, refuses


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


ROWS = {op.name: op for op in OPS if not op.rounding}
FAST = ("data_parallel", "sync_gradients", "psum", "pmax", "all_gather")
FORWARD = {"vectorize": True, "strategy": "forward-mode"}


def pulled(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = f(x)
    return torch.autograd.grad(y, x, cotangents(y), is_grads_batched=True)[0]


def cotangents(y: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(y), torch.full_like(y, -2.0), torch.linspace(0, 1, y.numel()).view(y.shape)])


def pulled_of_all(fs: Callable[[Tensor], Tensor], xs: Tensor) -> Tensor:
    ys, pull = vjp(fs, xs)
    return vmap(lambda c: pull(c.expand_as(ys))[0], out_dims=1)(cotangents(ys[0]).to(ys.dtype))


#: By name: on one rank, and on all.
CALLS: dict[str, tuple[Callable[[Op, Tensor], Any], Callable[[Op, Tensor], Tensor]]] = {
    "jacobian": (lambda op, x: jacobian(op.output, x, vectorize=True), lambda op, xs: jacobian_of_sum(op.outputs, xs)),
    "jacobian, forward": (lambda op, x: jacobian(op.output, x, **FORWARD), lambda op, xs: common_shift(op.outputs, xs)),
    "hessian": (
        lambda op, x: hessian(loss(op.output), x, vectorize=True),
        lambda op, xs: jacobian_of_sum(grad(total(op.outputs)), xs),
    ),
    "hessian, forward": (
        lambda op, x: hessian(loss(op.output), x, vectorize=True, outer_jacobian_strategy="forward-mode"),
        lambda op, xs: common_shift(grad(total(op.outputs)), xs),
    ),
    "cotangents": (lambda op, x: pulled(op.output, x), lambda op, xs: pulled_of_all(op.outputs, xs)),
}


def called(name: str, xs: Tensor) -> list[Tensor]:
    return [on_one(ROWS[name], xs[ltx.world().rank]).detach() for on_one, _ in CALLS.values()]


@pytest.mark.parametrize("backing", ["processes", "alone"])
@pytest.mark.parametrize("name", some(ROWS, *FAST))
def test_vectorized_calls(name: str, backing: str, seed: int, ranks: Ranks) -> None:
    xs, _ = draw(ROWS[name], 1 if backing == "alone" else 2, seed)
    found = [called(name, xs)] if backing == "alone" else ranks(2).run(called, name, xs)
    for call, each in zip(CALLS, zip(*found, strict=True), strict=True):
        expected = CALLS[call][1](ROWS[name], xs)
        torch.testing.assert_close(torch.stack(each), expected, rtol=1e-8, atol=1e-8, msg=lambda m, c=call: f"{c}: {m}")


@pytest.mark.parametrize("name", some([n for n, op in ROWS.items() if op.from_outside], "data_parallel", "pmax"))
def test_vectorized_calls_around_simulated_ranks(name: str, seed: int) -> None:
    """All ranks' inputs are one tensor, whose derivatives need no convention."""
    op, (xs, _) = ROWS[name], draw(ROWS[name], 2, seed)
    expected = torch.func.jacrev(op.outputs)(xs)
    for strategy in ("reverse-mode", "forward-mode")[: 1 if op.replicated else 2]:  # of which the first is the mean's
        found = jacobian(ltx.vmap(op.output), xs, vectorize=True, strategy=strategy)
        torch.testing.assert_close(found.detach(), expected, rtol=1e-8, atol=1e-8)


@on_ranks(2)
def test_what_cannot_be_batched_is_refused() -> None:
    """Each is refused before anything is sent, and the axis is as it was."""
    x = torch.ones(4)
    step = ltx.data_parallel(lambda w, x: (w * x).sin()[:3], ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad()))

    def nested(x: Tensor) -> Tensor:
        return _vmap(lambda a: _vmap(lambda b: ltx.psum(a * b))(x))(x)  # as one such call inside of another

    for call, text in (
        (nested, r"inside several vectorised calls of torch\.autograd, one in another\. Use torch\.func\.jacrev"),
        (lambda x: jacobian(lambda w: step(w, x), x, vectorize=True), "can't reduce gradients of several samples at"),
    ):
        refuses(UnsupportedError, text, call, x)
        assert ltx.psum(x * (1 + ltx.world().rank)).tolist() == [3.0] * 4
        assert torch.func.grad(lambda w: ltx.data_parallel(lambda w: w.sum())(w))(x).tolist() == [1.0] * 4
