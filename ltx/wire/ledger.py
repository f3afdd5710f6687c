"""The ledger: what each issue put on the wire, and when; and when steps computed.

``ltx.record()`` is the one way to read it. Counting is off unless somebody records, so that a step that nobody looks
at pays nothing for it. Pictures and files of it are made in :mod:`ltx.wire.timeline`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ltx.arguments import checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
class Span:
    """A stretch of computing. Spans nest: those of a :class:`ltx.train_step` are in its "step".

    Attributes:
        name: "step", "forward", "backward" or "update".
        began_s, ended_s: when (time.perf_counter; seconds). On a GPU, when this process queued the work.
    """

    name: str
    began_s: float
    ended_s: float | None = None


@dataclass
class Trace:
    """What a recording has seen so far; it can be read while it goes on, and pickled.

    Attributes:
        events: issues on the wire, in their order.
        spans: stretches of computing, in the order in which they began: of a train step its parts; of a data-parallel
            step that is called by itself "forward", and "backward" where ``torch.func.grad`` runs it.
        rank: this process' rank.
        epoch_s: what added to the times above gives the time of day, ``time.time()``.
        profile: events of torch's profiler, in the form of Chrome's trace files but with ``ts`` in µs of the time of
            day; with ``record(profiler=True)``.
    """

    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    rank: int = 0
    epoch_s: float = 0.0
    profile: list[dict[str, Any]] = field(default_factory=list)

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

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw computing and communication over time: :meth:`ltx.timeline.plot` of this rank alone."""
        from ltx.wire.timeline import timeline

        return timeline([self]).plot(ax)

    def save(self, path: str | Path) -> None:
        """Write a file for Perfetto: :meth:`ltx.timeline.save` of this rank alone."""
        from ltx.wire.timeline import timeline

        timeline([self]).save(path)


_recording: list[Trace] = []


@checked("profiler")
@contextmanager
def record(*, profiler: bool = False) -> Iterator[Trace]:
    """Record every issue on the wire of this process, and when its steps computed.

    What each rank sees: its own issues. Recordings nest; each sees everything. :meth:`Trace.plot` draws one and
    :meth:`Trace.save` writes it for https://ui.perfetto.dev; :func:`ltx.timeline` does so for several ranks together.

    Args:
        profiler: also run torch's profiler, which slows steps down; its events go into the saved file, on the same
            clock.

    Example:
        >>> import ltx, torch
        >>> train = ltx.train_step(ltx.data_parallel(lambda w: w**2), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        >>> state = train.init(torch.tensor(1.0))
        >>> with ltx.record() as trace:
        ...     state, metrics = train(state)
        >>> trace.bytes, trace.hidden, [span.name for span in trace.spans]
        (0, 1.0, ['step', 'forward', 'backward', 'update'])
    """
    trace = Trace(rank=_rank(), epoch_s=_epoch_s())
    with ExitStack() as around:
        if profiler:
            from ltx.wire.timeline import profiled

            around.enter_context(profiled(trace))
        _recording.append(trace)
        try:
            yield trace
        finally:
            # By identity: two empty traces are equal.
            _recording[:] = [other for other in _recording if other is not trace]
            trace.rank = _rank()


def _epoch_s() -> float:
    """The time of day when time.perf_counter() was 0. Of several readings, the one that was interrupted least."""
    readings = []
    for _ in range(5):
        before, now, after = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after - before, now - (before + after) / 2))
    return min(readings)[1]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def note(channel: str, operation: str, label: str, nbytes: int) -> Event | None:
    """Enter an issue; None if nobody records."""
    if not _recording:
        return None
    event = Event(channel, operation, label, nbytes, time.perf_counter())
    for trace in _recording:
        trace.events.append(event)
    return event


def span(name: str) -> AbstractContextManager[None]:
    """Note the time within a ``with`` block as computing; nothing at all if nobody records."""
    return _Noting(name) if _recording else _NOTHING


_NOTHING = nullcontext()


class _Noting(AbstractContextManager[None]):
    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        self._span = Span(self._name, time.perf_counter())
        for trace in _recording:
            trace.spans.append(self._span)

    def __exit__(self, *_: object) -> None:
        self._span.ended_s = time.perf_counter()
