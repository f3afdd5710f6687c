"""What a collective takes: of a link, and of a rank's own core, as :func:`ltx.profile.plan` counts it.

    T(sum of B bytes over n ranks) = 2 (n-1) alpha + 2 (n-1)/n B / beta

and likewise for the other collectives: alpha is the latency of a message, beta the bandwidth of a rank's link (Hockney,
"The communication challenge for MPP", 1994; Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005, section 4). The figures of cores were measured on an AMD EPYC with torch 2.13, by ``python
-m benchmarks.plan --codecs`` and ``python -m benchmarks.prices``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ltx.comm.operations import OPERATIONS
from ltx.estimate.requests import Collective

#: Seconds of a core for a float32 number, by hook with its defaults: packing, encoding, adding up, decoding.
CODEC_S: dict[str, float] = {
    "AllReduce": 0.4e-9,
    "FP16": 0.7e-9,
    "BF16": 0.7e-9,
    "PowerSGD": 3.0e-9,
    "BatchedPowerSGD": 4.4e-9,
    "ByteGrad": 2.7e-9,
    "Quantize": 3.3e-9,
    "QSGD": 35e-9,
    "OneBit": 4.7e-9,
    "TopK": 7.5e-9,
    "RandomK": 3.3e-9,
    "Noop": 0.3e-9,
    # Of strategies.
    "Adasum": 2.8e-9,
    "MeanMomentum": 3.6e-9,
    "Ring": 4e-9,
    "ShiftOne": 0.6e-9,
    "WithinNode": 0.4e-9,
    "ToParts": 0.4e-9,
    "FromParts": 0.4e-9,
    "MeanPart": 0.4e-9,
    "AllParts": 0.4e-9,
}

#: Seconds for a gradient's number by which its passing through a core's caches makes the rest of the step longer: the
#: backward pass and the optimizer find theirs empty. As for :data:`SEND_S`, where cores do such work at all.
BESIDE_S = 1.6e-9

#: Seconds for a number, with an optimizer of two moments, that isn't updated in place.
COPY_S = 1.2e-9

#: Seconds for a byte that a core sends, and one that it receives meanwhile, through the kernel's sockets.
SEND_S = 1.4e-9

#: The same by operation, to that of a sum of float32 numbers: gathers and exchanges go in pieces that are put together.
SEND_SHARES = {"psum": 1.0, "all_gather": 1.8, "psum_scatter": 1.7, "all_to_all": 1.7, "ppermute": 0.9}
#: To that of a sum of float32 numbers, for a byte of one in half precision, which gloo adds up more slowly.
HALF_SUM = {"float16": 1.5, "bfloat16": 1.2}


def sending_share(collective: Collective) -> float:
    """What of :data:`SEND_S` a byte of a collective takes."""
    if collective.operation == "psum":
        return HALF_SUM.get(collective.buffer.partition("[")[0], 1.0)
    return SEND_SHARES[collective.operation]


def sending_s(bandwidth: float, on_core: bool = True) -> float:
    """Seconds of a core for a byte sent over a link of so many bits a second.

    One that is faster than a core can feed through sockets comes with hardware that does it (RDMA, NCCL's). Where the
    step is an accelerator's, cores have nothing else to do.
    """
    return SEND_S if on_core and 8 / bandwidth >= SEND_S else 0.0


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
