"""The ledger: what each issue put on the wire, and when.

``ltx.record()`` is the one way to read it. Counting is off unless somebody records, so that a step that nobody looks
at pays nothing for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Event:
    """One issue on the wire.

    Attributes:
        channel: the channel's name: "user", "buckets" or "background".
        operation: what was issued, as "sum" or "all_gather".
        label: what it was issued for, as "psum" or "bucket 3".
        nbytes: bytes that this rank sends for it, by the ring's count: 2(n-1)/n of the buffer for a sum.
        issued_s, landed_s: when it was issued and when it was complete (time.perf_counter; seconds).
        waited_s: for how long this rank stood still waiting for it.
    """

    channel: str
    operation: str
    label: str
    nbytes: int
    issued_s: float
    landed_s: float | None = None
    waited_s: float = 0.0

    @property
    def kind(self) -> str:
        """The label without a number behind it: "bucket", "exchange" and "background" have one."""
        return self.label.rpartition(" ")[0] or self.label

    @property
    def bucket(self) -> int | None:
        """The bucket of gradients that this was issued for; None for anything else."""
        return int(self.label.rpartition(" ")[2]) if self.kind == "bucket" else None


@dataclass
class Trace:
    """What a recording has seen so far; it can be read while it goes on."""

    events: list[Event] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(event.nbytes for event in self.events)

    @property
    def buckets(self) -> list[Event]:
        """What was issued for gradients, and that :func:`ltx.explain` counts: without headers and a user's own."""
        return [event for event in self.events if event.bucket is not None]

    @property
    def comm_s(self) -> float:
        """Seconds during which at least one collective was under way."""
        spans = sorted((e.issued_s, e.landed_s) for e in self.events if e.landed_s is not None)
        total, end = 0.0, float("-inf")
        for start, stop in spans:
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    @property
    def waited_s(self) -> float:
        """Seconds that this rank stood still for collectives."""
        return sum(event.waited_s for event in self.events)

    @property
    def hidden(self) -> float:
        """The part of the communication, 0 to 1, that went on while this rank computed; 1 if there was none."""
        total = self.comm_s
        return 1.0 if total <= 0.0 else max(0.0, 1.0 - self.waited_s / total)


_recording: list[Trace] = []


@contextmanager
def record() -> Iterator[Trace]:
    """Record every issue on the wire of this process.

    What each rank sees: its own issues. Recordings nest; each sees everything.

    Example:
        >>> import ltx
        >>> with ltx.record() as trace:
        ...     pass  # steps
        >>> trace.bytes, trace.hidden
        (0, 1.0)
    """
    trace = Trace()
    _recording.append(trace)
    try:
        yield trace
    finally:
        # By identity: two empty traces are equal.
        _recording[:] = [other for other in _recording if other is not trace]


def note(channel: str, operation: str, label: str, nbytes: int) -> Event | None:
    """Enter an issue; None if nobody records."""
    if not _recording:
        return None
    event = Event(channel, operation, label, nbytes, time.perf_counter())
    for trace in _recording:
        trace.events.append(event)
    return event
