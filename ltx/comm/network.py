"""What connects the ranks of an axis, as two numbers.

T(sum of B bytes over n ranks) = 2 (n-1) alpha + 2 (n-1)/n B / beta
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ltx.arguments import brief
from ltx.errors import InputError


@dataclass(frozen=True)
class Network:
    """What connects the ranks of an axis. ``ltx.profile.measure_network()`` measures it; a program may state it.

    Args:
        bandwidth: of each rank's link in each direction, in bits per second: 1e9 for 1 Gbit/s.
        latency: of a message, in seconds.

    Raises:
        InputError: (a ValueError) a number that can't be.

    Example:
        >>> import ltx
        >>> network = ltx.profile.Network(bandwidth=1e9, latency=100e-6)
        >>> f"{network.sum_s(4_000_000, ranks=2):.4f}"
        '0.0322'
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        for name, least in (("bandwidth", "more than 0"), ("latency", "at least 0")):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (name == "bandwidth" and value == 0):
                raise InputError(f"Network.{name} must be a finite number, {least}, got {brief(value)}.")

    def start_s(self, ranks: int) -> float:
        """Seconds that a sum over so many ranks takes however small it is."""
        return 2 * (ranks - 1) * self.latency

    def sum_s(self, nbytes: float, ranks: int) -> float:
        """Seconds that a sum of `nbytes` over so many ranks takes."""
        return self.start_s(ranks) + 2 * (ranks - 1) / ranks * nbytes * 8 / self.bandwidth

    def __str__(self) -> str:
        unit, size = ("Gbit/s", 1e9) if self.bandwidth >= 1e9 else ("Mbit/s", 1e6)
        return f"{self.bandwidth / size:.3g} {unit}, {self.latency * 1e6:.3g} us a message"
