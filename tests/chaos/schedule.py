"""What goes wrong in a round of chaos, drawn from a seed: the same seed gives the same troubles."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "pause", "cut", "nan", "restart", "join"]

#: Those that cost a rank for good.
LOSSES = ("kill", "stop")


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong.

    Attributes:
        kind: "kill": SIGKILL. "stop": SIGSTOP until the others have gone on without it. "pause": SIGSTOP, and SIGCONT
            before anybody has missed it. "cut": all its connections to peers break. "nan": its samples are NaN.
            "restart": SIGKILL to all ranks, which start again from the last snapshot. "join": a newcomer comes, such as
            one in place of a rank that was killed.
        rank: to which rank of the first world; above these, to which newcomer.
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
    newcomers = 0
    for step in sorted(rng.sample(range(1, steps), rng.randint(1, 4))):
        kinds: list[Kind] = ["pause", "cut", "nan", "restart"]
        lost = {t.rank for t in troubles if t.kind in LOSSES}
        if any(t.kind == "restart" for t in troubles):
            kinds.remove("restart")
        here = [rank for rank in range(ranks + newcomers) if rank not in lost]
        if not harmless and len([rank for rank in here if rank < ranks]) > 1:
            kinds += ["kill", "stop", "kill", "stop"]
        if not harmless and len(here) <= ranks:
            kinds += ["join"] * (1 + 3 * (len(here) < ranks))
        kind = rng.choice(kinds)
        # Newcomers say nothing of others that are to come.
        troubles.append(Trouble(kind, rng.choice([who for who in here if kind != "join" or who < ranks]), step))
        newcomers += kind == "join"
    return troubles
