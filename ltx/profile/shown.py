"""Measurements as text."""

from __future__ import annotations


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
