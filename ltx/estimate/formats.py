"""Tables and units, as text, and values that notebooks show as theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from ltx.core.transforms.strategy import Strategy
from ltx.hooks.plain import NAMES, named_hook


class Shown:
    """A value that notebooks show as ``print`` does."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        import html  # a dictionary of two thousand names, for notebooks alone

        return f"<pre>{html.escape(str(self))}</pre>"


def aligned(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], to_the_right: Sequence[bool]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for cells in (header, tuple("-" * width for width in widths), *rows):
        columns = zip(cells, widths, to_the_right, strict=True)
        lines.append("  ".join(x.rjust(width) if right else x.ljust(width) for x, width, right in columns).rstrip())
    return lines


def format_bytes(nbytes: int) -> str:
    """Bytes in decimal units, as links are sold; small numbers exactly.

    >>> format_bytes(1200), format_bytes(48_640), format_bytes(3_303_424)
    ('1,200 B', '48.6 kB', '3.30 MB')
    """
    if nbytes < 10_000:
        return f"{nbytes:,} B"
    for unit, size in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if nbytes < 999.5 * size or unit == "GB":
            break
    value = nbytes / size
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Three digits, with a unit.

    >>> format_seconds(0.0123), format_seconds(42.0), format_seconds(1e-5), format_seconds(3600)
    ('12.3 ms', '42 s', '10 us', '3,600 s')
    """
    unit, size = next((u for u in (("us", 1e6), ("ms", 1e3)) if seconds * u[1] < 999.5), ("s", 1.0))
    value = seconds * size
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"


def short(strategy: Strategy) -> str:
    """A strategy with those of its fields that aren't at their defaults."""
    said = []
    for x in fields(strategy):
        value, default = getattr(strategy, x.name), x.default
        if value != (named_hook(default) if default in NAMES else default):
            said.append(f"{x.name}={value!r}")
    return f"{type(strategy).__name__}({', '.join(said)})"
