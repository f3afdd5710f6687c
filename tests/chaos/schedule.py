"""What goes wrong in a round of chaos, drawn from a seed: the same seed gives the same troubles."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "pause", "cut", "nan", "restart"]

#: Those that cost a rank for good.
LOSSES = ("kill", "stop")


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong.

    Attributes:
        kind: "kill": SIGKILL. "stop": SIGSTOP until the others have gone on without it. "pause": SIGSTOP, and SIGCONT
            before anybody has missed it. "cut": all its connections to peers break. "nan": its samples are NaN.
            "restart": SIGKILL to all ranks, which start again from the last snapshot.
        rank: to which rank of the first world.
        step: before it does this step.
    """

    kind: Kind
    rank: int
    step: int


def draw(seed: int, ranks: int, steps: int) -> list[Trouble]:
    """Some troubles, one of which at most is a restart, and after which a rank is left."""
    rng = random.Random(seed)
    harmless = rng.random() < 0.5  # half of all rounds cost no rank, and have to end bit for bit as without troubles
    troubles: list[Trouble] = []
    for step in sorted(rng.sample(range(1, steps), rng.randint(1, 4))):
        kinds: list[Kind] = ["pause", "cut", "nan", "restart"]
        lost = {t.rank for t in troubles if t.kind in LOSSES}
        if any(t.kind == "restart" for t in troubles):
            kinds.remove("restart")
        if not harmless and len(lost) < ranks - 1:
            kinds += ["kill", "stop", "kill", "stop"]
        kind = rng.choice(kinds)
        troubles.append(Trouble(kind, rng.choice([rank for rank in range(ranks) if rank not in lost]), step))
    return troubles
