"""``ltx.show``: a value of a rank, as the notebook of the driver shows it. ``ltx.progress``: one bar for all ranks.

On a worker of a pool both send what is to be seen to the driver; anywhere else they show it themselves.
"""

from __future__ import annotations

import base64
import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

from ltx.core.base.arguments import checked
from ltx.core.world.world import world

T = TypeVar("T")

#: On a worker: takes a message to the driver.
outbox: Callable[[Any], None] | None = None

_PAUSE_S = 0.1
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
            if time.monotonic() - told_s > _PAUSE_S:
                deliver(Progress(label, done, total, False))
                told_s = time.monotonic()
    finally:
        deliver(Progress(label, done, total, True))


def write(stream: str, text: str) -> None:
    """Write to ``sys.stdout`` or ``sys.stderr`` what it can take: text of workers must not fail, or be lost, here."""
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
            display = _ipython_display()
            bundle = {"text/plain": line}
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
        """Rank `rank` of `size` has come to `progress`."""
        self._ranks[rank] = progress
        self._line.draw(self.line(size), self.finished(size))

    def finished(self, size: int) -> bool:
        """Whether all of `size` ranks have."""
        return len(self._ranks) == size and all(progress.finished for progress in self._ranks.values())

    def line(self, size: int) -> str:
        """What is drawn; a rank that hasn't begun is at 0."""
        slowest = min(range(size), key=lambda rank: self._ranks[rank].done if rank in self._ranks else 0)
        done = self._ranks[slowest].done if slowest in self._ranks else 0
        total = max((p.total or 0 for p in self._ranks.values()), default=0)
        seconds = time.monotonic() - self._began_s
        filled = self._WIDTH * min(done, total) // total if total else 0
        bar = f" |{'#' * filled}{'.' * (self._WIDTH - filled)}| {done}/{total}" if total else f" {done}"
        ahead = max((p.done for p in self._ranks.values()), default=0)
        behind = f", rank {slowest} last" if ahead > done else ""
        return f"{self._label}{bar} {done / seconds if seconds else 0.0:.1f}/s{behind}".strip()
