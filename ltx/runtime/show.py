"""``ltx.show``: a value of a rank, as the notebook of the driver shows it. ``ltx.progress``: one bar for all ranks.

On a worker of a pool both send what is to be seen to the driver; anywhere else they show it themselves.
"""

from __future__ import annotations

import fcntl
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Generic, TextIO, TypeVar

from ltx.core.base.arguments import checked
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
    """What one rank has shown in the cell that runs: displays of its own, so that it clears no other's.

    What it shows after it has cleared takes the places of what it has cleared.
    """

    def __init__(self, rank: int | None):
        self._label = "" if rank is None else f"[rank {rank}] "
        self._places: list[Any] = []  # handles of displays
        self._at = 0  # the place of what comes next
        self._named: dict[str, Any] = {}
        self._printed = ""  # what the last place has, if it is printed text
        self.prints = False  # whether printed text is in places too: it is cleared with the rest

    def put(self, seen: Display) -> None:
        """Show it in its place: that of its name, or the next one."""
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
        self._blank(0 if not wait else self._at)  # behind it is what was cleared before
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
        if bundle:  # else it has displayed itself
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
    """How far a rank is with something, `depth` bars inside others; `besides` is what stands beside the bar."""

    label: str
    done: int
    total: int | None
    finished: bool
    depth: int = 0
    besides: str = ""

    def shown(self, rank: int | None, size: int, drawn: dict[Any, Any]) -> None:
        """Draw its bar among those `drawn`: as far as the slowest of `size` ranks is."""
        begin = replace(self, done=0, finished=False, besides="")  # a rank that hasn't begun
        bar = drawn.setdefault((self.label, self.depth), Bar([begin] * size))
        bar.at(rank or 0, self)
        if bar.finished and not self.depth:  # the next inner one is drawn in the place of this one
            del drawn[self.label, self.depth]


class Progress(Generic[T]):
    """What :func:`progress` returns: goes through `iterable`, and has a bar drawn."""

    _local = threading.local()

    def __init__(self, iterable: Iterable[T], total: int | None, label: str):
        self._iterable, self._total, self._label = iterable, total, label
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
            besides = ", ".join(f"{name}={_brief(value)}" for name, value in self._besides.items())
            deliver(Reached(self._label, done, self._total, finished, depth, besides), around)

        try:
            tell(False)  # above what is inside
            for item in self._iterable:
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


def _brief(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError, RuntimeError):
        return str(value)


@checked("iterable", "total", "label")
def progress(iterable: Iterable[T], *, total: int | None = None, label: str = "") -> Progress[T]:
    """Iterate, and have a bar of progress drawn: one for all ranks, by the driver, as far as the slowest rank is.

    A bar inside another one goes when it is done, as tqdm's do.

    Args:
        iterable: what to go through.
        total: how many there are; None takes ``len(iterable)`` where there is one.
        label: what is written before the bar. Ranks that go through the same thing use the same label.

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
    return Progress(iterable, total, label)


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

    def draw(self, line: str, finished: bool, depth: int = 0) -> None:
        """Put `line` in place of what it was, `depth` lines below the cursor's; nothing comes after `finished`."""
        target = getattr(sys, self._stream)
        if in_notebook():
            self._place = put(self._place, {"text/plain": line})
        elif target is not None and target.isatty():
            below, back = "\n" * depth, "\x1b[A" * depth if depth else "\n" * finished
            write(self._stream, f"{below}\r\x1b[K{line}{back}")
        elif finished and not depth:  # a log: once
            write(self._stream, f"{line}\n")


class Bar(LiveLine):
    """One bar for all ranks, where the driver draws it."""

    _WIDTH = 30

    def __init__(self, ranks: list[Reached]) -> None:
        super().__init__()
        self._began_s = time.monotonic()
        self._ranks = ranks

    @property
    def finished(self) -> bool:
        return all(reached.finished for reached in self._ranks)

    def at(self, rank: int, reached: Reached) -> None:
        if not reached.done:
            self._began_s = time.monotonic()
        self._ranks[rank] = reached
        gone = reached.depth > 0 and self.finished
        self.draw("" if gone else self._text(), self.finished, reached.depth)

    def _text(self) -> str:
        done, furthest = (pick(reached.done for reached in self._ranks) for pick in (min, max))
        total = max(reached.total or 0 for reached in self._ranks)
        seconds = time.monotonic() - self._began_s
        filled = self._WIDTH * min(done, total) // total if total else 0
        bar = f" |{'#' * filled}{'.' * (self._WIDTH - filled)}| {done}/{total}" if total else f" {done}"
        last, slowest = next((rank, reached) for rank, reached in enumerate(self._ranks) if reached.done == done)
        behind = f", rank {last} last" if furthest > done else ""
        besides = f", {slowest.besides}" if slowest.besides else ""
        return f"{slowest.label}{bar} {done / seconds if seconds else 0.0:.1f}/s{behind}{besides}".strip()


# As much as the system lends: a worker that writes between calls, when nobody reads, mustn't wait.
_PIPE_BYTES = 1 << 20
# A line that is written over is shown anew after so long at least; a bar after twice that.
_PAUSE_S = 0.05


def open_pipe() -> tuple[int, int]:
    """(reading end, writing end) of a pipe whose reading end doesn't block."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with suppress(OSError, AttributeError):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reading, writing


class Output:
    """The reading ends of all ranks' pipes, and the last line of each, which may not be whole."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[int, str]] = {}
        self._begun: dict[int, bytes] = {}

    def add(self, fd: int, rank: int, stream: str) -> None:
        """Show what comes from `fd` as `rank`'s, on ``sys.stdout`` or ``sys.stderr``."""
        self._sources[fd] = (rank, stream)

    @property
    def fds(self) -> list[int]:
        return list(self._sources)

    def show(self, *, finish: bool = False) -> None:
        """Print all whole lines that have come; with `finish` also those that haven't ended."""
        for fd, (rank, stream) in list(self._sources.items()):
            written = self._begun.pop(fd, b"") + self._read(fd)
            gone = fd not in self._sources  # its process: nothing follows
            end = len(written) if finish or gone else written.rfind(b"\n") + 1
            self._begun[fd] = written[end:].rpartition(b"\r")[2]  # what a carriage return has overwritten is gone
            if end:
                write(stream, labelled(written[:end].decode(errors="replace"), rank))

    def _read(self, fd: int) -> bytes:
        try:
            chunk = os.read(fd, _PIPE_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            chunk = b""
        if not chunk:  # its end: the process is gone
            self._close(fd)
        return chunk

    def _close(self, fd: int) -> None:
        with suppress(OSError):
            os.close(fd)
        self._sources.pop(fd, None)

    def close(self) -> None:
        for fd in self.fds:
            self._close(fd)
        self._begun.clear()


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
