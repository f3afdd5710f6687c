"""The time of a collective on a link.

    T(sum of B bytes over n ranks) = 2 (n-1) alpha + 2 (n-1)/n B / beta

and likewise for the other collectives: alpha is the latency of a message, beta the bandwidth of a rank's link (Hockney,
"The communication challenge for MPP", 1994; Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from ltx.comm.operations import OPERATIONS
from ltx.estimate.codec_costs import sending_share
from ltx.estimate.requests import Collective


@dataclass(frozen=True)
class Link:
    """What connects the ranks, and what a rank's core takes to feed it with a byte, in seconds."""

    bandwidth: float
    latency: float
    send_s: float = 0.0

    def seconds(self, collective: Collective) -> float:
        """How long a collective takes, alone on the link, which is no faster than the core that feeds it."""
        messages = OPERATIONS[collective.operation].messages(collective.ranks)
        return messages * self.latency + max(collective.nbytes * 8 / self.bandwidth, self.core_s(collective))

    def core_s(self, collective: Collective) -> float:
        """How long it keeps a core busy."""
        return collective.nbytes * self.send_s * sending_share(collective)
