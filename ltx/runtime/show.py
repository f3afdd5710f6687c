"""``ltx.show`` shows a rank's value in the driver's notebook. ``ltx.progress`` draws one bar for all ranks."""

from __future__ import annotations

import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, NamedTuple, TextIO, TypeVar

from ltx.core.base.arguments import checked
from ltx.core.base.readable import Table
from ltx.core.world.world import world
from ltx.profile.shown import curves, format_seconds

T = TypeVar("T")

#: On a worker, this function sends an object to the driver, which shows it; else None.
outbox: Callable[[Any], None] | None = None


def deliver(seen: Any, drawn: dict[Any, Any] | None = None) -> None:
    """Show `seen`: on the driver, or in this process, where `drawn` are the bars on the screen by key."""
    if outbox is None:
        seen.shown(None, 1, {} if drawn is None else drawn)
    else:
        print(end="", flush=True)  # earlier prints have to be shown first; print, since there may be no stdout
        outbox(seen)


@dataclass(frozen=True)
class Display:
    """What IPython's display publisher gets."""

    bundle: dict[str, Any]  # by MIME type
    metadata: dict[str, Any] = field(default_factory=dict)
    name: str | None = None  # the display's id, if it has one
    update: bool = False  # whether it replaces the display of that name

    def shown(self, rank: int | None, size: int, drawn: dict[Any, Any]) -> None:
        """Show this on the driver, labelled with `rank`; on the process that made it `rank` is None."""
        if in_notebook():
            drawn.setdefault(rank, Area(rank)).put(self)
        elif self.bundle.get("text/plain"):
            label = "" if rank is None else f"[rank {rank}] "
            write("stdout", f"{label}{self.bundle['text/plain']}\n")


class Cleared(NamedTuple):
    """``clear_output``: a rank's displays are removed; with `wait`, only when it shows the next one."""

    wait: bool

    def shown(self, rank: int | None, size: int, drawn: dict[Any, Any]) -> None:
        if in_notebook():
            drawn.setdefault(rank, Area(rank)).clear(self.wait)


class Area:
    """The displays of one rank in the running cell. Once it has cleared them, new ones are put in their places."""

    def __init__(self, rank: int | None):
        self._label = "" if rank is None else f"[rank {rank}] "
        self._places: list[Any] = []  # handles of displays
        self._at = 0  # the index of the place for the next display
        self._named: dict[str | None, Any] = {}
        self._printed = ""  # the text in the last place, if that is printed text
        self.prints = False  # whether printed text is put in places too, so that it is cleared with the displays

    def put(self, seen: Display) -> None:
        """Show `seen` in the place that has its name, or, if it has no name, in the next place."""
        self._printed = ""
        bundle, text = seen.bundle, seen.bundle.get("text/plain", "")
        if set(bundle) <= {"text/plain"}:
            bundle = {"text/plain": self._label + text if text else ""}
        elif self._label and not seen.update:  # the label stands above pictures and tables
            self._next({"text/plain": self._label.strip()}, {})
        if seen.update:
            if seen.name is not None and seen.name in self._named:
                put(self._named[seen.name], bundle, seen.metadata)
            return
        self._named[seen.name] = self._next(bundle, seen.metadata)

    def print(self, text: str) -> None:
        """Show printed text in the last place if that holds printed text already, else in the next."""
        self._at -= bool(self._printed)
        printed = self._printed + text
        self._next({"text/plain": printed.rstrip("\n")}, {})
        self._printed = printed

    def clear(self, wait: bool) -> None:
        self._blank(0 if not wait else self._at)  # with `wait`, only the places that an earlier clear has left
        self._at, self._printed, self.prints = 0, "", True

    def finish(self) -> None:
        """After a call: blank what was cleared, and put the next call's displays in new places. Names stay."""
        self._blank(self._at or len(self._places))
        self._places, self._at, self._printed, self.prints = [], 0, "", False

    def _next(self, bundle: dict[str, Any], metadata: dict[str, Any]) -> Any:
        if self._at == len(self._places):
            self._places.append(None)
        place = self._places[self._at] = put(self._places[self._at], bundle, metadata)
        self._at += 1
        return place

    def _blank(self, start: int) -> None:
        for place in self._places[start:]:
            put(place, {"text/plain": ""})


@checked("rank")
def show(*values: Any, rank: int | None = None) -> None:
    """Show values in the notebook, or on the terminal, that drives this rank.

    A value with a rich representation (a figure of matplotlib, a data frame) is shown in a notebook as such, also from
    a worker of a pool, with the rank as its label.

    Args:
        values: anything.
        rank: show only this rank's values; None shows those of all ranks.

    Example:
        >>> import ltx
        >>> ltx.show({"loss": 0.5}, rank=0)
        {'loss': 0.5}
    """
    if rank is not None and world().rank != rank:
        return
    for value in values:
        bundle, metadata = {"text/plain": value if isinstance(value, str) else repr(value)}, {}
        if (shell := ipython()) is not None and not isinstance(value, str):
            bundle, metadata = shell.display_formatter.format(value)
        if bundle:  # an empty bundle: IPython has displayed the value already
            deliver(Display(bundle, metadata))


def ipython() -> Any:
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()


def in_notebook() -> bool:
    return getattr(ipython(), "kernel", None) is not None


def put(place: Any, bundle: dict[str, Any], metadata: dict[str, Any] | None = None) -> Any:
    """Show `bundle` in `place`, which an earlier call has returned, or in a new place if that is None."""
    if place is None:
        from IPython.display import display

        return display(bundle, raw=True, metadata=metadata, display_id=True)
    place.update(bundle, raw=True, metadata=metadata)
    return place


@dataclass(frozen=True)
class Reached:
    """How far a rank is with an iteration that is nested in `depth` others."""

    label: str
    done: int
    total: int | None
    finished: bool
    depth: int = 0
    besides: Mapping[str, float | str] = field(default_factory=dict)  # what is shown beside the bar
    live: bool = False  # whether a notebook shows a table of the ranks and a curve too

    def shown(self, rank: int | None, size: int, drawn: dict[Any, Any]) -> None:
        """Draw the bar, as far as the slowest of `size` ranks is. `drawn` are the bars on the screen."""
        begin = replace(self, done=0, finished=False, besides={})  # the state of a rank that hasn't begun
        bar = drawn.setdefault((self.label, self.depth), Bar([begin] * size))
        bar.at(rank or 0, self)
        # a finished inner bar stays in `drawn`: the next inner bar is drawn in its place
        if bar.finished and not self.depth:
            del drawn[self.label, self.depth]


class Progress(Generic[T]):
    """What :func:`progress` returns: iterating over it goes through `iterable` and draws a bar."""

    _local = threading.local()

    def __init__(self, iterable: Iterable[T], total: int | None, label: str, live: bool):
        self._iterable, self._total, self._label, self._live = iterable, total, label, live
        self._besides: dict[str, Any] = {}

    def set_postfix(self, **values: Any) -> None:
        """Show `values` beside the bar, as tqdm does. A tensor's value is read when the bar is drawn."""
        self._besides = values

    def __iter__(self) -> Iterator[T]:
        around: dict[Any, Any] = getattr(self._local, "bars", {})
        depth, told_s, done = len(around.setdefault("under way", [])), 0.0, 0
        self._local.bars = around
        around["under way"].append(self)

        def tell(finished: bool) -> None:
            besides = {name: _plain(value) for name, value in self._besides.items()}
            deliver(Reached(self._label, done, self._total, finished, depth, besides, self._live), around)

        try:
            tell(False)  # now, so that this bar is above inner ones
            for item in self._recorded() if self._live else self._iterable:
                yield item
                done += 1
                if time.monotonic() - told_s > 2 * _PAUSE_S:
                    tell(False)
                    told_s = time.monotonic()
        finally:
            tell(True)
            around["under way"].remove(self)
            if not around["under way"]:
                around.clear()

    def _recorded(self) -> Iterator[T]:
        """Yield the items; show beside the bar how long this rank waited for others during the last item."""
        from ltx.profile.traces import record

        for item in self._iterable:
            with record() as trace:
                yield item
            self._besides = {**self._besides, "wait": format_seconds(trace.waited_s)}


def _plain(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)


def _brief(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


@checked("iterable", "total", "label", "live")
def progress(iterable: Iterable[T], *, total: int | None = None, label: str = "", live: bool = False) -> Progress[T]:
    """Iterate, and draw one progress bar for all ranks, on the driver, as far as the slowest rank is.

    A bar inside another one disappears when it is done, as tqdm's do.

    Args:
        iterable: what to go through.
        total: the number of items; None uses ``len(iterable)`` if there is one.
        label: the text before the bar. Ranks with the same label share a bar.
        live: in a notebook, show below the bar a table of the ranks, with the values that each rank has set and how
            long it waited for others in its last step, and the curve of the first number that is set. For this every
            step is recorded, so that the host waits for the accelerator.

    Returns:
        An iterable of the same items. Its ``set_postfix(loss=...)`` puts the slowest rank's values beside the bar.

    Example:
        >>> import ltx
        >>> bar = ltx.progress([1, 2], label="steps")
        >>> for x in bar:  # doctest: +SKIP
        ...     bar.set_postfix(loss=1 / x)
        steps |██████████████████████████████| 2/2 9.9/s, loss=0.5
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    return Progress(iterable, total, label, live)


def write(stream: str, text: str) -> None:
    """Write a worker's text to ``sys.stdout`` or ``sys.stderr``, with escapes for what its encoding lacks."""
    target = getattr(sys, stream)
    if target is None or getattr(target, "closed", False):
        return
    encoding = getattr(target, "encoding", None) or "utf-8"
    target.write(text.encode(encoding, "backslashreplace").replace(rb"\u2588", b"#").decode(encoding))  # bars
    target.flush()


class LiveLine:
    """A line of ``sys.stdout`` or ``sys.stderr`` that is overwritten; in a notebook, a display that is updated."""

    def __init__(self, stream: str = "stderr") -> None:
        self._stream = stream
        self._place: Any = None

    def draw(self, line: str, finished: bool, depth: int = 0, html: str = "") -> None:
        """Draw `line`, in a notebook `html`, over the old one, `depth` lines below the cursor; `finished`: for good."""
        target = getattr(sys, self._stream)
        if in_notebook():
            self._place = put(self._place, {"text/plain": line} | ({"text/html": html} if html else {}))
        elif target is not None and target.isatty():
            below, back = "\n" * depth, "\x1b[A" * depth if depth else "\n" * finished
            write(self._stream, f"{below}\r\x1b[K{line}{back}")
        elif finished and not depth:  # to a log only the finished line is written
            write(self._stream, f"{line}\n")


class Bar(LiveLine):
    _WIDTH = 30

    def __init__(self, ranks: list[Reached]) -> None:
        super().__init__()
        self._began_s = time.monotonic()
        self._ranks = ranks
        self._curves = [list[tuple[float, float]]() for _ in ranks]

    @property
    def finished(self) -> bool:
        return all(reached.finished for reached in self._ranks)

    def at(self, rank: int, reached: Reached) -> None:
        if not reached.done:
            self._began_s = time.monotonic()
            self._curves[rank].clear()
        self._ranks[rank] = reached
        gone, html = reached.depth > 0 and self.finished, ""
        if reached.live and not gone:
            numbers = (x for x in reached.besides.values() if isinstance(x, float) and math.isfinite(x))
            self._curves[rank] += [(reached.done, x) for x in islice(numbers, 1)]
            if len(self._curves[rank]) > _POINTS:
                del self._curves[rank][1::2]
            html = self._repr_html_()
        self.draw("" if gone else self._text(), self.finished, reached.depth, html)

    def _repr_html_(self) -> str:
        from html import escape  # imported late: only notebooks need it

        names = dict.fromkeys(name for reached in self._ranks for name in reached.besides)
        rows = []
        for rank, reached in enumerate(self._ranks):
            rows.append((str(rank), str(reached.done), *(_brief(reached.besides.get(name, "")) for name in names)))
        table = Table(("rank", "step", *names), rows, [True] * (2 + len(names)))
        return f"<div><pre>{escape(self._text())}</pre>{table._repr_html_()}{curves(self._curves)}</div>"

    def _text(self) -> str:
        done, furthest = (pick(reached.done for reached in self._ranks) for pick in (min, max))
        total = max(reached.total or 0 for reached in self._ranks)
        seconds = time.monotonic() - self._began_s
        filled = self._WIDTH * min(done, total) // total if total else 0
        bar = f" |{'█' * filled}{' ' * (self._WIDTH - filled)}| {done}/{total}" if total else f" {done}"
        last, slowest = next((rank, reached) for rank, reached in enumerate(self._ranks) if reached.done == done)
        behind = f", rank {last} last" if furthest > done else ""
        besides = "".join(f", {name}={_brief(value)}" for name, value in slowest.besides.items())
        return f"{slowest.label}{bar} {done / seconds if seconds else 0.0:.1f}/s{behind}{besides}".strip()


_PAUSE_S = 0.05  # an overwritten line is drawn at most once in so many seconds; a bar once in twice that
_POINTS = 400  # when a curve has more points than this, every other point is left out


class Printed(NamedTuple):
    """Whole lines that a rank has printed; `rank` is None if all have printed the same."""

    stream: str
    text: str

    def shown(self, rank: int | None, size: int, drawn: dict[Any, Any]) -> None:
        text, key = self.text, _key(self.stream, rank)
        prints = {r for r, area in drawn.items() if isinstance(area, Area) and area.prints}
        if rank is None and any(r in prints or _key(self.stream, r) in drawn for r in range(size)):
            for each in range(size):
                self.shown(each, size, drawn)
        elif key in drawn:  # the first line is the end of a line that is on the screen already
            line, _, text = text.partition("\n")
            drawn.pop(key).draw(labelled(line, rank).rstrip("\n"), True)
            Printed(self.stream, text).shown(rank, size, drawn)
        elif text and rank in prints:
            drawn[rank].print(labelled(text, rank))
        elif text:
            write(self.stream, labelled(text, rank))


class Line(NamedTuple):
    """The newest text of a line that is being overwritten, as tqdm does. The next printed text ends the line."""

    stream: str
    text: str

    def shown(self, rank: int, size: int, drawn: dict[Any, Any]) -> None:
        """Draw the line over its older text; in a log, only when it has ended."""
        drawn.setdefault(_key(self.stream, rank), LiveLine(self.stream)).draw(f"[rank {rank}] {self.text}", False)


def _key(stream: str, rank: int | None) -> str:
    return f"{stream} of rank {rank}"


class Writer(io.TextIOBase):
    """A worker's ``sys.stdout`` or ``sys.stderr``: sends lines to the driver. A fork, as of a data loader, has `fd`."""

    encoding = "utf-8"

    def __init__(self, stream: str, fd: int, deliver: Callable[[Any], None]):
        self._stream, self._fd, self._deliver = stream, fd, deliver
        self._lock = threading.RLock()  # reentrant: a finaliser may print in the middle of a write
        self._begun = ""
        self._told_s = 0.0  # when an overwritten line was last sent to the driver
        self._pipe: TextIO | None = None  # set in a fork only

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def in_fork(self) -> None:
        self._begun = ""  # the worker itself sends this unfinished line
        self._pipe = os.fdopen(self._fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)

    def flush(self) -> None:
        if self._pipe is not None:
            self._pipe.flush()

    def write(self, text: str) -> int:
        if self._pipe is not None:
            return self._pipe.write(text)
        with self._lock:
            lines, newline, rest = (self._begun + text).rpartition("\n")
            self._begun = _last(rest) + "\r" * rest.endswith("\r")
            if newline:
                self._deliver(Printed(self._stream, lines + newline))
            if "\r" in rest and time.monotonic() - self._told_s > _PAUSE_S:
                self._told_s = time.monotonic()
                self._deliver(Line(self._stream, _last(rest)))
        return len(text)

    def finish(self) -> None:
        """After a call: send the unfinished last line too."""
        with self._lock:
            begun, self._begun = self._begun, ""
            if begun:
                self._deliver(Printed(self._stream, begun))


def labelled(text: str, rank: int | None) -> str:
    label = "[all]" if rank is None else f"[rank {rank}]"
    return "".join(f"{label} {_last(line)}\n" for line in text.removesuffix("\n").split("\n"))


def _last(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]
