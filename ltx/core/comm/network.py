"""The network between the ranks of an axis: its latency and bandwidth, stated or measured, once for each axis.

    T(sum of B bytes over n ranks) = 2 (n-1) alpha + 2 (n-1)/n B / beta

alpha is measured as half the time of the smallest sum, by the number of messages; beta follows from the time of a sum
so large that latency doesn't count. Ranks measure different times, so all take rank 0's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ltx.core.base.arguments import number
from ltx.core.comm.axis_comm import AxisComm
from ltx.core.comm.channel import Channel
from ltx.core.comm.registry import resolve
from ltx.core.comm.signature import Signature

#: The bytes of the first and of the last large sum, and the factor from one sum to the next.
_FIRST, _LAST, _GROWS = 1 << 16, 1 << 24, 4
#: A sum that takes this long (in seconds) gives the bandwidth: it is far larger than a traffic shaper's bursts.
_LONG_ENOUGH_S = 0.025
#: How often the smallest and the largest sum are repeated. The fastest time counts: other programs may slow a sum.
_SMALL, _LARGE = 9, 3


@dataclass(frozen=True)
class Network:
    """What connects the ranks of an axis. ``ltx.profile.measure_network()`` measures it; a program may state it.

    Args:
        bandwidth: of each rank's link in each direction, in bits per second: 1e9 for 1 Gbit/s.
        latency: of a message, in seconds.

    Raises:
        InputError: (a ValueError) a number is out of range.

    Example:
        >>> import ltx
        >>> network = ltx.profile.Network(bandwidth=1e9, latency=100e-6)
        >>> f"{network.sum_s(4_000_000, ranks=2):.4f}"
        '0.0322'
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth", number("Network.bandwidth", self.bandwidth, 0, more=True))
        object.__setattr__(self, "latency", number("Network.latency", self.latency, 0))

    def start_s(self, ranks: int) -> float:
        """Seconds that the smallest sum over `ranks` ranks takes."""
        return 2 * (ranks - 1) * self.latency

    def sum_s(self, nbytes: float, ranks: int) -> float:
        """Seconds that a sum of `nbytes` over `ranks` ranks takes."""
        return self.start_s(ranks) + 2 * (ranks - 1) / ranks * nbytes * 8 / self.bandwidth

    def __str__(self) -> str:
        unit, size = ("Gbit/s", 1e9) if self.bandwidth >= 1e9 else ("Mbit/s", 1e6)
        return f"{self.bandwidth / size:.3g} {unit}, {self.latency * 1e6:.3g} us a message"


def measured(axis_comm: AxisComm) -> Network:
    """The network of `axis_comm` between its bucket channels. All ranks make the first call together: it measures."""
    if axis_comm.network is None:
        axis_comm.recovery.recover()
        with axis_comm.recovery.aborted_by(BaseException):  # peers may be measuring too
            axis_comm.network = _measure(axis_comm.bucket_channel(0), axis_comm.device)
    network: Network = axis_comm.network
    return network


def measure_network(axis: Any = None) -> Network | None:
    """Latency and bandwidth between the ranks of an axis, as its buckets of gradients see them.

    Every rank calls it, and gets the same figures: rank 0's. They are measured by a few small sums and a few large
    ones, once for an axis; that takes 0.1 s, and up to 0.4 s on links of 100 Mbit/s.

    Args:
        axis: as in :func:`ltx.psum`.

    Returns:
        A :class:`Network`; None where no network is between ranks: in a world of one, and on simulated ranks.

    Raises:
        RankMismatchError: other ranks call something else.

    Example:
        >>> import ltx
        >>> print(ltx.profile.measure_network())  # a world of one
        None
    """
    axis_comm: AxisComm | None = resolve(axis).comm
    if axis_comm is None or axis_comm.size == 1:
        return None
    axis_comm.negotiate(axis_comm.bucket_channel(0), "measure_network", lambda: Signature("measure_network", ()))
    return measured(axis_comm)


def _measure(channel: Channel, device: torch.device) -> Network:
    n = channel.size
    start_s = min(_sum_s(channel, 1, device) for _ in range(_SMALL))
    nbytes = _FIRST
    while _sum_s(channel, nbytes // 4, device) < _LONG_ENOUGH_S and nbytes < _LAST:
        nbytes *= _GROWS
    whole_s = min(_sum_s(channel, nbytes // 4, device) for _ in range(_LARGE))
    # If a small sum was delayed longer than a large one took, half of the large one's time counts.
    moving_s = max(whole_s - start_s, whole_s / 2)
    return Network(8 * 2 * (n - 1) / n * nbytes / moving_s, start_s / (2 * (n - 1)))


def _sum_s(channel: Channel, numel: int, device: torch.device) -> float:
    """The time of a sum of `numel` float32 on rank 0; the sum that tells the others makes all ranks start together."""
    buffer = torch.ones(numel, device=device)
    began = time.perf_counter()
    _read(channel, buffer)
    mine = time.perf_counter() - began if channel.rank == 0 else 0.0
    return float(_read(channel, torch.tensor([mine], dtype=torch.float64, device=device)))


def _read(channel: Channel, buffer: torch.Tensor) -> torch.Tensor:
    """The first number of a sum, on the host, so that the device has completed the sum."""
    return channel.wait_for_host(channel.issue("psum", buffer, "measuring").read(), "measuring")[0]
