"""Two minutes of chaos, with new seeds each time. ``make chaos CHAOS="--minutes 120"`` goes on for longer."""

from __future__ import annotations

import random
import time

import pytest

from tests.chaos.rounds import play
from tests.chaos.schedule import LOSSES, draw

LIMIT_S = 100.0


@pytest.mark.timeout(300)
def test_rounds_of_chaos(seed: int) -> None:
    rng, end = random.Random(seed), time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        drawn = rng.randrange(2**31)
        print(f"python -m tests.chaos --seed {drawn} plays this round again")
        play(drawn)


def test_a_seed_draws_the_same_troubles_and_leaves_a_rank() -> None:
    kinds = set()
    for seed in range(300):
        troubles = draw(seed, 3, 20)
        assert troubles == draw(seed, 3, 20)
        assert 1 <= len(troubles) <= 4
        assert len({trouble.rank for trouble in troubles if trouble.kind in LOSSES and trouble.rank < 3}) < 3
        kinds |= {trouble.kind for trouble in troubles}
    assert kinds == {"kill", "stop", "pause", "cut", "nan", "restart", "join"}
