"""A round of chaos of each kind, with new seeds each time.

``make chaos CHAOS="--minutes 120"`` goes on for longer.
"""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest

from tests.chaos.rounds import play
from tests.chaos.schedule import draw


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["restarts", "three replicas", "two replicas"])
def test_a_round_of_chaos(kind: str, seed: int) -> None:
    if kind != "restarts" and find_spec("torchft") is None:
        pytest.skip("needs pip install 'ltx[torchft]'")
    rng, drawn = random.Random(seed), -1
    while {"restarts": drawn % 3 != 0, "two replicas": drawn % 6 not in (2, 4)}.get(kind, drawn % 6 not in (1, 5)):
        drawn = rng.randrange(2**31)
    print(f"python -m tests.chaos --seed {drawn} plays this round again")
    play(drawn)


def test_a_seed_draws_the_same_troubles_and_spares_one() -> None:
    kinds = set()
    for seed in range(300):
        troubles = draw(seed, 3)
        assert troubles == draw(seed, 3)
        assert 1 <= len(troubles) <= 3
        assert len({trouble.who for trouble in troubles}) < 3
        kinds |= {trouble.kind for trouble in troubles}
    assert kinds == {"kill", "stop"}
