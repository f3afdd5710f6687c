"""The report: a table, a figure of the losses, and every number as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ltx.demo.progress import format_count, format_hidden


@dataclass(frozen=True)
class Curve:
    """The losses of one run over the characters trained on; nats a character."""

    tokens: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    validation_tokens: list[int] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """What one run came to.

    Attributes:
        strategy: the configuration's name.
        steps: optimizer steps.
        validation_loss: on the whole held-out text; nats a character.
        tokens_per_s: tokens (characters) a second, all ranks together.
        bytes_per_step: what one rank sent in a step, on average.
        hidden: the part of the communication, 0 to 1, that went on while rank 0 computed; None without any.
        seconds: for the training, without validation.
    """

    strategy: str
    steps: int
    validation_loss: float
    tokens_per_s: float
    bytes_per_step: float
    hidden: float | None
    seconds: float


def format_table(results: Sequence[Result]) -> str:
    """The results as a table in plain text.

    >>> print(format_table([Result("fp32", 700, 1.7046, 24_012.0, 3.3e6, 0.92, 30.1)]))
    strategy  steps  validation loss  tokens/s  bytes/step  hidden
    --------  -----  ---------------  --------  ----------  ------
    fp32        700            1.705    24.0 k      3.3 MB     92%
    """
    header = ("strategy", "steps", "validation loss", "tokens/s", "bytes/step", "hidden")
    rows = [
        (
            result.strategy,
            str(result.steps),
            f"{result.validation_loss:.3f}",
            format_count(result.tokens_per_s),
            format_count(result.bytes_per_step, "B"),
            format_hidden(result.hidden),
        )
        for result in results
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in row).rstrip()
        for row in (list(enumerate(zip(line, widths, strict=True))) for line in lines)
    )


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
    axes.text(
        0.99,
        unigram,
        "frequencies of characters alone",
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="bottom",
        color="grey",
    )
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
        """Write one line."""
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def write_result(self, result: Result) -> None:
        """Write what a run came to."""
        self.write("result", **asdict(result))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
