"""How the ranks of an axis meet before any of them makes a process group for it.

torch makes groups in C++. A rank whose peers don't come waits there for as long as the axis' timeout, and neither
Ctrl-C nor the end of a peer gets through to it. So the ranks meet in the store first.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore

from ltx.core.base.errors import PeerLostError
from ltx.core.comm.deadlock import OPENED, PATIENCE_S
from ltx.core.comm.debug import caller
from ltx.core.comm.heartbeat import hold_heartbeat, release_heartbeat
from ltx.core.comm.store_exchange import StoreExchange
from ltx.core.comm.timeout_store import TimeoutStore


@dataclass(frozen=True)
class NewGroup:
    """The process group of some ranks of the world, which these alone open together with its axis.

    Attributes:
        ranks: those of the world, in the axis' order.
        backend: that of the group, as :func:`torch.distributed.new_group` takes it.
    """

    ranks: list[int]
    backend: str


class Opening:
    """The opening of an axis by this rank.

    Args:
        name: the axis' name; None for one that no other axis has.
        ranks: those of the world that are on it.
        heartbeat_s: as in :class:`ltx.core.comm.heartbeat.Heartbeat`.

    Attributes:
        name: the axis' name.
        label: has the ranks, the name, and how many times this rank has opened them, which the store counts. So a
            communicator that is opened again after a shutdown doesn't find what the earlier one left.
        heartbeat: this process', held for the axis.
        store: the axis' part of the world's store.
    """

    def __init__(self, name: str | None, ranks: list[int], heartbeat_s: float):
        self._world_store: Any = c10d._get_default_store()
        self._ranks, rank = ranks, dist.get_rank()
        label = f"ltx/{name or 'ranks'}/{hashlib.sha1(repr(ranks).encode()).hexdigest()}"
        self._count = f"{label}/opened by {ranks.index(rank)}"
        number = self._world_store.add(self._count, 1)
        self.label = f"{label}/{number}"
        self.name = f"ranks {ranks}, {number}" if name is None else name
        self.heartbeat = hold_heartbeat(self._world_store, rank, heartbeat_s)
        self.store = TimeoutStore(PrefixStore(f"{self.label}/", self._world_store), self.heartbeat.store_caller)

    def meet(self, exchange: StoreExchange) -> None:
        """Return once all ranks have come to open the axis.

        Raises:
            RankMismatchError: a rank waits for something that this rank would call later.
            PeerLostError: a peer's process has ended.
            CollectiveTimeoutError: a peer hasn't come within the axis' timeout.
        """
        what, began = f"opening axis {self.name!r}", time.monotonic()
        deadlocks = self.heartbeat.deadlocks

        def check() -> None:
            exchange.refuse_lost(OPENED, what, range(exchange.size))
            if time.monotonic() - began > PATIENCE_S:
                key, text = f"{self.label}/{OPENED}", f"{what} ({os.path.basename(caller())})"
                deadlocks.check(key, 1, self._ranks, lambda: text)

        deadlocks.counts[self.label] = lambda: {f"{self.label}/{OPENED}": (1, ())}
        try:
            exchange.announce(OPENED, None)
            exchange.collect(
                OPENED,
                what,
                while_waiting=check,
                to="open it too",
                fix=f" All of its ranks, {self._ranks} of the world, open it together: by the first collective on a "
                "process group or DeviceMesh, or by ltx.axis_from_group.",
            )
        except BaseException:
            # The next attempt is this one again. A peer that comes meanwhile mustn't take this rank for one that waits.
            del deadlocks.counts[self.label]
            with suppress(PeerLostError):
                exchange.forget(OPENED, [exchange.rank])
                self._world_store.add(self._count, -1)
            release_heartbeat(self.heartbeat)
            raise
        finally:
            deadlocks.done()
