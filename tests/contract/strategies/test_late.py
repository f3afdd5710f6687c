"""Steps whose ranks communicate after the optimizer, and write to the old state once nothing can fail any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import ltx
from ltx.strategies import Updated
from tests.kinds import Ranks

Overlap = Literal["backward", "update"]

SMALL: Any = {"bucket_bytes": 64, "first_bucket_bytes": 64}
LATE: dict[str, tuple[int, ltx.Strategy]] = {
    "ring of 2": (2, ltx.BaguaStrategy("low_precision_decentralized")),
    "ring of 2, small buckets": (2, ltx.BaguaStrategy("low_precision_decentralized", **SMALL)),
    "ring of 3": (3, ltx.BaguaStrategy("low_precision_decentralized")),
    "ring now and then": (2, ltx.BaguaStrategy("low_precision_decentralized", communication_interval=2)),
    "nodes": (4, ltx.BaguaStrategy("low_precision_decentralized", hierarchical=True, node_size=2)),
    "adasum": (2, ltx.HorovodStrategy(op="adasum")),
    "adasum, small buckets": (2, ltx.HorovodStrategy(op="adasum", **SMALL)),
    "adasum, fp16": (2, ltx.HorovodStrategy(op="adasum", compression="fp16")),
    "zero": (2, ltx.ZeroStrategy(**SMALL)),
    "zero of 3": (3, ltx.ZeroStrategy()),
    "adasum, passes": (2, ltx.HorovodStrategy(op="adasum", backward_passes_per_step=2)),
}


def problem(n: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """(parameters: one transposed, one empty, one 0-dim; inputs by step and rank)"""
    draw = torch.Generator().manual_seed(seed)
    params = {
        "w": torch.randn(5, 7, generator=draw).t(),
        "b": torch.randn(11, generator=draw),
        "none": torch.zeros(0),
        "scale": torch.ones(()),
    }
    return params, torch.randn(5, n, 7, generator=draw)


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["scale"] * (x @ params["w"])).square().sum() + (params["b"] - 1).square().sum()


def trained(
    seed: int,
    strategy: ltx.Strategy,
    donate: Callable[[int], bool],
    optimizer: ltx.optim.Optimizer,
    overlap: Overlap = "backward",
    wrap: Callable[[Any], Any] = lambda step: step,
    fn: Callable[..., Any] | None = None,
) -> list[Tensor]:
    """All tensors of the state after some steps, of which the old one was given away or not; then all losses.

    `wrap`: what the data-parallel step of `fn`, or of :func:`loss`, is wrapped in.
    """
    params, inputs = problem(ltx.world().size, seed)
    rank = ltx.world().rank
    step = wrap(ltx.data_parallel(fn or loss, strategy))
    train = ltx.train_step(step, optimizer, donate=donate(rank), overlap=overlap)
    state, losses = train.init(params), []
    for x in inputs:
        before = ltx.tree.map(torch.clone, state)
        following, metrics = train(state, x[rank])
        losses.append(metrics.loss)
        if not donate(rank):
            for old, kept in zip(ltx.tree.flatten(before)[0], ltx.tree.flatten(state)[0], strict=True):
                assert torch.equal(old, kept)
        state = following
    return [*(x.clone() for x in ltx.tree.flatten(state)[0]), *losses]


def adam() -> ltx.optim.Optimizer:
    return ltx.optim.from_torch(torch.optim.Adam, lr=0.01)


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("make", [adam, (lambda: ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), adam()))])
@pytest.mark.parametrize("name", LATE)
def test_a_state_that_is_given_away_comes_to_the_same(
    name: str, make: Callable[[], ltx.optim.Optimizer], ranks: Ranks, seed: int
) -> None:
    n, strategy = LATE[name]

    def run(donate: Callable[[int], bool]) -> list[Tensor]:
        return trained(seed, strategy, donate, make())

    kept = ranks(n).run(run, lambda rank: False)
    for donate in (lambda rank: True, lambda rank: rank == 1):
        for mine, other in zip(kept, ranks(n).run(run, donate), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", ["ring of 2", "adasum"])
def test_an_interrupt_meanwhile_waits_until_the_state_is_whole(name: str, ranks: Ranks, seed: int) -> None:
    strategy = LATE[name][1]

    def run(interrupts: bool) -> tuple[int, list[Tensor]]:
        params, inputs = problem(2, seed)
        rank, inner, came = ltx.world().rank, type(strategy), 0
        update = inner.update

        def interrupted(self: Any, *args: Any) -> Updated:
            updated = update(self, *args)

            def finish() -> None:
                os.kill(os.getpid(), signal.SIGINT)
                assert updated.finish is not None
                updated.finish()

            return replace(updated, finish=finish)

        train = ltx.train_step(ltx.data_parallel(loss, strategy), adam())
        state = train.init(ltx.tree.map(torch.Tensor.contiguous, params))  # others aren't written to
        with pytest.MonkeyPatch.context() as patch:
            if interrupts:
                patch.setattr(inner, "update", interrupted)
            for x in inputs:
                step = state.step
                try:
                    state, _ = train(state, x[rank])
                except KeyboardInterrupt:
                    came += 1
                assert state.step == step + 1
        return came, [x.clone() for x in ltx.tree.flatten(state)[0]]

    for (came, mine), (_, expected) in zip(ranks(2).run(run, True), ranks(2).run(run, False), strict=True):
        assert came == 5
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)
