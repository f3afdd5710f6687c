"""What the demo tells: its progress, and at the end a table, a figure of the losses, and every number as JSON lines."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from ltx.core.base.readable import Table, format_bytes


@dataclass
class Report:
    """What rank 0 tells: lines on `stream`, and numbers in a file of one JSON object a line. Other ranks have neither.

    A terminal gets one line of progress that is rewritten, ten times a second at most; anything else a line every
    `interval_s`. The last of a run is always shown.
    """

    stream: TextIO | None = None
    metrics: TextIO | None = None
    interval_s: float = 5.0
    _next_s: float = field(default=0.0, init=False)
    _length: int = field(default=0, init=False)

    def say(self, text: str = "", end: str = "\n") -> None:
        if self.stream is not None:
            print(text, end=end, file=self.stream, flush=True)

    def show(self, line: str, last: bool) -> None:
        """Show how far a run is, if it is time for that."""
        now = time.monotonic()
        if self.stream is None or (now < self._next_s and not last):
            return
        if not self.stream.isatty():
            self._next_s = now + self.interval_s
            return self.say(line)
        self._next_s = now + 0.1
        line = line[: max(40, shutil.get_terminal_size().columns - 1)]
        self.say("\r" + line.ljust(self._length), "\n" if last else "")
        self._length = 0 if last else len(line)

    def write(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(json.dumps({"kind": kind, **values}) + "\n")


def told(tokens_per_s: float, nbytes: float, hidden: float | None) -> tuple[str, str, str]:
    """Characters a second of all ranks, bytes that this one sends, and the part of that which it computed meanwhile.

    >>> told(25_312.4, 3_303_424.0, 0.914)
    ('25,312', '3.30 MB', '91%')
    """
    return f"{tokens_per_s:,.0f}", format_bytes(round(nbytes)), "-" if hidden is None else f"{hidden:.0%}"


@dataclass(frozen=True)
class Curve:
    """The losses of one run over the characters trained on; nats a character."""

    tokens: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    validation_tokens: list[int] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """What one run came to."""

    strategy: str  # the configuration's name
    steps: int  # of the optimizer
    validation_loss: float  # on the whole held-out text, nats a character
    tokens_per_s: float  # of all ranks together
    bytes_per_step: float  # that a rank sends, on average
    hidden: float | None  # the part of the communication that went on while the rank computed; None without any
    seconds: float  # for the training, without validation


def format_table(results: Sequence[Result]) -> str:
    """The results as a table in plain text."""
    header = ("strategy", "steps", "validation loss", "tokens/s", "bytes/step", "hidden")
    rows = [
        (x.strategy, str(x.steps), f"{x.validation_loss:.3f}", *told(x.tokens_per_s, x.bytes_per_step, x.hidden))
        for x in results
    ]
    return str(Table(header, rows, [False, *[True] * 5]))


def draw(curves: Mapping[str, Curve], unigram: float, path: Path) -> bool:
    """Draw the losses into a PNG file; False, and no file, where matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    plot(figure.subplots(), curves, unigram)
    figure.savefig(path, dpi=120)
    return True


def plot(axes: Any, curves: Mapping[str, Curve], unigram: float) -> None:
    """Draw the losses into matplotlib's `axes`."""
    for index, (name, curve) in enumerate(curves.items()):
        color = f"C{index}"
        smoothed = list(accumulate(curve.loss, lambda mean, loss: 0.9 * mean + 0.1 * loss))
        axes.plot(curve.tokens, smoothed, color=color, alpha=0.35, linewidth=1)
        style = ("o-", "o--")[index % 2]  # curves that lie on one another both show
        axes.plot(curve.validation_tokens, curve.validation_loss, style, color=color, markersize=3, label=name)
    axes.axhline(unigram, color="grey", linestyle=":", linewidth=1)
    said = axes.text(0.99, unigram, "frequencies of characters alone", ha="right", va="bottom", color="grey")
    said.set_transform(axes.get_yaxis_transform())
    axes.set(xlabel="characters trained on", ylabel="loss (nats a character)", xlim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("Validation loss (dots) and training loss (faint)", fontsize="medium")
    axes.legend()
