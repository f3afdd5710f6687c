"""The ledger records what each collective sends and when, and when steps compute.

It is off outside of :func:`recorded`, so that other steps cost nothing. :func:`ltx.profile.record` reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Event:
    """One collective. Times are the host's time.perf_counter seconds; after the recording, the accelerator's own."""

    channel: str  # its name: "user", "background", "simulated", or "buckets 0", "buckets 1", .. by phases of buckets
    operation: str  # the collective, such as "psum" or "all_gather"
    label: str  # what it is for, such as "psum" or "bucket 3"
    nbytes: int  # the bytes that this rank sends for it, by the ring's count: 2(n-1)/n of the buffer for a sum
    issued_s: float
    completed_s: float | None = None
    waited_s: float = 0.0  # the time for which the wait blocked this rank
    ranks: int = 1  # the number of ranks that take part
    #: While recording on an accelerator: the events at which the device began and completed the collective.
    marks: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def kind(self) -> str:
        """The label without the number that "bucket", "exchange" and "background" have."""
        return self.label.rpartition(" ")[0] or self.label

    @property
    def bucket(self) -> int | None:
        """The number of the gradient bucket that the collective reduces; None for other collectives."""
        return int(self.label.rpartition(" ")[2]) if self.kind == "bucket" else None


@dataclass(frozen=True)
class Packed:
    """A bucket that was reduced: of gradients, or of an exchange of the strategy."""

    label: str  # as that of its collectives, such as "bucket 3"
    hook: str
    nbytes: int  # of its tensors, before the hook


@dataclass
class Span:
    """A stretch of computing. Spans nest: the other spans of an :class:`ltx.train_step` lie in its "step"."""

    name: str  # "step", "forward", "backward" or "update"
    began_s: float  # time.perf_counter; on a GPU, when this process queued the work
    ended_s: float | None = None


@dataclass
class Recording:
    """The events and spans of this rank: the first fields of a :class:`ltx.profile.Trace`."""

    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    packed: list[Packed] = field(default_factory=list)
    device_waited_s: float = 0.0
    device_waits: list[tuple[Any, Any]] = field(default_factory=list, repr=False)
    _clock: tuple[Any, float] | None = field(default=None, repr=False)  # a mark on the device, and its host time

    def note_device(self, device: torch.device) -> None:
        """Call this when work on an accelerator is recorded: the first time, its clock is compared with the host's."""
        if self._clock is None and (beginning := mark(device)) is not None:
            beginning.synchronize()
            self._clock = beginning, time.perf_counter()

    def take_device_times(self) -> None:
        """Replace marks on an accelerator by times. It waits until the device has reached the marks."""
        if self._clock is not None:
            beginning, began_s = self._clock
            for event in self.events:
                if len(event.marks) == 2:
                    event.marks[1].synchronize()
                    event.issued_s, event.completed_s = (began_s + beginning.elapsed_time(x) / 1e3 for x in event.marks)
            for first, last in self.device_waits:
                last.synchronize()
                self.device_waited_s += first.elapsed_time(last) / 1e3
        for event in self.events:
            event.marks = []
        self.device_waits, self._clock = [], None


#: Those that are on. Empty on the way of a step, which asks before it notes anything.
recordings: list[Recording] = []


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """A context that records into `recording`, and still into the recordings that were on before."""
    recordings.append(recording)
    try:
        yield
    finally:
        # Compare by identity: two empty recordings are equal.
        recordings[:] = [other for other in recordings if other is not recording]
        recording.take_device_times()


def mark(device: torch.device) -> Any:
    """A timed event of the current stream, after all earlier work; None on the CPU."""
    if device.type == "cpu":
        return None
    return torch.accelerator.current_stream(device).record_event(torch.Event(device, enable_timing=True))


def note(channel: str, operation: str, label: str, nbytes: Callable[[], int], ranks: int) -> Event | None:
    """Record an issued collective and return its entry; None outside of a recording, where `nbytes` isn't called."""
    if not recordings:
        return None
    event = Event(channel, operation, label, nbytes(), time.perf_counter(), ranks=ranks)
    for recording in recordings:
        recording.events.append(event)
    return event


def note_packed(kind: str, hook: Any, bucket: Any) -> None:
    """Record a bucket whose reduction begins; `kind`: the word for it."""
    for recording in recordings:
        recording.packed.append(Packed(f"{kind} {bucket.index}", repr(hook), bucket.nbytes))


def note_on_device(event: Event, device: torch.device) -> None:
    """Record that the accelerator's current stream begins or ends `event` here."""
    for recording in recordings:
        recording.note_device(device)
    event.marks.append(mark(device))


def note_device_wait(began: Any, device: torch.device) -> None:
    """Record that an accelerator's current stream has been made to wait for a collective since the mark `began`."""
    ended = mark(device)
    for recording in recordings:
        recording.note_device(device)
        recording.device_waits.append((began, ended))


def span(name: str) -> AbstractContextManager[None]:
    """Record the time within a ``with`` block as computing; outside of a recording do nothing."""
    return _noting(name) if recordings else NOTHING


#: A context that does nothing.
NOTHING = nullcontext()


@contextmanager
def _noting(name: str) -> Iterator[None]:
    noted = Span(name, time.perf_counter())
    for recording in recordings:
        recording.spans.append(noted)
    try:
        yield
    finally:
        noted.ended_s = time.perf_counter()
