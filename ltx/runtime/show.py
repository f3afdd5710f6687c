"""``ltx.show``: a value of a rank, as the notebook of the driver shows it. ``ltx.progress``: one bar for all ranks.

On a worker of a pool both send what is to be seen to the driver; anywhere else they show it themselves.
"""

from __future__ import annotations

import base64
import fcntl
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TextIO, TypeVar

from ltx.core.base.arguments import checked
from ltx.core.world.world import world

T = TypeVar("T")

#: On a worker: takes a message to the driver.
outbox: Callable[[Any], None] | None = None

_KINDS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
}


@dataclass(frozen=True)
class Shown:
    """A value to be seen: what it looks like, by MIME type."""

    bundle: dict[str, Any]

    def shown(self, rank: int | None, size: int, bars: dict[str, Bar]) -> None:
        """Show it, on the driver as that of `rank`, or where it was made."""
        label = "" if rank is None else f"[rank {rank}] "
        labelled = {**self.bundle, "text/plain": label + self.bundle["text/plain"]}
        if not in_notebook():
            write("stdout", labelled["text/plain"] + "\n")
            return
        display = _ipython_display()
        if label and len(labelled) > 1:  # then the text isn't what is seen
            display({"text/plain": label.strip()}, raw=True)
        display(labelled, raw=True)


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
        seen = Shown(looks(value))
        if outbox is None:
            seen.shown(None, 1, {})
        else:
            print(end="", flush=True)  # what was printed before is shown before; there may be no stdout
            outbox(seen)


def looks(value: Any) -> dict[str, Any]:
    """What `value` looks like, by MIME type, "text/plain" always among them."""
    bundle: dict[str, Any] = {"text/plain": value if isinstance(value, str) else repr(value)}
    if isinstance(value, type):
        return bundle
    several = getattr(value, "_repr_mimebundle_", None)
    if callable(several):
        found = several()
        bundle.update(found[0] if isinstance(found, tuple) else found or {})
    for method, kind in _KINDS.items():
        made = getattr(value, method, None)
        if callable(made) and (look := made()) is not None:
            look = look[0] if isinstance(look, tuple) else look
            bundle[kind] = base64.b64encode(look).decode() if isinstance(look, bytes) else look
    if type(value).__module__.startswith("matplotlib.") and callable(getattr(value, "savefig", None)):
        stream = io.BytesIO()
        value.savefig(stream, format="png", bbox_inches="tight")
        bundle["image/png"] = base64.b64encode(stream.getvalue()).decode()
    return bundle


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def _ipython_display() -> Callable[..., Any]:
    from IPython.display import display

    shows: Callable[..., Any] = display
    return shows


@dataclass(frozen=True)
class Progress:
    """How far a rank is with something."""

    label: str
    done: int
    total: int | None
    finished: bool

    def shown(self, rank: int | None, size: int, bars: dict[str, Bar]) -> None:
        """Draw its bar among `bars`: as far as the slowest of `size` ranks is."""
        bar = bars.setdefault(self.label, Bar(self.label))
        bar.at(rank or 0, size, self)
        if bar.finished(size):
            del bars[self.label]


@checked("iterable", "total", "label")
def progress(iterable: Iterable[T], *, total: int | None = None, label: str = "") -> Iterator[T]:
    """Iterate, and have a bar of progress drawn: one for all ranks, by the driver, as far as the slowest rank is.

    Args:
        iterable: what to go through.
        total: how many there are; None takes ``len(iterable)`` where there is one.
        label: what is written before the bar. Ranks that go through the same thing use the same label.

    Example:
        >>> import ltx
        >>> [x for x in ltx.progress([1, 2], label="steps")]  # doctest: +SKIP
        [1, 2]
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    bars: dict[str, Bar] = {}
    deliver = outbox or (lambda seen: seen.shown(None, 1, bars))
    told_s, done = 0.0, 0
    try:
        for item in iterable:
            yield item
            done += 1
            if time.monotonic() - told_s > 2 * _PAUSE_S:
                deliver(Progress(label, done, total, False))
                told_s = time.monotonic()
    finally:
        deliver(Progress(label, done, total, True))


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
        self._handle: Any = None

    def draw(self, line: str, finished: bool) -> None:
        """Put `line` in place of what it was; nothing comes after `finished`."""
        target = getattr(sys, self._stream)
        if in_notebook():
            display, bundle = _ipython_display(), {"text/plain": line}
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)
        elif target is not None and target.isatty():
            write(self._stream, f"\r\x1b[K{line}" + "\n" * finished)
        elif finished:  # a log: once
            write(self._stream, f"{line}\n")


class Bar:
    """One bar for all ranks, where the driver draws it."""

    _WIDTH = 30

    def __init__(self, label: str):
        self._label = label
        self._began_s = time.monotonic()
        self._ranks: dict[int, Progress] = {}
        self._line = LiveLine()

    def at(self, rank: int, size: int, progress: Progress) -> None:
        self._ranks[rank] = progress
        self._line.draw(self.line(size), self.finished(size))

    def finished(self, size: int) -> bool:
        return len(self._ranks) == size and all(progress.finished for progress in self._ranks.values())

    def line(self, size: int) -> str:
        """What is drawn; a rank that hasn't begun is at 0."""
        by_rank = [self._ranks[rank].done if rank in self._ranks else 0 for rank in range(size)]
        done = min(by_rank)
        total = max((p.total or 0 for p in self._ranks.values()), default=0)
        seconds = time.monotonic() - self._began_s
        filled = self._WIDTH * min(done, total) // total if total else 0
        bar = f" |{'#' * filled}{'.' * (self._WIDTH - filled)}| {done}/{total}" if total else f" {done}"
        behind = f", rank {by_rank.index(done)} last" if max(by_rank) > done else ""
        return f"{self._label}{bar} {done / seconds if seconds else 0.0:.1f}/s{behind}".strip()


# As much as the system lends: a worker that writes between calls, when nobody reads, mustn't wait.
_PIPE_BYTES = 1 << 20
_CHUNK = 1 << 16
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
            *lines, rest = written.split(b"\n")
            if rest and (finish or fd not in self._sources):  # nothing follows: its process is gone
                lines, rest = [*lines, rest], b""
            if rest:
                self._begun[fd] = rest.rpartition(b"\r")[2]  # what a carriage return has overwritten is gone
            _print([line.decode(errors="replace") for line in lines], rank, stream)

    def _read(self, fd: int) -> bytes:
        chunks = []
        try:
            for _ in range(_PIPE_BYTES // _CHUNK):  # not for as long as more comes: others are waited for too
                chunk = os.read(fd, _CHUNK)
                if not chunk:
                    self._close(fd)  # its end: the process is gone
                    break
                chunks.append(chunk)
        except BlockingIOError:
            pass
        except OSError:
            self._close(fd)
        return b"".join(chunks)

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

    def shown(self, rank: int, size: int, bars: dict[str, Any]) -> None:
        _print(self.text.removesuffix("\n").split("\n"), rank, self.stream)


@dataclass(frozen=True)
class Line:
    """A line that is being written over, as tqdm does: the newest state of it."""

    stream: str
    text: str
    ended: bool

    def shown(self, rank: int, size: int, bars: dict[str, Any]) -> None:
        """Write it over what it was; in a log, once it has ended."""
        key = f"{self.stream} of rank {rank}"
        bars.setdefault(key, LiveLine(self.stream)).draw(f"[rank {rank}] {self.text}", self.ended)
        if self.ended:
            del bars[key]


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
        self._live = False  # whether the driver shows the line that has begun
        self._told_s = 0.0  # when it was last told of it
        self._pipe: TextIO | None = None  # in a fork

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def in_fork(self) -> None:
        self._begun, self._live = "", False  # the worker delivers what it has begun
        raw = io.FileIO(self._fd, "w", closefd=False)
        self._pipe = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )

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
        ended = (lines + newline).split("\n")[:-1]
        if ended and self._live:
            self._deliver(Line(self._stream, _last(ended.pop(0)), True))
            self._live = False
        if ended:
            self._deliver(Printed(self._stream, "\n".join(ended) + "\n"))
        if "\r" in rest and time.monotonic() - self._told_s > _PAUSE_S:
            self._live, self._told_s = True, time.monotonic()
            self._deliver(Line(self._stream, _last(rest), False))

    def finish(self) -> None:
        """The call is over: deliver also a line that hasn't ended."""
        with self._lock:
            begun, self._begun = self._begun, ""
            if self._live:
                self._deliver(Line(self._stream, _last(begun), True))
                self._live = False
            elif begun:
                self._deliver(Printed(self._stream, begun))


def _print(lines: list[str], rank: int, stream: str) -> None:
    if lines:
        write(stream, "".join(f"[rank {rank}] {_last(line)}\n" for line in lines))


def _last(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]
