"""The end of a line: what ranks have begun in the background without waiting for it, all of them join.

Between training steps a rank may have sums under way that its peers haven't begun (:meth:`ltx.train_step`'s ``finish``
lands them). A process group with one can't be taken down: it waits for the peers, and a process that ends meanwhile is
aborted. So when a line is closed, ranks tell each other through the store what they have issued; those that are behind
issue the rest, with zeros, for nobody.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from ltx.comm.channel import Channel
from ltx.comm.heartbeat import TimeoutStore
from ltx.comm.work import Work
from ltx.errors import LtxError

#: How long a rank waits for its peers to come to the end too.
PATIENCE_S = 3.0


def drain_background(
    channel: Channel, store: TimeoutStore, posted: Callable[[list[str]], bool], lost: Callable[[], list[int]]
) -> None:
    """Join what peers have issued on `channel`. Gives up after :data:`PATIENCE_S`, or if a peer is lost.

    Args:
        channel: one that keeps its history.
        store: what the ranks share.
        posted: whether all of some keys are in it; raises PeerLostError if it is gone.
        lost: the peers whose processes have died, as far as is known.
    """
    history = channel.history
    if not history or channel.failed is not None or channel.size == 1:
        return
    deadline = time.monotonic() + PATIENCE_S
    mine = [channel.begun, [(op, list(shape), str(dtype), list(args)) for op, shape, dtype, args in history]]
    keys = [f"farewell/{channel.address}/{rank}" for rank in range(channel.size)]
    try:
        store.set(keys[channel.rank], json.dumps(mine))
        while not posted(keys):
            if lost() or time.monotonic() > deadline:
                return
            time.sleep(0.005)
        begun, issues = max((json.loads(store.get(key)) for key in keys), key=lambda post: post[0])
        missing = begun - channel.begun
        if missing > len(issues):
            return
        joined = [_issue(channel, *issue) for issue in issues[len(issues) - missing :]]
        # One that is taken down with its own part under way breaks its peers' connections.
        _finish([*channel.works, *joined], deadline)
    except LtxError:
        return  # a peer is gone, or went out of step: there is nobody to wait for


def _issue(channel: Channel, operation: str, shape: list[int], dtype: str, arguments: list[int]) -> Work:
    buffer = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=channel.device)
    return channel.issue(operation, buffer, "farewell", tuple(arguments))


def _finish(works: list[Work], deadline: float) -> None:
    while not all(work.done for work in works) and time.monotonic() < deadline:
        time.sleep(0.001)
