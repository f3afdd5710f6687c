"""The end of an axis: all ranks join what some have begun in the background without waiting for it.

Between training steps a rank may have sums under way that its peers haven't begun (``train.finish(state)`` waits for
them). A process group with one can't be closed: it waits for the peers, and a process that ends meanwhile is aborted.
So when an axis is closed, ranks tell each other through the store what they have issued. Those that are behind issue
the rest, with zeros, and drop the results.
"""

from __future__ import annotations

import time

import torch

from ltx.comm.channel import Channel
from ltx.comm.store_exchange import StoreExchange, poll_until
from ltx.comm.work import Work
from ltx.errors import LtxError

#: How long a rank waits for its peers to come to the end too.
PATIENCE_S = 3.0


def drain_background(channel: Channel, exchange: StoreExchange) -> None:
    """Join what peers have issued on `channel`. Gives up after :data:`PATIENCE_S`, or if a peer is lost.

    Args:
        channel: one that keeps its history.
        exchange: that of the channel's ranks.
    """
    history = channel.history
    if not history or channel.failed is not None or channel.size == 1:
        return
    deadline = time.monotonic() + PATIENCE_S
    own = [channel.begun, [(op, list(shape), str(dtype), list(args)) for op, shape, dtype, args in history]]
    try:
        by_rank = exchange.exchange(f"drain/{channel.address}", own, "the end of an axis", PATIENCE_S)
        begun, issues = max(by_rank, key=lambda issued: issued[0])
        missing = begun - channel.begun
        if missing > len(issues):
            return
        works = [*channel.works, *(_issue(channel, *issue) for issue in issues[len(issues) - missing :])]
        # A group that is closed while its own part is under way breaks its peers' connections.
        poll_until(lambda: all(work.done for work in works), deadline - time.monotonic())
    except LtxError:
        return  # a peer is gone, or has issued something else: it won't join


def _issue(channel: Channel, operation: str, shape: list[int], dtype: str, arguments: list[int]) -> Work:
    buffer = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=channel.device)
    return channel.issue(operation, buffer, "drain_background", tuple(arguments))
