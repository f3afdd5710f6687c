"""What the pictures of the documentation are drawn with: boxes, arrows, words. docs/dark.py makes their dark twins.

`python docs/pictures/ideas.py` and `python docs/pictures/measured.py` draw all of theirs, or those that are named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
ORANGE, BLUE, GREEN, RED = "#e0742c", "#6b7fd7", "#2a9d5c", "#d64545"
INK, SOFT, PAPER = "#000000", "#666666", "#eeeeee"
WIDTH = 4.2  # inches: 403 pixels, so that words of 9 points can be read on a telephone


def canvas(height: float) -> Axes:
    """Axes of 100 by 100 * height / WIDTH units, without a frame."""
    _, axes = plt.subplots(figsize=(WIDTH, height))
    axes.set_position((0, 0, 1, 1))
    axes.set(xlim=(0, 100), ylim=(0, 100 * height / WIDTH))
    axes.axis("off")
    return axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str = "", **options: Any) -> None:
    """A box around (x, y), with words in it."""
    edge, code = options.pop("edge", SOFT), options.pop("code", False)
    fill, size, dashed = options.pop("fill", PAPER), options.pop("size", 9), options.pop("dashed", False)
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=1.5",
            facecolor=fill,
            edgecolor=edge,
            linewidth=1.2,
            linestyle="--" if dashed else "-",
        )
    )
    words(axes, x, y, text, size=size, code=code, **options)


def words(axes: Axes, x: float, y: float, text: str, *, size: float = 9, code: bool = False, **options: Any) -> None:
    options = {"ha": "center", "va": "center", "color": INK} | options
    indent = len(text) - len(text.lstrip())
    text = "\u00a0" * indent + text.lstrip()  # SVG leaves spaces out
    axes.text(x, y, text, fontsize=size, family="monospace" if code else "sans-serif", **options)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **options: Any) -> None:
    options = {
        "arrowstyle": "-|>",
        "color": SOFT,
        "linewidth": 1.3,
        "mutation_scale": 9,
        "shrinkA": 0,
        "shrinkB": 0,
    } | options
    axes.add_patch(FancyArrowPatch(start, end, **options))


def save(name: str) -> None:
    """The open figure as NAME.svg: the same picture is the same file."""
    plt.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none"})
    plt.savefig(HERE / f"{name}.svg", metadata={"Date": None})
    plt.close("all")


def main(pictures: dict[str, Callable[[], None]]) -> None:
    for name in sys.argv[1:] or pictures:
        pictures[name]()
        save(name)
        print(f"docs/pictures/{name}.svg")
