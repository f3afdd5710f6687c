"""A round of chaos, and with ``--full`` a minute of it, with new seeds each time.

``make chaos CHAOS="--minutes 120"`` goes on for longer.
"""

from __future__ import annotations

import random
import time

import pytest

from tests.chaos.rounds import play
from tests.chaos.schedule import LOSSES, draw


@pytest.mark.timeout(300)
@pytest.mark.parametrize("for_s", [0.0, pytest.param(60.0, marks=pytest.mark.full)])
def test_rounds_of_chaos(for_s: float, seed: int) -> None:
    rng, end = random.Random(seed), time.monotonic() + for_s
    while True:
        drawn = rng.randrange(2**31)
        print(f"python -m tests.chaos --seed {drawn} plays this round again")
        play(drawn)
        if time.monotonic() >= end:
            return


def test_a_seed_draws_the_same_troubles_and_leaves_a_rank() -> None:
    kinds = set()
    for seed in range(300):
        troubles = draw(seed, 3, 20)
        assert troubles == draw(seed, 3, 20)
        assert 1 <= len(troubles) <= 4
        assert len({trouble.rank for trouble in troubles if trouble.kind in LOSSES and trouble.rank < 3}) < 3
        kinds |= {trouble.kind for trouble in troubles}
    assert kinds == {"kill", "stop", "pause", "cut", "nan", "restart", "join"}
