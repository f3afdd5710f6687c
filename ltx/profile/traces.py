"""Recordings of a block of code: every collective and the times of computing; and what steps cost here, in turns."""

from __future__ import annotations

import io
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ltx.core import collectives
from ltx.core.base import tree
from ltx.core.base.arguments import brief, checked, whole
from ltx.core.base.readable import Table
from ltx.core.comm.ledger import Event, Recording, recorded
from ltx.core.comm.operations import OPERATIONS
from ltx.core.training import TrainState
from ltx.core.training.train_state import counted
from ltx.core.training.train_step import TrainStep
from ltx.errors import InputError, UnsupportedError
from ltx.profile.shown import format_bytes, format_seconds, many

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COMPUTE = "compute"


@dataclass(repr=False)
class Trace(Recording):
    """The events that a recording has seen so far; a trace can be read during the recording, and pickled.

    ``print`` shows what was sent: for the buckets of gradients, the strategy's exchanges and each other kind of
    collective, their number, sizes, hook, messages and bytes, and what went on during the backward pass.

    Attributes:
        events: the collectives issued, in order; of simulated ranks the first's buckets and exchanges, without times.
        packed: the buckets that were reduced, in the order in which their reduction began: ``label``, ``hook``, and
            ``nbytes``, those of its tensors before the hook.
        spans: the times of computing, in the order in which they began: the parts of a train step; for a data-parallel
            step that is called by itself "forward", and "backward" if ``torch.func.grad`` runs it.
        device_waited_s: seconds that an accelerator's stream waited for collectives.
        rank: this process' rank.
        epoch_s: the time of day, ``time.time()``, at which the times above were 0.
    """

    rank: int = 0
    epoch_s: float = 0.0

    def __repr__(self) -> str:
        return f"<Trace of rank {self.rank}: {many(len(self.events), 'collective')}, {format_bytes(self.bytes)} sent>"

    def _repr_png_(self) -> bytes | None:  # a notebook calls it
        return timeline([self])._repr_png_() if self.events or self.spans else None

    def __str__(self) -> str:
        messages = sum(map(_messages, self.events))
        sent = f"{format_bytes(self.bytes)} in {many(len(self.events), 'collective')}, {many(messages, 'message')}"
        if not self.events:
            return f"rank {self.rank} sent nothing"
        header = ("what", "number", "tensors", "hook", "collectives", "messages", "sent")
        table = Table(header, list(self._rows()), (False, True, False, False, False, True, True))
        return "\n".join([f"rank {self.rank} sent {sent}", "", str(table), "", self._beside()])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        hooks = {packed.label: packed.hook for packed in self.packed}
        kinds: dict[tuple[str, str], list[Event]] = {}
        for event in self.events:
            kinds.setdefault((event.kind, hooks.get(event.label, "")), []).append(event)
        for (kind, hook), events in kinds.items():
            sizes = [x.nbytes for x in self.packed if (x.label.rpartition(" ")[0], x.hook) == (kind, hook)]
            ends = dict.fromkeys(map(format_bytes, (min(sizes), max(sizes)))) if sizes else ()
            issued = Counter(event.operation for event in events)
            collectives = ", ".join(f"{count:,} {operation}" for operation, count in issued.items())
            messages, sent = f"{sum(map(_messages, events)):,}", format_bytes(sum(event.nbytes for event in events))
            yield kind, f"{len(sizes) or len(events):,}", " to ".join(ends), hook, collectives, messages, sent

    def _beside(self) -> str:
        if all(event.completed_s is None for event in self.events):
            return "without times"
        backward = [(x.began_s, x.ended_s) for x in self.spans if x.name == "backward" and x.ended_s is not None]
        parts = [(max(a, c), min(b, d)) for a, b in self._under_way() for c, d in backward]
        beside = sum(max(0.0, stop - start) for start, stop in parts)
        during = f", {format_seconds(beside)} of it during the backward pass" if backward else ""
        return f"under way for {format_seconds(self.comm_s)}{during}; waited for {format_seconds(self.waited_s)}"

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(event.nbytes for event in self.events)

    @property
    def buckets(self) -> list[Event]:
        """The events of gradient buckets."""
        return [event for event in self.events if event.bucket is not None]

    @property
    def comm_s(self) -> float:
        """Seconds during which at least one collective was under way."""
        return sum(stop - start for start, stop in self._under_way())

    def _under_way(self) -> Iterator[tuple[float, float]]:
        """The stretches of time, in order and apart, during which collectives were under way."""
        end = float("-inf")
        for start, stop in sorted((e.issued_s, e.completed_s) for e in self.events if e.completed_s is not None):
            if stop > max(start, end):
                yield max(start, end), stop
            end = max(end, stop)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank, or its accelerator, waited for collectives."""
        return sum(event.waited_s for event in self.events) + self.device_waited_s

    @property
    def hidden(self) -> float:
        """The fraction of the communication, 0 to 1, during which this rank computed; 1 if there was no communication.

        NaN if no times were measured, as on an accelerator until ``record()`` ends.
        """
        if self.events and all(event.completed_s is None for event in self.events):
            return float("nan")
        total = self.comm_s
        return 1.0 if total <= 0.0 else max(0.0, 1.0 - self.waited_s / total)


def _messages(event: Event) -> int:
    """The number of messages that a collective takes one after the other."""
    return OPERATIONS[event.operation].messages(event.ranks)


@contextmanager
def record() -> Iterator[Trace]:
    """Record every collective that this process issues, and the times in which its steps compute.

    What each rank sees: its own collectives; of simulated ranks the first one's, of buckets and exchanges. Recordings
    can be nested; each records everything. ``print(trace)`` says what was sent; :func:`ltx.profile.timeline` draws what
    one rank or several have recorded, and writes it for https://ui.perfetto.dev.

    Example:
        >>> import ltx, torch
        >>> train = ltx.train_step(ltx.data_parallel(lambda w: w**2), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        >>> state = train.init(torch.tensor(1.0))
        >>> with ltx.profile.record() as trace:
        ...     state, metrics = train(state)
        >>> trace.bytes, trace.hidden, [span.name for span in trace.spans]
        (0, 1.0, ['step', 'forward', 'backward', 'update'])

        Of simulated ranks, what one of them would send:

        >>> step = ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.DDPStrategy(comm_hook="bf16"))
        >>> with ltx.profile.record() as trace:
        ...     _ = ltx.vmap(ltx.grad(step), in_dims=(None, 0))(torch.ones(1000), torch.ones(4, 1000))
        >>> print(trace)
        rank 0 sent 3,000 B in 1 collective, 6 messages
        <BLANKLINE>
        what    number  tensors  hook    collectives  messages     sent
        ------  ------  -------  ------  -----------  --------  -------
        bucket       1  4,000 B  BF16()  1 psum              6  3,000 B
        <BLANKLINE>
        without times
    """
    # The time of day when time.perf_counter() was 0, by the least interrupted of several readings.
    readings = ((time.perf_counter(), time.time(), time.perf_counter()) for _ in range(5))
    _, epoch_s = min((after - before, now - (before + after) / 2) for before, now, after in readings)
    trace = Trace(rank=_rank(), epoch_s=epoch_s)
    with recorded(trace):
        try:
            yield trace
        finally:
            trace.rank = _rank()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class _Bar(NamedTuple):
    """A bar of the picture, with times of day; `end_s` is infinite if it hasn't ended."""

    kind: str
    name: str
    start_s: float
    end_s: float
    details: dict[str, Any]


@dataclass(frozen=True, repr=False)
class Timeline:
    """What :func:`timeline` returns; a notebook shows it as a picture."""

    traces: tuple[Trace, ...]

    def __repr__(self) -> str:
        return f"<Timeline of {many(len(self.traces), 'rank')}: {self._title()}>"

    def _repr_png_(self) -> bytes | None:
        if find_spec("matplotlib") is None:
            return None
        from matplotlib.figure import Figure

        figure, drawn = Figure(figsize=self._size(), layout="constrained"), io.BytesIO()
        self.plot(figure.subplots())
        figure.savefig(drawn)
        return drawn.getvalue()

    def _size(self) -> tuple[float, float]:
        return 10, 0.8 + 0.5 * sum(len(_tracks(trace)) for trace in self.traces)

    @property
    def start_s(self) -> float:
        """The time of day at which the first event began; 0 if there is none."""
        tracks = (bars for trace in self.traces for bars in _tracks(trace).values())
        return min((bars[0].start_s for bars in tracks if bars), default=0.0)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the recordings with matplotlib, in milliseconds since the first event.

        Each rank has a track for computing and one for each channel. The title tells how much of the communication is
        hidden behind computing (:attr:`Trace.hidden`), on the worst and on the best rank.

        Args:
            ax: axes to draw into; a new figure if None.

        Raises:
            UnsupportedError: matplotlib isn't installed.
        """
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise UnsupportedError(
                    "a timeline is drawn with matplotlib, which isn't installed: pip install matplotlib. Its "
                    "save(path) writes a file for https://ui.perfetto.dev without it."
                ) from error
            ax = pyplot.subplots(figsize=self._size(), layout="constrained")[1]
        zero, names, colors = self.start_s, list[str](), dict[str, str]()
        for trace in self.traces:
            for track, bars in _tracks(trace).items():
                row = len(names)
                names.append(f"rank {trace.rank}  {track}" if len(self.traces) > 1 else track)
                open_until: list[float] = []  # the ends of the bars that contain the next bar
                for bar in (bar for bar in bars if bar.end_s < math.inf):
                    open_until = [end for end in open_until if end >= bar.end_s] if track == _COMPUTE else []
                    height = 0.8 * 0.75 ** len(open_until)
                    label = None if bar.kind in colors else bar.kind
                    color = colors.setdefault(bar.kind, "0.85" if bar.kind == "step" else f"C{len(colors) % 10}")
                    where = [((bar.start_s - zero) * 1e3, (bar.end_s - bar.start_s) * 1e3)]
                    ax.broken_barh(where, (row - height / 2, height), facecolors=color, alpha=0.8, label=label)
                    open_until.append(bar.end_s)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel("ms")
        ax.set_title(self._title())
        if colors:
            ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return ax

    def _title(self) -> str:
        hidden = [trace.hidden for trace in self.traces if trace.events]
        if not hidden:
            return "no communication"
        shown = dict.fromkeys([f"{min(hidden):.0%}", f"{max(hidden):.0%}"])
        return f"{' to '.join(shown)} of the communication hidden"

    def save(self, path: str | Path) -> None:
        """Write the recordings as JSON for https://ui.perfetto.dev and chrome://tracing.

        A rank is a process, and its tracks are threads. Collectives that overlap on one channel get extra tracks, since
        events within a track have to nest. Times are in µs since the first event.
        """
        zero_us = self.start_s * 1e6
        events: list[dict[str, Any]] = []
        for trace in self.traces:
            events.append(_metadata("process_name", trace.rank, 0, f"rank {trace.rank}"))
            tracks: dict[str, int] = {}
            for channel, bars in _tracks(trace).items():
                ends: list[float] = []  # of the channel's tracks
                for bar in bars:
                    apart = (i for i, end in enumerate(ends) if end <= bar.start_s)
                    place = 0 if channel == _COMPUTE else next(apart, len(ends))
                    ends[place : place + 1] = [bar.end_s]
                    track = f"{channel} ({place + 1})" if place else channel
                    if track not in tracks:
                        tracks[track] = len(tracks)
                        events.append(_metadata("thread_name", trace.rank, tracks[track], track))
                    event = {"name": bar.name, "cat": bar.kind, "pid": trace.rank, "tid": tracks[track]}
                    event |= {"args": bar.details, "ts": bar.start_s * 1e6 - zero_us}
                    ended = {"ph": "X", "dur": (bar.end_s - bar.start_s) * 1e6}
                    events.append(event | (ended if bar.end_s < math.inf else {"ph": "B"}))
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@checked("traces")
def timeline(traces: Iterable[Trace]) -> Timeline:
    """The recordings of several ranks on one time axis: ``.plot()`` draws them, ``.save(path)`` writes a file.

    Args:
        traces: what :func:`ltx.profile.record` gave on each rank, such as what a run on an ``ltx.Pool`` returned.

    Raises:
        InputError: there is no trace, or something isn't one.

    Example:
        >>> import ltx
        >>> with ltx.profile.record() as trace:
        ...     pass  # steps
        >>> ltx.profile.timeline([trace]).save("/dev/null")

    Source: the trace event format of Chrome; Horovod's timeline.
    """
    found = tuple(traces)
    wrong = [type(trace).__name__ for trace in found if not isinstance(trace, Trace)]
    if wrong or not found:
        raise InputError(
            f"ltx.profile.timeline takes the recordings of one or more ranks, got {wrong[0] if wrong else 'none'}. "
            "Return the trace of `with ltx.profile.record() as trace:` from each rank."
        )
    return Timeline(found)


def _tracks(trace: Trace) -> dict[str, list[_Bar]]:
    """The bars of each track, computing first, by their start; of equal starts the longest first: it has the others."""
    found: dict[str, list[_Bar]] = {_COMPUTE: []}

    def add(track: str, kind: str, name: str, start: float, end: float | None, **details: Any) -> None:
        end_s = math.inf if end is None else end + trace.epoch_s
        found.setdefault(track, []).append(_Bar(kind, name, start + trace.epoch_s, end_s, details))

    for span in trace.spans:
        add(_COMPUTE, span.name, span.name, span.began_s, span.ended_s)
    for e in trace.events:
        details = {"operation": e.operation, "bytes": e.nbytes, "waited_ms": e.waited_s * 1e3}
        add(e.channel, e.kind, e.label, e.issued_s, e.completed_s, **details)
    return {track: sorted(bars, key=lambda bar: (bar.start_s, -bar.end_s)) for track, bars in found.items()}


def _metadata(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": value}}


# --- what steps cost ----------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A candidate: the slowest rank's seconds per step, and the bytes that this rank sends per step."""

    name: str
    step_s: float
    sent: float


class Comparison(tuple[Compared, ...]):
    """The candidates, fastest first; ``print`` and notebooks show them as a table."""

    def _table(self) -> Table:
        rows = [(x, format_seconds(s), f"{s / self[0].step_s:.2f}", format_bytes(round(sent))) for x, s, sent in self]
        return Table(("candidate", "a step", "to the first", "sent"), rows, (False, True, True, True))

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def compare(candidates: dict[str, TrainStep], state: TrainState, *batch: Any, steps: int = 20) -> Comparison:
    """Time train steps in turns, on all ranks, as Horovod's autotuner does with settings.

    A turn is as long as the longest period of a schedule; the first turn isn't counted. Steps begin after a strategy's
    warm-up, so that a hook that is exact at first does compress. So few steps don't show the effect on the loss.

    Args:
        candidates: train steps by name.
        state: the state of one candidate, which doesn't change. The others begin with its parameters and buffers.
        batch: this rank's batch, for all steps.
        steps: the least number of steps that each candidate is timed for.

    Returns:
        The candidates, fastest first, the same on every rank; ``print`` shows them as a table.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda p, x: (p["w"] * x).square().mean())
        >>> sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
        >>> candidates = {way: ltx.train_step(step, sgd, overlap=way) for way in ("backward", "update")}
        >>> state = candidates["backward"].init({"w": torch.ones(3)})
        >>> sorted(row.name for row in ltx.profile.compare(candidates, state, torch.ones(3), steps=2))
        ['backward', 'update']
    """
    whole("compare: steps", steps, 1)
    if not candidates or not isinstance(state, TrainState):
        raise InputError(f"compare takes train steps by name and a state, got {brief(candidates)} and {brief(state)}.")
    cycles = {name: train.step.strategy.cycle or (0, 1) for name, train in candidates.items()}
    trained, length = set(tree.leaf_paths(state.trained)), max(length for _, length in cycles.values())
    states, sent, times = dict[str, TrainState](), dict[str, float](), {name: list[float]() for name in candidates}
    candidates = {name: replace(train, trainable=trained.__contains__) for name, train in candidates.items()}
    for name, train in candidates.items():
        at = max(state.step, cycles[name][0])
        states[name] = counted(train.init(state.params, state.buffers), at, at)
        with record() as trace:
            states[name], _ = _turn(train, states[name], batch, length)
        sent[name] = sum(x.nbytes for x in trace.events if x.kind in ("bucket", "exchange", "background")) / length
    for _ in range(-(-steps // length)):
        for name, train in candidates.items():
            states[name], taken = _turn(train, states[name], batch, length)
            times[name].append(taken / length)
    rows = (Compared(name, statistics.median(taken), sent[name]) for name, taken in times.items())
    return Comparison(sorted(rows, key=lambda row: row.step_s))


def _turn(train: TrainStep, state: TrainState, batch: tuple[Any, ...], length: int) -> tuple[TrainState, float]:
    """Run `length` steps. Returns the state after them, and the slowest rank's seconds."""
    collectives.barrier(axis=train.step.axis)
    began = time.perf_counter()
    for _ in range(length):
        state, metrics = train(state, *batch)
    state = train.finish(state)
    metrics.loss.item()  # waits until an accelerator has done all of it
    taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=metrics.loss.device)
    return state, float(collectives.pmax(taken, train.step.axis))
