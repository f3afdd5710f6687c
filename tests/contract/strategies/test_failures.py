"""A rank that fails in a step whose ranks exchange parameters, and one that is slow: nobody's state is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import CallFailedError, DeadlockDetectedError
from tests import forks
from tests.contract.strategies.table import NODES
from tests.contract.strategies.test_protocol import LocalSGD, problem, trainer
from tests.inside import AsyncAveraging
from tests.kinds import OnNewAxis, Started
from tests.small import make, mean_loss, values
from tests.train_on import on_ranks, said


class BrokenError(Exception):
    """What a rank's own program raises."""


def fails_once(strategy: ltx.Strategy, fails_at: int) -> tuple[list[type], bool, dict[str, Tensor]]:
    """Rank 1's loss raises at a step; every rank then does that step again, in a new world.

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
            ltx.init()
            state, _ = train(state, x[rank])
    return raised, kept, state.params


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
    expected, expected_1 = on_new_axis(lambda: fails_once(strategy, -1)[2], sockets=sockets)
    torch.testing.assert_close(params, expected, rtol=0, atol=0)
    torch.testing.assert_close(params_1, expected_1, rtol=0, atol=0)


def test_a_rank_may_fail_alone_in_a_step_without_talk(on_new_axis: OnNewAxis) -> None:
    (raised, _, params), (raised_1, _, params_1) = on_new_axis(lambda: fails_once(LocalSGD(period=3), 3))
    assert (raised, raised_1) == ([], [BrokenError])
    assert params.keys() == params_1.keys()


@on_ranks(1)
def test_a_rank_that_is_alone_goes_on() -> None:
    """It has begun to send, and nobody can be out of step with it: its third backward pass fails and is done again."""

    def fail(_: Tensor) -> None:
        if broken:
            raise BrokenError

    def loss(w: Tensor, x: Tensor) -> Tensor:
        total = (w * x).square().sum()
        total.register_hook(fail)
        return total

    train = ltx.train_step(
        ltx.data_parallel(loss, ltx.DDPStrategy(comm_hook="fp16")), ltx.optim.from_torch(torch.optim.Adam, lr=0.1)
    )
    found = []
    for at in (None, 2):
        state = train.init(torch.ones(3))
        for step in range(4):
            broken, x = step == at, torch.arange(3.0) + step
            if broken:
                said(BrokenError, train, state, x)
                broken = False
            state, _ = train(state, x)
        found.append(state.params)
    assert torch.equal(*found)


def test_finish_gives_back_what_has_nothing_under_way() -> None:
    train = trainer(LocalSGD())
    state = train.init(problem(1)[0])
    assert train.finish(state) is not None
    assert train.finish(state).params["w"].equal(state.params["w"])


def rounds_apart(again: str) -> Any:
    """Ranks wait for different numbers of an asynchronous training's rounds; its state is dropped with one under way.

    Then all ranks fail in a step of another training, and go on with it; or the first begins anew, from other values.
    """
    rank, broken = int(ltx.axis_index()), [False]

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        if broken[0]:
            raise BrokenError
        return 0 * (params["w"] * x).sum()

    trains = {
        name: ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        for name, strategy in (("async", AsyncAveraging(sync_interval_ms=0)), ("mean", ltx.DDPStrategy()))
    }
    states = {name: train.init({"w": torch.full((3,), 1000.0)}) for name, train in trains.items()}
    for step in range(2, 4 + 3 * rank):  # more of them: rank 1 has begun a round more, and waited for one more
        states["async"], _ = trains["async"](states["async"], torch.ones(3))
        if step == 3:
            ltx.barrier()  # the first round is complete
    ltx.barrier()
    if again == "async":
        states["async"] = trains["async"].init({"w": torch.ones(3)})
    else:
        broken[0] = True
        said(BrokenError, trains["mean"], states["mean"], torch.ones(3))
        broken[0] = False
    for _ in range(3):
        states[again], _ = trains[again](states[again], torch.ones(3))
    return trains[again].finish(states[again]).params["w"].tolist()


def side_by_side(schedule: tuple[int, int] | None) -> list[float]:
    """Two trainings by turns, of other values, whose ranks are at steps of their own."""
    rank, strategy = int(ltx.axis_index()), AsyncAveraging(sync_interval_ms=0, schedule=schedule)
    sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
    trains = [ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum(), strategy), sgd) for _ in range(2)]
    states = [train.init(torch.full((2,), value)) for train, value in zip(trains, (1000.0, 1.0), strict=True)]
    for turn in range(8 if schedule else 100):  # by the clock until a round is complete and the next one due
        for which in (0, 1) if rank == 0 or schedule else (0, 1, 1)[turn % 2 :]:
            states[which], _ = trains[which](states[which], torch.zeros(2))
    return [train.finish(state).params[0].item() for train, state in zip(trains, states, strict=True)]


def test_two_trainings_by_the_clock_are_refused_beside_each_other(on_new_axis: OnNewAxis) -> None:
    assert [*on_new_axis(lambda: side_by_side((2, 1)))] == [[1000.0, 1.0]] * 2
    with pytest.raises(CallFailedError, match=r"since this training's last round another .* by its own clock"):
        on_new_axis(lambda: side_by_side(None))


@pytest.mark.parametrize(("again", "value"), [("mean", 1000.0), ("async", 1.0)])
def test_rounds_of_a_dropped_state_count_for_nothing(again: str, value: float, on_new_axis: OnNewAxis) -> None:
    assert [*on_new_axis(lambda: rounds_apart(again))] == [[value] * 3] * 2


SIZE, STEPS, SLOW_FROM = 3, 16, 5

#: Strategies, and the number of steps after which the others wait for one that has stopped after SLOW_FROM.
BOUNDED = {
    "local SGD": (ltx.LocalSGDStrategy(period=8), 8),
    "DiLoCo": (ltx.DiLoCoStrategy(period=8), 7),
    "DiLoCo, sent ahead": (ltx.DiLoCoStrategy(period=8, fragment_sync_delay=2), 7),
    "async averaging": (AsyncAveraging(schedule=(8, 4)), 12),
}


def training(strategy: ltx.Strategy, slow: bool) -> Callable[[Callable[[Any], None]], Any]:
    """A rank of it; tells each step that is done, and with `slow` rank 1 stops itself on the way."""

    def body(tell: Callable[[Any], None]) -> Any:
        train, state = make(strategy, mean_loss)
        rank = ltx.world().rank
        for step in range(STEPS):
            if slow and rank == 1 and step == SLOW_FROM:
                tell("stops")
                os.kill(os.getpid(), signal.SIGSTOP)
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            state, _ = train(state, x, x.sin().sum(1))
            tell(state.step)
        return values(train.finish(state))

    return body


def last_of(world: forks.Ranks, rank: int) -> Any:
    while isinstance(told := world.told(rank), int):
        pass
    return told


@pytest.mark.full
@pytest.mark.covering(1, of=lambda **_: ())
@pytest.mark.parametrize("name", BOUNDED)
def test_the_others_go_on_to_the_bound(name: str, started: Started) -> None:
    strategy, bound = BOUNDED[name]
    calm = started(SIZE, training(strategy, slow=False))
    expected = [last_of(calm, rank) for rank in range(SIZE)]
    world = started(SIZE, training(strategy, slow=True), heartbeat_s=60)
    assert last_of(world, 1) == "stops"
    for rank in (0, 2):
        assert [world.told(rank) for _ in range(bound)] == list(range(1, bound + 1))
        assert not world.lines[rank].poll(0.3), f"rank {rank} went past a step that needs the stopped one"
    os.kill(world.processes[1].pid, signal.SIGCONT)
    for rank in range(SIZE):
        assert last_of(world, rank) == expected[rank]
