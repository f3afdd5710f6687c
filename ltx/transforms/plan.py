"""plan: the time of a training step on a network, before there is one.

    T(sum of B bytes over n ranks) = 2 (n-1) alpha + 2 (n-1)/n B / beta

and likewise for the other collectives: alpha is the latency of a message, beta the bandwidth of a rank's link (Hockney,
"The communication challenge for MPP", 1994; Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005, section 4). What is sent is what the strategy asks for when its own methods are driven on
shapes (:mod:`ltx.transforms.on_shapes`). When it is sent is found by going through a step: a rank computes, its link
carries one message after the other, and a rank waits where the strategy lands what it has started.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ltx import hooks, tree
from ltx.errors import InputError
from ltx.optim import Optimizer
from ltx.strategies import Strategy
from ltx.sync.exchange import Exchange
from ltx.transforms.explain import aligned, format_bytes
from ltx.transforms.on_shapes import BucketExplanation, Collective, Issues, Lands, Starts, Steps
from ltx.typing import Tree

#: Parts of a step's own time: forward pass, backward pass, optimizer.
FORWARD, BACKWARD, OPTIMIZER = 0.3, 0.6, 0.1

#: Messages that follow one another in a collective of n ranks, by operation.
MESSAGES: dict[str, Callable[[int], int]] = {
    "sum": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "exchange": lambda n: n - 1,
    "permute": lambda n: 1,
}

#: Seconds that one core takes for a float32 number: packing, encoding, adding up, decoding. Medians of
#: ``python -m benchmarks.plan --codecs`` on one core of an AMD EPYC.
CODEC_S: dict[str, float] = {
    "AllReduce": 1e-9,
}


@dataclass(frozen=True)
class Network:
    """What connects the ranks, as :func:`plan` is told of it."""

    bandwidth: float
    latency: float

    def seconds(self, collective: Collective) -> float:
        """How long a collective takes, alone on the link."""
        messages = MESSAGES[collective.operation](collective.ranks)
        return messages * self.latency + 8 * collective.nbytes / self.bandwidth


@dataclass(frozen=True)
class Traffic:
    """What one kind of traffic is in a mean step.

    Attributes:
        kind: "gradients", "exchanges", "in the background", "headers".
        nbytes: bytes that a rank sends.
        collectives: how many.
        link_s: how long they take on the link.
    """

    kind: str
    nbytes: float = 0.0
    collectives: float = 0.0
    link_s: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What a mean training step costs; ``print`` shows it as a table.

    Attributes:
        strategy: what was planned.
        world: the number of ranks.
        steps: over which the mean was taken.
        time_s: seconds a step.
        compute_s: seconds of the step's own work, as they were given.
        codec_s: seconds that the rank spends besides on packing, encoding and decoding.
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
        """Bytes that a rank sends a step, without headers: the mean of :attr:`Explanation.bytes`."""
        return sum(t.nbytes for t in self.traffic if t.kind != "headers")

    @property
    def collectives(self) -> float:
        """Collectives a step, without headers."""
        return sum(t.collectives for t in self.traffic if t.kind != "headers")

    @property
    def link_s(self) -> float:
        """Seconds a step during which a rank's link is busy."""
        return sum(t.link_s for t in self.traffic)

    @property
    def waiting_s(self) -> float:
        """Seconds a step that a rank stands still."""
        return max(0.0, self.time_s - self.compute_s - self.codec_s)

    def __str__(self) -> str:
        many = f"{self.world:,} rank{'' if self.world == 1 else 's'}"
        length = f"mean of {len(self.steps):,} steps" if len(self.steps) > 1 else "a step"
        head = f"{type(self.strategy).__name__} on {many}, {length}: {format_seconds(self.time_s)}"
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

    def _repr_html_(self) -> str:
        import html  # a dictionary of two thousand names, for notebooks alone

        return f"<pre>{html.escape(str(self))}</pre>"


def format_seconds(seconds: float) -> str:
    """Three digits, with a unit.

    >>> format_seconds(0.0123), format_seconds(42.0), format_seconds(1e-5)
    ('12.3 ms', '42 s', '10 us')
    """
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 or seconds == 0 else ("us", 1e6)
    return f"{seconds * size:,.3g} {unit}" if seconds * size < 1000 else f"{seconds * size:,.0f} {unit}"


@dataclass
class _Clock:
    """A rank going through steps: what it does, and what its link does, one thing after the other each.

    Attributes:
        now: when the rank is done with what it does.
        link_free: when the link is done with what it was given.
        codec_s: the rank's time with packing, encoding, decoding so far.
    """

    network: Network
    compute_s: float
    codec: Callable[[hooks.CommHook], float]
    now: float = 0.0
    link_free: float = 0.0
    codec_s: float = 0.0
    landing: dict[Exchange, float] = field(default_factory=dict)

    def step(self, issues: Issues) -> None:
        """Go through one step."""
        self._events(issues.begun)
        self.now += FORWARD * self.compute_s
        if issues.header is not None:
            self._carry(self.now, issues.header)
        self._backward(issues.buckets)
        self._events(issues.updated[: self._update_at(issues)])
        self.now += OPTIMIZER * self.compute_s
        self._events(issues.updated[self._update_at(issues) :])
