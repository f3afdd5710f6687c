"""A rank that is slow: where staleness is bounded the others go on, as far as the bound, and nobody's values change."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ltx
from tests.forks import Ranks
from tests.inside import AsyncAveraging
from tests.small import make, mean_loss, values

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


def last_of(world: Ranks, rank: int) -> Any:
    while isinstance(told := world.told(rank), int):
        pass
    return told


@pytest.mark.full
@pytest.mark.covering(1, of=lambda **_: ())
@pytest.mark.parametrize("name", BOUNDED)
def test_the_others_go_on_to_the_bound(name: str) -> None:
    strategy, bound = BOUNDED[name]
    calm = Ranks(SIZE, training(strategy, slow=False))
    try:
        expected = [last_of(calm, rank) for rank in range(SIZE)]
    finally:
        calm.close()
    world = Ranks(SIZE, training(strategy, slow=True), heartbeat_s=60)
    try:
        assert last_of(world, 1) == "stops"
        for rank in (0, 2):
            assert [world.told(rank) for _ in range(bound)] == list(range(1, bound + 1))
            assert not world.lines[rank].poll(0.3), f"rank {rank} went past a step that needs the stopped one"
        os.kill(world.processes[1].pid, signal.SIGCONT)
        for rank in range(SIZE):
            assert last_of(world, rank) == expected[rank]
    finally:
        world.close()
