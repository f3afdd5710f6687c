"""Passes that a step runs itself: leaves with hooks, and buckets that go out early."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

import ltx
from ltx.core.ranks.axis import axes_in_scope
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


def trained(strategy: ltx.Strategy, overlap: Overlap, fn: Any = loss) -> list[Tensor]:
    train = ltx.train_step(
        ltx.data_parallel(fn, strategy), ltx.optim.from_torch(torch.optim.AdamW, lr=0.01), overlap=overlap
    )
    state, draw = train.init(drawn()), torch.Generator().manual_seed(int(ltx.axis_index()))
    for _ in range(3):
        state, _ = train(state, torch.randn(4, SIDE, generator=draw))
    return [x.clone() for x in state.params.values()]


def test_buckets_go_out_during_the_backward_pass(ranks: Ranks) -> None:
    def run() -> list[int]:
        issued: list[int] = []
        axis_comm: Any = axes_in_scope()[0].comm

        def watched(params: dict[str, Tensor], x: Tensor) -> Tensor:
            hidden = torch.tanh(x @ params["a"])
            hidden.register_hook(lambda _: issued.append(axis_comm.bucket_channel(0).begun))
            return torch.tanh(torch.tanh(hidden @ params["b"]) @ params["c"]).square().mean()

        trained(STRATEGY, "backward", watched)
        return issued

    for first, second, _ in ranks(2).run(run):
        # Four buckets a step, of which two are there: those of "c" and "b".
        assert second - first == 4

    def alone() -> tuple[int, int]:
        axis_comm: Any = axes_in_scope()[0].comm
        seen: list[int] = []

        def watched(params: dict[str, Tensor], x: Tensor) -> Tensor:
            hidden = torch.tanh(x @ params["a"])
            seen.append(axis_comm.bucket_channel(0).begun)
            hidden.register_hook(lambda _: seen.append(axis_comm.bucket_channel(0).begun))
            return torch.tanh(torch.tanh(hidden @ params["b"]) @ params["c"]).square().mean()

        params = {name: x for name, x in drawn().items() if name != "unused"}
        ltx.grad(ltx.data_parallel(watched, STRATEGY))(params, torch.ones(4, SIDE))
        return seen[0], seen[1]

    for before, during in ranks(2).run(alone):
        assert during - before == 2, "the buckets of the two layers behind"


def test_a_loss_that_reaches_no_parameter(ranks: Ranks) -> None:
    def run() -> list[float]:
        rank = int(ltx.axis_index())
        step = ltx.data_parallel(lambda p, x: (p["a"] * x).sum() if rank else x.sum() * 1.0)
        return ltx.grad(step)({"a": torch.ones(2)}, torch.ones(2))["a"].tolist()

    assert list(ranks(2).run(run)) == [[0.5, 0.5]] * 2


def test_reentrant_checkpoints_that_close_over_parameters(ranks: Ranks) -> None:
    def run() -> tuple[Tensor, Tensor]:
        def plain(params: dict[str, Tensor], x: Tensor) -> Tensor:
            return ((x @ params["a"]) @ params["a"]).square().mean()

        def inside(params: dict[str, Tensor], x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            part = torch.utils.checkpoint.checkpoint(lambda y: y @ params["a"], x, use_reentrant=True)
            return (part @ params["a"]).square().mean()

        params, x = {"a": drawn()["a"]}, torch.ones(4, SIDE)
        return ltx.grad(ltx.data_parallel(inside, STRATEGY))(params, x)["a"], torch.func.grad(plain)(params, x)["a"]

    for grad, expected in ranks(2).run(run):
        torch.testing.assert_close(grad, expected)


def test_a_gradient_that_comes_twice(ranks: Ranks) -> None:
    """A Function's own backward pass brings a part of it before the bucket starts, as it would to a ``.grad``."""

    def run() -> tuple[Tensor, Tensor]:
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

        def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
            return Twice.apply(x @ p["b"], p["a"]).square().mean()

        params = {name: drawn()[name].requires_grad_() for name in ("b", "a")}
        fn(params, torch.ones(4, SIDE)).backward()
        found = ltx.grad(ltx.data_parallel(fn, STRATEGY))(
            {k: x.detach() for k, x in params.items()}, torch.ones(4, SIDE)
        )
        return found["a"], params["a"].grad

    for found, expected in ranks(2).run(run):
        torch.testing.assert_close(found, expected)
