"""The ledger: what each issue sent, and when; and when steps computed.

``ltx.profile.record()`` is the one way to read it. Counting is off outside of it, so that a step that isn't recorded
pays nothing for it. Pictures and files of it are made in :mod:`ltx.comm.timeline`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from ltx.arguments import checked
from ltx.comm.timeline import Event, Span, Trace, mark

_recording: list[Trace] = []

# Profiled events of devices are kept apart from those of threads.
_DEVICE_LANES = 1 << 32


@checked("profiler")
@contextmanager
def record(*, profiler: bool = False) -> Iterator[Trace]:
    """Record every collective that this process issues, and when its steps computed.

    What each rank sees: its own issues. Recordings nest; each sees everything. :meth:`Trace.plot` draws one and
    :meth:`Trace.save` writes it for https://ui.perfetto.dev; :func:`ltx.profile.timeline` does so for several ranks
    together.

    Args:
        profiler: also run torch's profiler, which slows steps down; its events go into the saved file, on the same
            clock.

    Example:
        >>> import ltx, torch
        >>> train = ltx.train_step(ltx.data_parallel(lambda w: w**2), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        >>> state = train.init(torch.tensor(1.0))
        >>> with ltx.profile.record() as trace:
        ...     state, metrics = train(state)
        >>> trace.bytes, trace.hidden, [span.name for span in trace.spans]
        (0, 1.0, ['step', 'forward', 'backward', 'update'])
    """
    trace = Trace(rank=_rank(), epoch_s=_epoch_s())
    with ExitStack() as around:
        if profiler:
            around.enter_context(_profiled(trace))
        _recording.append(trace)
        try:
            yield trace
        finally:
            # By identity: two empty traces are equal.
            _recording[:] = [other for other in _recording if other is not trace]
            trace.rank = _rank()
            trace.take_device_times()


@contextmanager
def _profiled(trace: Trace) -> Iterator[None]:
    """Run torch's profiler, and put its events into `trace`, on the clock of the day."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        yield
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        exported = json.loads(path.read_text())
    base_us = exported.get("baseTimeNanoseconds", 0) / 1e3
    for event in exported["traceEvents"]:
        threads_name = event["ph"] == "M" and event["name"] == "thread_name"
        if not (event["ph"] == "X" or threads_name) or not isinstance(event.get("pid"), int):
            continue
        if event["pid"] != os.getpid():  # a device and its stream
            event["tid"] = _DEVICE_LANES * (1 + event["pid"]) + int(event["tid"])
        if not threads_name:
            event["ts"] += base_us
        trace.profile.append(event)


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
    """Enter an issue; None outside of ``record()``."""
    if not _recording:
        return None
    event = Event(channel, operation, label, nbytes, time.perf_counter())
    for trace in _recording:
        trace.events.append(event)
    return event


def note_on_device(event: Event | None, device: torch.device) -> None:
    """The current stream of an accelerator comes to the beginning or the end of `event` here."""
    if event is None:
        return
    for trace in _recording:
        trace.note_device(device)
    event.marks.append(mark(device))


@contextmanager
def device_wait(device: torch.device) -> Iterator[None]:
    """Within it the current stream of an accelerator is told to wait for a collective."""
    if not _recording:
        yield
        return
    began = mark(device)
    yield
    ended = mark(device)
    for trace in _recording:
        trace.note_device(device)
        trace.device_waits.append((began, ended))


def span(name: str) -> AbstractContextManager[None]:
    """Note the time within a ``with`` block as computing; nothing at all outside of ``record()``."""
    return _noting(name) if _recording else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _noting(name: str) -> Iterator[None]:
    noted = Span(name, time.perf_counter())
    for trace in _recording:
        trace.spans.append(noted)
    try:
        yield
    finally:
        noted.ended_s = time.perf_counter()
