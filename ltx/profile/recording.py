"""Recording a piece of program: every collective with its times and bytes, and when steps computed."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ltx.core.base.arguments import checked
from ltx.core.comm.ledger import recorded
from ltx.profile.traces import Trace

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
        around.enter_context(recorded(trace))
        try:
            yield trace
        finally:
            trace.rank = _rank()


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
        if threads_name:
            event.pop("ts", None)  # a name has no time, and torch's is none of the day
        else:
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
