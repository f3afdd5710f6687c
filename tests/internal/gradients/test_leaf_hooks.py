"""Train steps where torch can't raise a node's priority (before 2.13): the same bits, and buckets that go out early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.core.gradients import marker
from ltx.core.ranks.axis import axes_in_scope
from ltx.errors import UnsupportedError
from tests import train_on
from tests.kinds import Ranks

Overlap = Literal["backward", "update"]

SIDE = 8
STRATEGY = ltx.DDPStrategy(bucket_bytes=4 * SIDE * SIDE, first_bucket_bytes=4 * SIDE * SIDE)  # a bucket a matrix


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    for name, weight in params.items():
        if name != "unused":
            x = torch.tanh(x @ weight)
    return x.square().mean()


def drawn() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(SIDE, SIDE, generator=draw) / SIDE**0.5 for name in ("a", "b", "c", "unused")}


@contextmanager
def before_2_13(hidden: bool = True) -> Iterator[None]:
    """If `hidden`, torch can't raise a node's priority here."""
    with pytest.MonkeyPatch.context() as patch:
        if hidden:
            patch.setattr(marker, "can_raise_priority", lambda: False)
        yield


def trained(hidden: bool, strategy: ltx.Strategy, overlap: Overlap, fn: Any = loss) -> list[Tensor]:
    draw = torch.Generator().manual_seed(int(ltx.axis_index()))
    batches = [torch.randn(4, SIDE, generator=draw) for _ in range(3)]
    with before_2_13(hidden):
        adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=0.01)
        params = train_on.trained(fn, adamw, drawn(), batches, strategy, overlap=overlap).params
        return [x.clone() for x in params.values()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("hook", [hooks.AllReduce(), hooks.PowerSGD(rank=1, start_step=0), hooks.ByteGrad()])
@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_the_same_bits(hook: hooks.CommHook, overlap: Overlap, ranks: Ranks) -> None:
    strategy = ltx.DDPStrategy(comm_hook=hook, bucket_bytes=STRATEGY.bucket_bytes, first_bucket_bytes=256)
    expected = ranks(2).run(trained, False, strategy, overlap)
    for mine, other in zip(ranks(2).run(trained, True, strategy, overlap), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def watched(seen: list[int]) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """A loss that notes how many buckets have begun, in its forward pass and behind the first layer in its backward."""
    axis_comm: Any = axes_in_scope()[0].comm

    def note(_: Tensor | None = None) -> None:
        seen.append(axis_comm.bucket_channel(0).begun)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ params["a"])
        note()
        hidden.register_hook(note)
        return torch.tanh(torch.tanh(hidden @ params["b"]) @ params["c"]).square().mean()

    return loss


def test_buckets_go_out_during_the_backward_pass(ranks: Ranks) -> None:
    def run() -> tuple[list[int], list[int]]:
        issued, alone = list[int](), list[int]()
        trained(True, STRATEGY, "backward", watched(issued))
        params = {name: x for name, x in drawn().items() if name != "unused"}
        with before_2_13():
            ltx.grad(ltx.data_parallel(watched(alone), STRATEGY))(params, torch.ones(4, SIDE))
        return issued[1::2], alone

    for (first, second, _), (before, during) in ranks(2).run(run):
        # Four buckets a step, of which two are there: those of "c" and "b".
        assert second - first == 4
        assert during - before == 2, "the buckets of the two layers behind"


def test_a_loss_that_reaches_no_parameter(ranks: Ranks) -> None:
    def run() -> list[float]:
        rank = int(ltx.axis_index())
        with before_2_13():
            step = ltx.data_parallel(lambda p, x: (p["a"] * x).sum() if rank else x.sum() * 1.0)
            return ltx.grad(step)({"a": torch.ones(2)}, torch.ones(2))["a"].tolist()

    assert list(ranks(2).run(run)) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("hidden", [False, True])
def test_reentrant_checkpoints_that_close_over_parameters(hidden: bool, ranks: Ranks) -> None:
    def run() -> tuple[Tensor, Tensor]:
        def plain(params: dict[str, Tensor], x: Tensor) -> Tensor:
            return ((x @ params["a"]) @ params["a"]).square().mean()

        def inside(params: dict[str, Tensor], x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            part = torch.utils.checkpoint.checkpoint(lambda y: y @ params["a"], x, use_reentrant=True)
            return (part @ params["a"]).square().mean()

        params, x = {"a": drawn()["a"]}, torch.ones(4, SIDE)
        with before_2_13(hidden):
            return ltx.grad(ltx.data_parallel(inside, STRATEGY))(params, x)["a"], torch.func.grad(plain)(params, x)["a"]

    for grad, expected in ranks(2).run(run):
        torch.testing.assert_close(grad, expected)


def test_a_gradient_that_comes_twice(ranks: Ranks) -> None:
    def run() -> str:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
                ctx.save_for_backward(x, w)
                return x @ w

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                x, w = ctx.saved_tensors
                with torch.enable_grad():
                    (x.detach() @ w).backward(grad)
                return grad @ w.T, x.T @ grad

        with before_2_13():
            step = ltx.data_parallel(lambda p, x: Twice.apply(x, p["a"]).square().mean(), STRATEGY)
            given = {name: torch.ones(SIDE, SIDE) for name in "ab"}, torch.ones(4, SIDE)
            return train_on.said(UnsupportedError, ltx.grad(step), *given)

    for told in ranks(2).run(run):
        assert "a gradient came twice in one backward pass" in told
