"""A rank that fails in a step whose ranks exchange parameters: peers are told, and nobody's state is lost."""

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
from ltx.errors import DeadlockDetectedError, ReplicaDivergedError
from ltx.strategies import Updated
from tests.contract.strategies.test_protocol import Gossip, LocalSGD, problem, trainer
from tests.kinds import OnNewAxis, Ranks


class BrokenError(Exception):
    """What a rank's own program raises."""


def fails_once(strategy: ltx.Strategy, fails_at: int) -> tuple[list[type], bool, dict[str, Tensor]]:
    """Rank 1's loss raises at a step; every rank then does that step again.

    Gives (what was raised, whether the state was as before it, the parameters in the end).
    """
    params, inputs = problem(2)
    rank, broken = int(ltx.axis_index()), []

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        if broken and broken[-1] == "now":
            broken.append("done")
            raise BrokenError
        return ((params["w"] * x).sum() + params["b"] - 1).square()

    train = ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.Adam, lr=0.1))
    state, raised, kept = train.init(params), [], True
    for step, x in enumerate(inputs):
        before = ltx.tree.map(torch.clone, state)
        broken = ["now"] if rank == 1 and step == fails_at else []
        try:
            state, _ = train(state, x[rank])
        except (BrokenError, DeadlockDetectedError) as error:
            raised.append(type(error))
            kept = kept and all(map(torch.equal, ltx.tree.flatten(before)[0], ltx.tree.flatten(state)[0]))
            state, _ = train(state, x[rank])
    return raised, kept, state.params


def undisturbed(strategy: ltx.Strategy) -> dict[str, Tensor]:
    return fails_once(strategy, -1)[2]


NODES = {"hierarchical": True, "node_size": 2}
#: Strategies whose ranks communicate in step 2, of their parameters, of their updates, or in several phases.
TALKING: dict[str, ltx.Strategy] = {
    "of one's own": LocalSGD(period=3),
    "local SGD": ltx.LocalSGDStrategy(3, 2),
    "DiLoCo": ltx.DiLoCoStrategy(3),
    "zero": ltx.ZeroStrategy(),
    "adasum": ltx.HorovodStrategy(op="adasum"),
    "ring": ltx.BaguaStrategy("low_precision_decentralized"),
    "nodes": ltx.BaguaStrategy("decentralized", **NODES),
    "ring of nodes": ltx.BaguaStrategy("low_precision_decentralized", **NODES),
}


@pytest.mark.full(but=3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("sockets", [False, True], ids=["shared memory", "sockets"])
@pytest.mark.parametrize("name", TALKING)
def test_peers_are_told_and_the_step_can_be_done_again(name: str, sockets: bool, on_new_axis: OnNewAxis) -> None:
    strategy = TALKING[name]
    (raised, kept, params), (raised_1, kept_1, params_1) = on_new_axis(lambda: fails_once(strategy, 2), sockets=sockets)
    assert (raised, raised_1) == ([DeadlockDetectedError], [BrokenError])
    assert kept
    assert kept_1
    expected, expected_1 = on_new_axis(lambda: undisturbed(strategy), sockets=sockets)
    torch.testing.assert_close(params, expected, rtol=0, atol=0)
    torch.testing.assert_close(params_1, expected_1, rtol=0, atol=0)


def test_peers_that_had_gone_on_are_told_too(on_new_axis: OnNewAxis) -> None:
    """What rank 1 had sent when it failed was all that rank 0 needed for this step, but not for the next one."""

    def run() -> tuple[str, float]:
        with pytest.raises(ReplicaDivergedError) as raised:
            fails_once(Gossip(), 3)
        return str(raised.value), ltx.psum(torch.ones(())).item()

    (said, total), (said_1, total_1) = on_new_axis(run)
    assert said.startswith("rank 0: rank 1 has left")
    assert "This rank had completed it." in said
    assert "passes completed: rank 0: 4, rank 1: 3)" in said_1
    assert (total, total_1) == (2.0, 2.0)


def test_a_rank_may_fail_alone_in_a_step_without_talk(on_new_axis: OnNewAxis) -> None:
    (raised, _, params), (raised_1, _, params_1) = on_new_axis(lambda: fails_once(LocalSGD(period=3), 3))
    assert (raised, raised_1) == ([], [BrokenError])
    assert params.keys() == params_1.keys()


def test_finish_gives_back_what_has_nothing_under_way() -> None:
    train = trainer(LocalSGD())
    state = train.init(problem(1)[0])
    assert train.finish(state) is not None
    assert train.finish(state).params["w"].equal(state.params["w"])


# --- Steps whose ranks communicate after the optimizer, and write to the old state once nothing can fail any more


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


def problem_of(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """(parameters: one transposed, one empty, one 0-dim; inputs by step and rank)"""
    draw = torch.Generator().manual_seed(torch.initial_seed())
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
    params, inputs = problem_of(ltx.world().size)
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


def clipped() -> ltx.optim.Optimizer:
    return ltx.optim.chain(ltx.optim.clip_by_global_norm(1.0), adam())


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("make", [adam, clipped])
@pytest.mark.parametrize("name", LATE)
def test_a_state_that_is_given_away_comes_to_the_same(
    name: str, make: Callable[[], ltx.optim.Optimizer], ranks: Ranks, seed: int
) -> None:
    n, strategy = LATE[name]

    def run(donate: Callable[[int], bool]) -> list[Tensor]:
        torch.manual_seed(seed)
        return trained(strategy, donate, make())

    kept = ranks(n).run(run, lambda rank: False)
    for donate in (lambda rank: True, lambda rank: rank == 1):
        for mine, other in zip(kept, ranks(n).run(run, donate), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


def remembering() -> ltx.optim.Optimizer:
    """Plain descent that keeps the parameters it was given, and where two of them come from."""

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return ltx.tree.map(lambda g: -0.01 * g, grads), {"last": params}

    return ltx.optim.from_functions(lambda params: {"last": ltx.tree.map(torch.clone, params)}, update)


@pytest.mark.parametrize("name", ["ring of 2", "adasum"])
def test_what_the_optimizer_has_kept_isnt_written_to(name: str, ranks: Ranks, seed: int) -> None:
    strategy = LATE[name][1]

    def run(donate: bool) -> list[Tensor]:
        torch.manual_seed(seed)
        return trained(strategy, lambda rank: donate, remembering())

    for mine, other in zip(ranks(2).run(run, False), ranks(2).run(run, True), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", ["ring of 2", "adasum"])
def test_an_interrupt_meanwhile_waits_until_the_state_is_whole(name: str, ranks: Ranks, seed: int) -> None:
    strategy = LATE[name][1]

    def run(interrupts: bool) -> tuple[int, list[Tensor]]:
        torch.manual_seed(seed)
        params, inputs = problem_of(2)
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
