"""Measurements as text and curves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain


def curves(lines: Sequence[Sequence[tuple[float, float]]]) -> str:
    """An SVG picture of lines through points (x, y), with the last value of the first; "" without points."""
    if not (points := list(chain.from_iterable(lines))):
        return ""
    xs, ys = zip(*points, strict=True)
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    wide, tall = 300 / (right - left or 1), 80 / (high - low or 1)
    drawn, (x, y) = "<path d='M0,0V80H300' fill='none' stroke='gray'/>", next(filter(None, lines))[-1]
    for line in lines:
        at = " ".join(f"{(x - left) * wide:.1f},{(high - y) * tall:.1f}" for x, y in line)
        drawn += f"<polyline points='{at}' fill='none' stroke='currentColor'/>"
    last = f"<text x='{(x - left) * wide + 5:.1f}' y='{(high - y) * tall + 4:.1f}'>{y:.4g}</text>"
    axes = ((-4, 8, f"{high:.4g}"), (-4, 80, f"{low:.4g}"), (8, 94, f"{left:g}"), (300, 94, f"{right:g}"))
    ends = "".join(f"<text x='{x}' y='{y}' text-anchor='end'>{text}</text>" for x, y, text in axes)
    return f"<svg viewBox='-64 -8 428 108' width='428' font-size='11' fill='currentColor'>{drawn}{last}{ends}</svg>"


def many(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def format_bytes(nbytes: int) -> str:
    """Bytes in decimal units, as networks use them; numbers below 10,000 exactly.

    >>> format_bytes(1200), format_bytes(48_640), format_bytes(3_303_424)
    ('1,200 B', '48.6 kB', '3.30 MB')
    """
    if nbytes < 10_000:
        return f"{nbytes:,} B"
    unit, size = next((u for u in (("kB", 1e3), ("MB", 1e6)) if nbytes < 999.5 * u[1]), ("GB", 1e9))
    value = nbytes / size
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Seconds with three digits and a fitting unit.

    >>> format_seconds(0.0123), format_seconds(42.0), format_seconds(1e-5), format_seconds(3600)
    ('12.3 ms', '42 s', '10 us', '3,600 s')
    """
    unit, size = next((u for u in (("us", 1e6), ("ms", 1e3)) if seconds * u[1] < 999.5), ("s", 1.0))
    value = seconds * size
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"
