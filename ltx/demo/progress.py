"""The progress display: on a terminal one line that is rewritten, elsewhere a line every so often."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(frozen=True)
class Reading:
    """What the display shows after a step.

    Attributes:
        step: how many steps are done, of ``steps``.
        loss: mean over ranks, nats a character.
        tokens_per_s: tokens (characters) a second, all ranks together.
        bytes_per_step: what one rank sent in the last step.
        hidden: the part of the communication, 0 to 1, that went on while the rank computed; None without any.
    """

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    bytes_per_step: int
    hidden: float | None = None


def format_count(number: float, unit: str = "") -> str:
    """A number with a decimal prefix, to one decimal.

    >>> format_count(25_312), format_count(3_303_424, "B"), format_count(512, "B")
    ('25.3 k', '3.3 MB', '512 B')
    """
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size * 0.99995:  # what would round to 1000.0 of the smaller prefix
            return f"{number / size:.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip()


def format_hidden(hidden: float | None) -> str:
    """
    >>> format_hidden(0.914), format_hidden(None)
    ('91%', '-')
    """
    return "-" if hidden is None else f"{hidden:.0%}"


def format_bar(done: float, width: int) -> str:
    """
    >>> format_bar(0.5, 8)
    '[####----]'
    """
    filled = round(max(0.0, min(1.0, done)) * width)
    return f"[{'#' * filled}{'-' * (width - filled)}]"


def format_line(title: str, reading: Reading, width: int = 120) -> str:
    """One line of at most ``width`` characters; the bar takes what is left.

    >>> format_line("fp32", Reading(7, 10, 1.75, 24_000, 3_300_000, 0.9), width=84)
    'fp32            [####-]   7/10  loss 1.750  24.0 k tokens/s  3.3 MB/step  90% hidden'
    """
    count = f"{reading.step:{len(str(reading.steps))}}/{reading.steps}"
    parts = [
        f"loss {reading.loss:.3f}",
        f"{format_count(reading.tokens_per_s)} tokens/s",
        f"{format_count(reading.bytes_per_step, 'B')}/step",
        f"{format_hidden(reading.hidden)} hidden",
    ]
    tail = "  ".join([count, *parts])
    room = width - len(f"{title:14}  []  {tail}")
    bar = format_bar(reading.step / reading.steps, min(room, 24)) + "  " if room >= 4 else ""
    return f"{title:14}  {bar}{tail}"[:width]


@dataclass
class Progress:
    """Shows readings on ``stream``, at most every ``interval_s`` seconds; ranks that have none to show pass None.

    A terminal gets one line that is rewritten, at most ten times a second. Anything else gets a line now and then.
    """

    stream: TextIO | None
    interval_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    _shown_s: float = field(default=float("-inf"), init=False)
    _length: int = field(default=0, init=False)

    def show(self, title: str, reading: Reading) -> None:
        """Show a reading, if it is time for one. The last of a run is always shown."""
        if self.stream is None:
            return
        terminal = self.stream.isatty()
        now, last = self.clock(), reading.step == reading.steps
        if not last and now - self._shown_s < (0.1 if terminal else self.interval_s):
            return
        self._shown_s = now
        if not terminal:
            print(format_line(title, reading), file=self.stream, flush=True)
            return
        line = format_line(title, reading, max(40, shutil.get_terminal_size().columns - 1))
        print("\r" + line.ljust(self._length), end="\n" if last else "", file=self.stream, flush=True)
        self._length = 0 if last else len(line)

    def say(self, text: str = "") -> None:
        """Print a line of its own."""
        if self.stream is not None:
            print(text, file=self.stream, flush=True)
