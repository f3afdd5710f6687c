"""torch.autograd's calls that batch by a vmap of their own: vectorized Jacobians, forward mode, batched cotangents.

What is right comes from torch.func on one stacked tensor of all ranks' values (tests/contract/conformance).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd.functional import hessian, jacobian
from torch.func import grad, vjp, vmap

import ltx
from ltx.errors import UnsupportedError
from tests.contract.conformance.table import OPS, Op, common_shift, draw, jacobian_of_sum, loss, total
from tests.covering import some
from tests.kinds import Ranks

ROWS = {op.name: op for op in OPS if not op.rounding}
FAST = ("data_parallel", "sync_gradients", "psum", "pmax", "all_gather")
FORWARD = {"vectorize": True, "strategy": "forward-mode"}


def pulled(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Three cotangents at once."""
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
    fs = ltx.vmap(op.output)
    expected = torch.func.jacrev(op.outputs)(xs)
    for strategy in ("reverse-mode", "forward-mode")[: 1 if op.replicated else 2]:  # of which the first is the mean's
        found = jacobian(fs, xs, vectorize=True, strategy=strategy)
        torch.testing.assert_close(found.detach(), expected, rtol=1e-8, atol=1e-8)


def refusals() -> list[str]:
    """Each is refused before anything is sent, and the axis is as it was."""
    x, said = torch.ones(4), []
    step = ltx.data_parallel(lambda w, x: (w * x).sin()[:3], ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad()))

    def nested(x: Tensor) -> Tensor:
        return _vmap(lambda a: _vmap(lambda b: ltx.psum(a * b))(x))(x)  # as one such call inside of another

    for call in (nested, lambda x: jacobian(lambda w: step(w, x), x, vectorize=True)):
        try:
            call(x)
        except UnsupportedError as error:
            said.append(str(error))
        assert ltx.psum(x * (1 + ltx.world().rank)).tolist() == [3.0] * 4
        grads = torch.func.grad(lambda w: ltx.data_parallel(lambda w: w.sum())(w))(x)
        assert grads.tolist() == [1.0] * 4
    return said


def test_what_cannot_be_batched_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(refusals):
        assert "inside several vectorised calls of torch.autograd, one in another. Use torch.func.jacrev" in said[0]
        assert "can't reduce gradients of several samples at once" in said[1]
