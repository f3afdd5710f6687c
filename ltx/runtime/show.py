"""``ltx.show``: a value of a rank, as the notebook of the driver shows it. ``ltx.progress``: one bar for all ranks.

On a worker of a pool both send what is to be seen to the driver; anywhere else they show it themselves.
"""

from __future__ import annotations

import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Any, Generic, TextIO, TypeVar

from ltx.core.base.arguments import checked
from ltx.core.base.readable import Curves, Shown, Table, format_seconds
from ltx.core.world.world import world

T = TypeVar("T")

#: On a worker: takes a message to the driver.
outbox: Callable[[Any], None] | None = None


def deliver(seen: Any, drawn: dict[Any, Any] | None = None) -> None:
    """Have `seen` shown: by the driver, or here, where `drawn` is on the screen and may be drawn anew."""
    if outbox is None:
        seen.shown(None, 1, {} if drawn is None else drawn)
    else:
        print(end="", flush=True)  # what was printed before is shown before; there may be no stdout
        outbox(seen)


@dataclass(frozen=True)
class Display:
    """What IPython's display publisher is given: what a value looks like, by MIME type.

    `name` is the display's, if it has one; with `update` it is there already.
    """

    bundle: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    update: bool = False

    def shown(self, rank: int | None, size: int, drawn: dict[Any, Any]) -> None:
        """Show it, on the driver as that of `rank`, or where it was made."""
        if in_notebook():
            _area(rank, drawn).put(self)
        elif self.bundle.get("text/plain"):
            label = "" if rank is None else f"[rank {rank}] "
            write("stdout", f"{label}{self.bundle['text/plain']}\n")


@dataclass(frozen=True)
class Cleared:
    """``clear_output``: what a rank has shown goes, or with `wait` is replaced by what it shows next."""

    wait: bool

    def shown(self, rank: int | None, size: int, drawn: dict[Any, Any]) -> None:
        if in_notebook():
            _area(rank, drawn).clear(self.wait)


class Area:
    """The displays of one rank in the running cell; each rank has its own, so that it clears no other's.

    After a rank has cleared its displays, new ones take their places.
    """

    def __init__(self, rank: int | None):
        self._label = "" if rank is None else f"[rank {rank}] "
        self._places: list[Any] = []  # handles of displays
        self._at = 0  # the place of what comes next
        self._named: dict[str, Any] = {}
        self._printed = ""  # the text in the last place, if it is printed text
        self.prints = False  # whether printed text is in places too: it is cleared with the rest

    def put(self, seen: Display) -> None:
        """Show `seen` in the place of its name, or, if it has no name, in the next place."""
        self._printed = ""
        bundle, text = seen.bundle, seen.bundle.get("text/plain", "")
        if set(bundle) <= {"text/plain"}:
            bundle = {"text/plain": self._label + text if text else ""}
        elif self._label and not seen.update:  # the text isn't what is seen
            self._next({"text/plain": self._label.strip()}, {})
        if seen.update:
            if seen.name in self._named:
                put(self._named[seen.name], bundle, seen.metadata)
            return
        place = self._next(bundle, seen.metadata)
        if seen.name is not None:
            self._named[seen.name] = place

    def print(self, text: str) -> None:
        """Show printed text below what was printed just before."""
        self._at -= bool(self._printed)
        printed = self._printed + text
        self._next({"text/plain": printed.rstrip("\n")}, {})
        self._printed = printed

    def clear(self, wait: bool) -> None:
        self._blank(0 if not wait else self._at)  # the places after it were cleared before
        self._at, self._printed, self.prints = 0, "", True

    def finish(self) -> None:
        """The call is over: what comes next has new places. Names stay."""
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


def _area(rank: int | None, drawn: dict[Any, Any]) -> Area:
    area: Area = drawn.setdefault(rank, Area(rank))
    return area


@checked("rank")
def show(*values: Any, rank: int | None = None) -> None:
    """Show values in the notebook, or on the terminal, that drives this rank.

    What looks rich in a notebook (a figure of matplotlib, a data frame) does so from a worker of a pool too, under its
    rank.

    Args:
        values: anything.
        rank: only this rank's are shown; None for those of all ranks.

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
        if bundle:  # else the value has displayed itself
            deliver(Display(bundle, metadata))


def ipython() -> Any:
    """IPython's shell in this process, if there is one."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return getattr(ipython(), "kernel", None) is not None


def put(place: Any, bundle: dict[str, Any], metadata: dict[str, Any] | None = None) -> Any:
    """Show `bundle` in `place`, which an earlier call has returned, or in a new one if that is None."""
    if place is None:
        from IPython.display import display

        return display(bundle, raw=True, metadata=metadata, display_id=True)
    place.update(bundle, raw=True, metadata=metadata)
    return place


@dataclass(frozen=True)
class Reached:
    """How far a rank is with something, `depth` bars inside others; `besides` is what stands beside the bar.

    `live`: a notebook shows the ranks in a table, and a curve.
    """

    label: str
    done: int
    total: int | None
    finished: bool
    depth: int = 0
    besides: Mapping[str, float | str] = field(default_factory=dict)
    live: bool = False

    def shown(self, rank: int | None, size: int, drawn: dict[Any, Any]) -> None:
        """Draw its bar among those `drawn`: as far as the slowest of `size` ranks is."""
        begin = replace(self, done=0, finished=False, besides={})  # a rank that hasn't begun
        bar = drawn.setdefault((self.label, self.depth), Bar([begin] * size))
        bar.at(rank or 0, self)
        if bar.finished and not self.depth:  # the next inner one is drawn in the place of this one
            del drawn[self.label, self.depth]


class Progress(Generic[T]):
    """What :func:`progress` returns: goes through `iterable`, and has a bar drawn."""

    _local = threading.local()

    def __init__(self, iterable: Iterable[T], total: int | None, label: str, live: bool):
        self._iterable, self._total, self._label, self._live = iterable, total, label, live
        self._besides: dict[str, Any] = {}

    def set_postfix(self, **values: Any) -> None:
        """Have `values` stand beside the bar, as tqdm does. A tensor is read when the bar is drawn."""
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
            tell(False)  # above what is inside
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
        """The items; beside the bar stands for how long this rank has waited for others with the last one."""
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
    """Iterate, and have a bar of progress drawn: one for all ranks, by the driver, as far as the slowest rank is.

    A bar inside another one goes when it is done, as tqdm's do.

    Args:
        iterable: what to go through.
        total: how many there are; None takes ``len(iterable)`` where there is one.
        label: what is written before the bar. Ranks that go through the same thing use the same label.
        live: in a notebook show below the bar a table of the ranks, with what each has set beside it and how long it
            waited for others in its last step, and the curve of the first number that is set. Each step is recorded for
            that, so that the host waits for an accelerator.

    Returns:
        What to iterate over; its ``set_postfix(loss=...)`` puts the slowest rank's values beside the bar.

    Example:
        >>> import ltx
        >>> bar = ltx.progress([1, 2], label="steps")
        >>> for x in bar:  # doctest: +SKIP
        ...     bar.set_postfix(loss=1 / x)
        steps |##############################| 2/2 9.9/s, loss=0.5
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    return Progress(iterable, total, label, live)


def write(stream: str, text: str) -> None:
    """Write to ``sys.stdout`` or ``sys.stderr`` what it can take: text of workers mustn't fail, or be lost, here."""
    target = getattr(sys, stream)
    if target is None or getattr(target, "closed", False):
        return
    encoding = getattr(target, "encoding", None) or "utf-8"
    target.write(text.encode(encoding, "backslashreplace").decode(encoding))
    target.flush()


class LiveLine:
    """A line of ``sys.stdout`` or ``sys.stderr`` that is written over; in a notebook a display that is updated."""

    def __init__(self, stream: str = "stderr") -> None:
        self._stream = stream
        self._place: Any = None

    def draw(self, line: str, finished: bool, depth: int = 0, html: str = "") -> None:
        """Put `line` in place of what it was, `depth` lines below the cursor's; nothing comes after `finished`.

        A notebook shows `html` instead.
        """
        target = getattr(sys, self._stream)
        if in_notebook():
            self._place = put(self._place, {"text/plain": line} | ({"text/html": html} if html else {}))
        elif target is not None and target.isatty():
            below, back = "\n" * depth, "\x1b[A" * depth if depth else "\n" * finished
            write(self._stream, f"{below}\r\x1b[K{line}{back}")
        elif finished and not depth:  # a log: once
            write(self._stream, f"{line}\n")


class Bar(LiveLine, Shown):
    """One bar for all ranks, where the driver draws it."""

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

    def _parts(self) -> list[str | Table | Curves]:
        names = dict.fromkeys(name for reached in self._ranks for name in reached.besides)
        rows = []
        for rank, reached in enumerate(self._ranks):
            rows.append((str(rank), str(reached.done), *(_brief(reached.besides.get(name, "")) for name in names)))
        return [self._text(), Table(("rank", "step", *names), rows, [True] * (2 + len(names))), Curves(self._curves)]

    def _text(self) -> str:
        done, furthest = (pick(reached.done for reached in self._ranks) for pick in (min, max))
        total = max(reached.total or 0 for reached in self._ranks)
        seconds = time.monotonic() - self._began_s
        filled = self._WIDTH * min(done, total) // total if total else 0
        bar = f" |{'#' * filled}{'.' * (self._WIDTH - filled)}| {done}/{total}" if total else f" {done}"
        last, slowest = next((rank, reached) for rank, reached in enumerate(self._ranks) if reached.done == done)
        behind = f", rank {last} last" if furthest > done else ""
        besides = "".join(f", {name}={_brief(value)}" for name, value in slowest.besides.items())
        return f"{slowest.label}{bar} {done / seconds if seconds else 0.0:.1f}/s{behind}{besides}".strip()


# A line that is written over is shown anew after so long at least; a bar after twice that.
_PAUSE_S = 0.05
# Above so many, every other point of a curve is left out.
_POINTS = 400


@dataclass(frozen=True)
class Printed:
    """Whole lines that Python has written on a rank."""

    stream: str
    text: str

    def shown(self, rank: int, size: int, drawn: dict[Any, Any]) -> None:
        text, key = self.text, _key(self.stream, rank)
        if key in drawn:  # it begins with the end of a line that is on the screen
            line, _, text = text.partition("\n")
            drawn.pop(key).draw(labelled(line, rank).rstrip("\n"), True)
        if text and rank in drawn and drawn[rank].prints:
            drawn[rank].print(labelled(text, rank))
        elif text:
            write(self.stream, labelled(text, rank))


@dataclass(frozen=True)
class Line:
    """A line that is being written over, as tqdm does: the newest state of it. What is printed next ends it."""

    stream: str
    text: str

    def shown(self, rank: int, size: int, drawn: dict[Any, Any]) -> None:
        """Write it over what it was; in a log, once it has ended."""
        line = drawn.setdefault(_key(self.stream, rank), LiveLine(self.stream))
        line.draw(f"[rank {rank}] {self.text}", False)


def _key(stream: str, rank: int) -> str:
    return f"{stream} of rank {rank}"


def together(messages: Iterable[Printed]) -> Iterator[Printed]:
    """Lines of one stream that follow one another, as one: a notebook takes a millisecond to show each."""
    for stream, group in groupby(messages, key=lambda message: message.stream):
        yield Printed(stream, "".join(message.text.removesuffix("\n") + "\n" for message in group))


class Writer(io.TextIOBase):
    """A worker's ``sys.stdout`` or ``sys.stderr``: whole lines are delivered, the last one when the call is over.

    A line with a carriage return, which is about to be written over, is delivered as it changes. Threads may write at
    once. A fork of the worker, such as a data loader's, writes to the pipe `fd`: the way to the driver, `deliver`, is
    the worker's own.
    """

    encoding = "utf-8"

    def __init__(self, stream: str, fd: int, deliver: Callable[[Any], None]):
        self._stream, self._fd, self._deliver = stream, fd, deliver
        self._lock = threading.RLock()  # a finaliser that prints may come in the middle of a write
        self._begun = ""
        self._told_s = 0.0  # when the driver was last told of a line that is written over
        self._pipe: TextIO | None = None  # in a fork

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def in_fork(self) -> None:
        self._begun = ""  # the worker delivers what it has begun
        self._pipe = os.fdopen(self._fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)

    def flush(self) -> None:
        if self._pipe is not None:
            self._pipe.flush()

    def write(self, text: str) -> int:
        if self._pipe is not None:
            return self._pipe.write(text)
        with self._lock:
            self._write(text)
        return len(text)

    def _write(self, text: str) -> None:
        lines, newline, rest = (self._begun + text).rpartition("\n")
        self._begun = _last(rest) + "\r" * rest.endswith("\r")
        if newline:
            self._deliver(Printed(self._stream, lines + newline))
        if "\r" in rest and time.monotonic() - self._told_s > _PAUSE_S:
            self._told_s = time.monotonic()
            self._deliver(Line(self._stream, _last(rest)))

    def finish(self) -> None:
        """The call is over: deliver also a line that hasn't ended."""
        with self._lock:
            begun, self._begun = self._begun, ""
            if begun:
                self._deliver(Printed(self._stream, begun))


def labelled(text: str, rank: int) -> str:
    return "".join(f"[rank {rank}] {_last(line)}\n" for line in text.removesuffix("\n").split("\n"))


def _last(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]
