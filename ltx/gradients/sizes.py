"""Sizes of buckets from the cost model: what ``bucket_bytes="auto"`` comes to.

Gradients of B bytes in buckets of b take B/b starts of a sum, a seconds each, and the last bucket's own time behind the
backward pass, b/r at r bytes a second:

    lost(b) = a B/b + b/r,     least at     b = sqrt(a B r)

The first part is lost where the link is what a step waits for, the second where it isn't. Which of them holds depends
on the computation, of which nothing is known yet; their sum is never far from either. Up to the size that strategies
have by default, two things make buckets larger: starts are to take a fiftieth of their time at most, for where the link
is the bottleneck; and a bucket takes its rank about a millisecond besides, of calls, caches and waiting for a
processor, which counts like a start.

Sizes are powers of two, so that two measurements of one network come to the same.
"""

from __future__ import annotations

import math

from ltx.comm import Network

KIB = 1 << 10
MIB = 1 << 20

#: Without a network to go by: of a bucket, and of the first one at most.
DEFAULT_BYTES = 4 * MIB
#: The same where streams order collectives: kernels of an accelerator cost more to start, as for torch's DDP.
DEFAULT_STREAM_BYTES = 25 * MIB
_LEAST, _MOST = 256 * KIB, 256 * MIB
#: Of a bucket's time, what its start may take.
_START = 0.02
#: What a bucket takes of its rank's time.
_OWN_S = 1e-3
#: The first bucket is as much smaller than the others.
_FIRST = 4


def bucket_sizes(network: Network, ranks: int, nbytes: int, first_bytes: int) -> tuple[int, int]:
    """Bytes of a bucket, and of the first one, for gradients of `nbytes` on a network.

    Args:
        first_bytes: of the first bucket at most.

    >>> bucket_sizes(Network(bandwidth=1e9, latency=100e-6), 2, 21_000_000, MIB)  # 2 MiB
    (2097152, 524288)
    """
    start_s = network.start_s(ranks)
    rate = nbytes / max(network.sum_s(nbytes, ranks) - start_s, 1e-12)
    best = math.sqrt(start_s * nbytes * rate)
    worthwhile = max(start_s * rate / _START, math.sqrt((start_s + _OWN_S) * nbytes * rate))
    size = min(max(best, min(worthwhile, DEFAULT_BYTES), _LEAST), _MOST)
    rounded = 1 << round(math.log2(size))
    return rounded, min(first_bytes, max(rounded // _FIRST, 1))
