"""What workers write to stdout and stderr, shown by the driver line by line, each with its rank.

It takes two ways. What Python writes goes as messages, in order with what else a worker shows. What others write (C++,
processes that a worker starts) goes through pipes.
"""

from __future__ import annotations

import fcntl
import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TextIO

from ltx.runtime.show import LiveLine, write

# As much as the system lends: a worker that writes between calls, when nobody reads, mustn't wait.
_PIPE_BYTES = 1 << 20
_CHUNK = 1 << 16
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
        """What to wait for."""
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
        """Let go of all pipes."""
        for fd in self.fds:
            self._close(fd)
        self._begun.clear()


@dataclass(frozen=True)
class Printed:
    """Whole lines that Python has written on a rank."""

    stream: str
    text: str

    def shown(self, rank: int, size: int, bars: dict[str, Any]) -> None:
        """Print them."""
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
    once. A fork of the worker, such as a data loader's, writes to the pipe: the way to the driver is the worker's own.

    Args:
        stream: "stdout" or "stderr".
        fd: the file descriptor of that stream, for those who ask.
        deliver: takes a message to the driver.
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
        """This process is a fork of the worker now."""
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
