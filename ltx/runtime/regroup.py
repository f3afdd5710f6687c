"""A new meeting of the ranks that are left: who comes to it is alive, and goes on.

It is held in the store through which the ranks have met at first, so whoever holds that has to live.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ltx.errors import PeerLostError
from ltx.runtime.placement import Placement

_PAUSE_S = 0.02


class Meeting:
    """The `count`-th meeting of a run, of the ranks of the world that was before.

    Args:
        store: the one in which they have met before.
        count: which meeting it is, the same number on all ranks.
        place: where this process was in the world before.
    """

    def __init__(self, store: Store, count: int, place: Placement):
        self._store, self._place = PrefixStore(f"ltx/elastic/{count}", store), place

    def decline(self) -> None:
        """This rank won't come, so nobody needs to wait for it."""
        try:
            self._store.set(f"declined/{self._place.rank}", "")
        except dist.DistError:
            return  # the store is gone: nobody can meet

    def hold(self, gone: Callable[[], Sequence[int]], limit_s: float) -> Placement | None:
        """This process' place among those who have come; None if they went on without it.

        All get the same answer, for the first to decide decides for all: once everybody has come that isn't known to
        be gone, or at the end of `limit_s`.

        Args:
            gone: the ranks that are known to be gone; asked again and again.

        Raises:
            PeerLostError: the process that holds the store is gone, or doesn't answer.
        """
        try:
            gone()  # first: unlike the store itself, it gives up waiting for an answer
            return self._placed(self._decided(gone, limit_s))
        except (dist.DistError, PeerLostError) as error:
            raise PeerLostError(
                f"rank {self._place.rank}: the process that holds the store through which the ranks meet is gone or "
                "stopped (rank 0's, or the launcher's on its machine), so those that are left can't meet to go on "
                f"without it. Start all of them again, from the last snapshot. ({error})"
            ) from error

    def _decided(self, gone: Callable[[], Sequence[int]], limit_s: float) -> dict[int, list[int]]:
        """(node, local rank) of the ranks that go on, by their rank until now."""
        mine, everyone = self._place, range(self._place.size)
        self._store.set(f"here/{mine.rank}", json.dumps([mine.node_rank, mine.local_rank]))
        deadline = time.monotonic() + limit_s
        while not self._store.check(["decided"]):
            here = [rank for rank in everyone if self._store.check([f"here/{rank}"])]
            missing = [rank for rank in everyone if rank not in here and not self._store.check([f"declined/{rank}"])]
            if not missing or set(missing) <= set(gone()) or time.monotonic() > deadline:
                self._store.compare_set("decided", "", json.dumps(here))
                break
            time.sleep(_PAUSE_S)
        return {rank: json.loads(self._store.get(f"here/{rank}")) for rank in json.loads(self._store.get("decided"))}

    def _placed(self, members: dict[int, list[int]]) -> Placement | None:
        """Ranks and nodes are counted anew; local ranks stay, for they say which device is whose."""
        mine = self._place
        if mine.rank not in members:
            return None
        nodes = sorted({node for node, _ in members.values()})
        return replace(
            mine,
            rank=sorted(members).index(mine.rank),
            size=len(members),
            local_size=sum(node == mine.node_rank for node, _ in members.values()),
            node_rank=nodes.index(mine.node_rank),
            num_nodes=len(nodes),
        )
