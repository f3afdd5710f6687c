"""What a training step costs: what :func:`ltx.profile.plan` gives, as a value and as a table."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ltx import hooks
from ltx.estimate.formats import Shown, aligned, format_bytes, format_seconds
from ltx.strategies import Strategy


@dataclass(frozen=True)
class Traffic:
    """What one kind of traffic is in a mean step.

    Attributes:
        kind: "gradients", "exchanges", "in the background", "summaries".
        nbytes: bytes that a rank sends.
        collectives: how many.
        link_s: how long they take on the link.
    """

    kind: str
    nbytes: float = 0.0
    collectives: float = 0.0
    link_s: float = 0.0


@dataclass(frozen=True)
class Cost(Shown):
    """What a mean training step costs; ``print`` shows it as a table.

    Attributes:
        strategy: what was planned.
        world: the number of ranks.
        steps: over which the mean was taken.
        time_s: seconds a step.
        compute_s: seconds of the step's own work, as they were given.
        codec_s: seconds that the rank spends besides on packing, encoding and decoding, and on copies of what a step
            begins with where it communicates after the optimizer.
        traffic: by kind.
        notes: what a reader should know besides.
    """

    strategy: Strategy
    world: int
    steps: range
    time_s: float
    compute_s: float
    codec_s: float
    traffic: tuple[Traffic, ...]
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_rank(self) -> float:
        """Bytes that a rank sends a step, without step summaries: the mean of :attr:`Explanation.bytes`."""
        return sum(t.nbytes for t in self.traffic if t.kind != "summaries")

    @property
    def collectives(self) -> float:
        """Collectives a step, without step summaries."""
        return sum(t.collectives for t in self.traffic if t.kind != "summaries")

    @property
    def link_s(self) -> float:
        """Seconds a step during which a rank's link is busy."""
        return sum(t.link_s for t in self.traffic)

    @property
    def waiting_s(self) -> float:
        """Seconds a step that a rank waits."""
        return max(0.0, self.time_s - self.compute_s - self.codec_s)

    def __str__(self) -> str:
        many = f"{self.world:,} rank{'' if self.world == 1 else 's'}"
        length = f"mean of {len(self.steps):,} steps" if len(self.steps) > 1 else "a step"
        head = f"{short(self.strategy)} on {many}, {length}: {format_seconds(self.time_s)}"
        rows = [
            (t.kind, format_bytes(round(t.nbytes)), f"{t.collectives:,.4g}", format_seconds(t.link_s))
            for t in self.traffic
        ]
        table = (
            aligned(("traffic", "sent", "collectives", "on the link"), rows, (False, True, True, True)) if rows else []
        )
        parts = (
            f"computing {format_seconds(self.compute_s)}, packing and encoding {format_seconds(self.codec_s)}, "
            f"waiting {format_seconds(self.waiting_s)}"
        )
        gaps = [""] if rows else []
        return "\n".join([head, *gaps, *table, *gaps, parts, *(f"note: {text}" for text in self.notes)])


def short(strategy: Strategy) -> str:
    """A strategy with those of its fields that aren't at their defaults."""
    said = ((x.name, getattr(strategy, x.name), x.default) for x in fields(strategy))
    shown = ", ".join(f"{name}={value!r}" for name, value, default in said if not _same(value, default))
    return f"{type(strategy).__name__}({shown})"


def _same(value: object, default: object) -> bool:
    named = hooks.NAMED.get(default) if isinstance(default, str) else None
    return value == (default if named is None else getattr(hooks, named)())
