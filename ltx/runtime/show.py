"""What ranks print and display, as the driver shows it: in the notebook, each in its own place, or on the terminal."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

#: On a worker, this function sends an object to the driver, which shows it; else None.
outbox: Callable[[Any], None] | None = None


def deliver(seen: Any) -> None:
    """Show `seen`: on the driver, or in this process if nobody drives it."""
    if outbox is None:
        seen.shown(None, 1, {})
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
        """Show this on the driver, labelled with `rank`; in a fork of a worker, which has no driver, `rank` is None."""
        if in_notebook():
            drawn.setdefault(rank, Area(rank)).put(self)
        elif text := self.bundle.get("text/plain"):
            write("stdout", f"{text}\n")


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

    def draw(self, line: str, finished: bool) -> None:
        """Draw `line` over the old one; `finished`: for good."""
        target = getattr(sys, self._stream)
        if in_notebook():
            self._place = put(self._place, {"text/plain": line})
        elif target is not None and target.isatty():
            write(self._stream, f"\r\x1b[K{line}" + "\n" * finished)
        elif finished:  # to a log only the finished line is written
            write(self._stream, f"{line}\n")


_PAUSE_S = 0.05  # an overwritten line is drawn at most once in so many seconds


class Printed(NamedTuple):
    """Whole lines that a rank has printed; `rank` is None if all have printed the same."""

    stream: str
    text: str

    def shown(self, rank: int | None, size: int, drawn: dict[Any, Any]) -> None:
        text, key = self.text, (self.stream, rank)
        prints = {r for r, area in drawn.items() if isinstance(area, Area) and area.prints}
        if rank is None and any(r in prints or (self.stream, r) in drawn for r in range(size)):
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
        drawn.setdefault((self.stream, rank), LiveLine(self.stream)).draw(f"[rank {rank}] {self.text}", False)


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
