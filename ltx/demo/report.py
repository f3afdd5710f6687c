"""What the demo tells: its progress, and at the end a table, a figure of the losses, and every number as JSON lines.

Progress on a terminal is one line that is rewritten, elsewhere a line every so often.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

from ltx.estimate.formats import aligned


@dataclass(frozen=True)
class Reading:
    """What the display shows after a step."""

    step: int  # how many are done, of `steps`
    steps: int
    loss: float  # mean over ranks, nats a character
    tokens_per_s: float  # tokens (characters) a second, all ranks together
    bytes_per_step: int  # what one rank sent in the last step
    hidden: float | None = None  # the part of the communication that went on while the rank computed; None without any


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
    tail = (
        f"{reading.step:{len(str(reading.steps))}}/{reading.steps}  loss {reading.loss:.3f}  "
        f"{format_count(reading.tokens_per_s)} tokens/s  {format_count(reading.bytes_per_step, 'B')}/step  "
        f"{format_hidden(reading.hidden)} hidden"
    )
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
        if self.stream is not None:
            print(text, file=self.stream, flush=True)


@dataclass(frozen=True)
class Curve:
    """The losses of one run over the characters trained on; nats a character."""

    tokens: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    validation_tokens: list[int] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """What one run came to, in the units of :class:`Reading`."""

    strategy: str  # the configuration's name
    steps: int  # of the optimizer
    validation_loss: float  # on the whole held-out text
    tokens_per_s: float
    bytes_per_step: float  # on average
    hidden: float | None
    seconds: float  # for the training, without validation


def format_table(results: Sequence[Result]) -> str:
    """The results as a table in plain text.

    >>> print(format_table([Result("fp32", 700, 1.7046, 24_012.0, 3.3e6, 0.92, 30.1)]))
    strategy  steps  validation loss  tokens/s  bytes/step  hidden
    --------  -----  ---------------  --------  ----------  ------
    fp32        700            1.705    24.0 k      3.3 MB     92%
    """
    header = ("strategy", "steps", "validation loss", "tokens/s", "bytes/step", "hidden")
    rows = []
    for x in results:
        speed = (format_count(x.tokens_per_s), format_count(x.bytes_per_step, "B"), format_hidden(x.hidden))
        rows.append((x.strategy, str(x.steps), f"{x.validation_loss:.3f}", *speed))
    return "\n".join(aligned(header, rows, [False, *[True] * 5]))


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without a bias to zero.

    >>> smoothed([1.0, 1.0]), smoothed([])
    ([1.0, 1.0], [])
    """
    total = norm = 0.0
    averages = []
    for value in values:
        total, norm = weight * total + value, weight * norm + 1
        averages.append(total / norm)
    return averages


def draw(curves: Mapping[str, Curve], unigram: float, path: Path) -> bool:
    """Draw the losses into a PNG file; False, and no file, where matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (name, curve) in enumerate(curves.items()):
        color = f"C{index}"
        axes.plot(curve.tokens, smoothed(curve.loss), color=color, alpha=0.35, linewidth=1)
        style = ("o-", "o--")[index % 2]  # curves that lie on one another both show
        axes.plot(curve.validation_tokens, curve.validation_loss, style, color=color, markersize=3, label=name)
    axes.axhline(unigram, color="grey", linestyle=":", linewidth=1)
    said = axes.text(0.99, unigram, "frequencies of characters alone", ha="right", va="bottom", color="grey")
    said.set_transform(axes.get_yaxis_transform())
    axes.set(xlabel="characters trained on", ylabel="loss (nats a character)", xlim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("Validation loss (dots) and training loss (faint)", fontsize="medium")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


class JsonLines:
    """A file of one JSON object a line, written as they come; with path None nothing is written.

    >>> with JsonLines(None) as metrics:
    ...     metrics.write("step", loss=1.0)
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = None if path is None else path.open("w", encoding="utf-8", buffering=1)

    def write(self, kind: str, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
