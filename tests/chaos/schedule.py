"""What goes wrong in a round of chaos, drawn from a seed: the same seed gives the same troubles."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong.

    Attributes:
        kind: "kill": SIGKILL, and after `lasts_s` it is started again. "stop": SIGSTOP, and after `lasts_s` SIGCONT.
        who: to which replica, or to which rank.
        after_s: so long after the trouble before has begun, or the training.
        lasts_s: see `kind`.
    """

    kind: Literal["kill", "stop"]
    who: int
    after_s: float
    lasts_s: float


def draw(seed: int, count: int, troubles: int = 3) -> list[Trouble]:
    """Some troubles to one or several of `count` replicas, at any moment; one of them has none."""
    rng = random.Random(seed)
    spared = rng.randrange(count)  # if all were lost, their state would be too
    return [
        Trouble(
            rng.choice(("kill", "stop")),
            rng.choice([who for who in range(count) if who != spared]),
            rng.uniform(0.0, 3.0),
            rng.choice((rng.uniform(0.0, 1.0), rng.uniform(0.0, 8.0))),
        )
        for _ in range(rng.randint(1, troubles))
    ]
