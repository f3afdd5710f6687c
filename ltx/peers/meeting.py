"""The ranks of a world that is being made: they meet in its store, compare what they are, and notice if one is lost."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ltx.core.base.errors import LtxError, PeerLostError, WorldError
from ltx.core.comm.backends import HOST_BLOCKING, look_out, looking_out
from ltx.core.comm.passes import Failed
from ltx.core.comm.transport import poll_until
from ltx.core.world.world import Placement, World, process
from ltx.peers.addresses import interface_of, is_loopback, open_store, own_address_towards
from ltx.peers.diagnosis import INIT, Status, Watched, silent_of
from ltx.peers.patient_store import TimeoutStore
from ltx.peers.store_exchange import StoreExchange
from ltx.peers.watcher import Watcher

#: The key in the store of a world that is being made at which its ranks say that they have come.
HERE = "here"
# How long a rank that can't make its part of the world, or that holds the store where it is told, waits for the others.
_TELL_S = 5.0
_ANSWER_S = 30.0  # how long the store may take to answer while ranks connect: it resolves their host names one by one


def meet(
    placement: Placement, world: World, timeout: timedelta, heartbeat_s: float, undo: ExitStack, meanwhile: ExitStack
) -> tuple[Meeting, Store]:
    """The meeting of a world's ranks, which ends with `meanwhile`, once all have come; and their store, for torch."""
    assert placement.master is not None
    address, port = placement.master
    store = process.stores.get(placement)
    if store is None:
        holds = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = open_store(address, port, holds, timeout)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # When the launcher restarts ranks, its store still holds keys of the earlier ranks.
            store = PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        process.stores[placement] = store
    store.set_timeout(timeout)
    world_store = PrefixStore(f"ltx/{process.worlds}", store)
    # A rank makes its three connections to the store before its peers hear of it. This connection is only for
    # torch, in this world: it is abandoned if gloo still waits on it at the end.
    apart = world_store.clone()  # type: ignore[attr-defined]
    meeting = Meeting(world_store, world, timeout.total_seconds(), heartbeat_s)
    meanwhile.push(meeting.end)
    meanwhile.enter_context(looking_out(meeting.look))
    addresses = meeting.gather(own_address_towards(address, port))
    meeting.watcher.expect_answers()
    # A node may resolve its own name to a loopback address, which its peers can't reach.
    outside = [other for other in addresses if other and not is_loopback(other)]
    mine = addresses[world.rank]
    mine = own_address_towards(outside[0], port) if outside and is_loopback(mine) else mine
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(mine)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        undo.callback(os.environ.pop, "GLOO_SOCKET_IFNAME", None)
    _refuse_shared_devices(meeting.exchange, world)
    return meeting, apart


def _refuse_shared_devices(exchange: StoreExchange, world: World) -> None:
    """Raise on all ranks if two compute on one accelerator; NCCL 2.30 has a setting that allows it, for tests."""
    if world.device.type == "cpu" or world.backend in HOST_BLOCKING:
        return
    told = "nccl" in world.backend and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if told and torch.cuda.nccl.version() >= (2, 30):
        return
    found = torch.get_device_module(world.device.type).get_device_properties(world.device)
    mine = f"{socket.gethostname()} {getattr(found, 'uuid', world.device)}"
    first: dict[str, int] = {}
    for rank, device in enumerate(exchange.exchange("device", mine, "ltx.init, comparing devices")):
        other = first.setdefault(device, rank)
        if other != rank:
            raise WorldError(
                f"rank {world.rank}: ranks {other} and {rank} are both on one device, and {world.backend} takes one "
                "rank a device. Start fewer ranks on that node, show each its own device (CUDA_VISIBLE_DEVICES), or "
                'pass backend="gloo".'
            )


def next_is_begun() -> bool:
    """Whether a peer makes the world after this one already."""
    return any(store.check([f"ltx/{process.worlds + 1}/{HERE}"]) for store in process.stores.values())


class Meeting(Watched):
    """Ranks that make a world exchange values, and notice if one is lost. The world's axes use the same watcher."""

    label = INIT

    def __init__(self, store: Store, world: World, timeout_s: float, heartbeat_s: float):
        self.world, self._made, self.global_ranks = world, False, list(range(world.size))
        self._failed: Failed | None = None  # why this rank can't make its part
        self._told = False  # whether a peer has failed, of which the others hear by itself
        self.watcher = Watcher(store, world.rank, heartbeat_s, _ANSWER_S)
        self.watcher.axes[self.label] = self
        self._store = TimeoutStore(store, self.watcher.store_caller)
        self.exchange = StoreExchange(self._store, world.rank, world.size, timeout_s, list)

    def end(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """The world is made, or has failed: the peers hear why, as the store may end with this process."""
        if error is not None and not self._told:
            self._failed = Failed(f"{type(error).__name__}: {error}".partition("\n")[0], lost=False)
        if error is not None and (not self._told or self.world.rank == 0):
            with suppress(LtxError, dist.DistError):
                self.watcher.tell()
                if isinstance(error, Exception):  # an interrupt has to be quick
                    poll_until(lambda: len(self.watcher.look_now()) == self.world.size, _TELL_S)
                self.watcher.wait_until_heard()
        self.watcher.leave(self)
        self.watcher.release()

    def status(self) -> Status:
        """Whether this rank has made its part of the world, or why it can't."""
        return Status(ended=self._made, failed=self._failed)

    def look(self) -> None:
        """Raise if a rank that has come can't make its part of the world (WorldError), or was lost (PeerLostError)."""
        records = self.watcher.look()
        of = {rank: record.axes.get(self.label, Status()) for rank, record in records.items()}
        for rank, status in of.items():
            if status.failed is not None and rank != self.world.rank:
                self._told = True
                why = f"rank {rank} couldn't make its part of the world: {status.failed.why}"
                raise WorldError(f"rank {self.world.rank}: {why}")
        made = [rank for rank, status in of.items() if status.ended]
        gone = {*silent_of(records), *(rank for rank, record in records.items() if not record.beat)}
        if lost := gone.difference(made, [self.world.rank]):
            who = ", ".join(map(str, sorted(lost)))
            raise PeerLostError(f"rank {self.world.rank}: rank {who} has come, and shows no sign of life any more.")

    def gather(self, own: Any) -> list[Any]:
        """All ranks' JSON values, here `own`; WorldError if their numbers differ, TimeoutError if some don't come."""
        world, here = self.world, dict[int, tuple[int, Any]]()
        self._store.append(HERE, f"{json.dumps([world.rank, world.size, own])}\n")

        def all_are_here() -> bool:
            lines = self._store.get(HERE).splitlines() if self._store.check([HERE]) else []
            here.update((rank, (size, its)) for rank, size, its in map(json.loads, lines))
            if len({size for size, _ in here.values()}) > 1:
                told = "; ".join(f"rank {rank} says {size}" for rank, (size, _) in sorted(here.items()))
                raise WorldError(
                    f"rank {world.rank}: the ranks disagree about how many they are: {told}. Start all of them with "
                    "the same WORLD_SIZE, or size= of ltx.init."
                )
            return len(here) >= world.size

        if not poll_until(all_are_here, self.exchange.timeout_s, look_out):
            absent = ", ".join(str(rank) for rank in range(world.size) if rank not in here)
            raise TimeoutError(f"rank {absent} hasn't come")
        return [here[rank][1] for rank in range(world.size)]

    def finish(self, placement: Placement) -> None:
        """Compare nodes, if ranks can't be sure. Rank 0 waits for all, who need its store if its process ends next."""
        world, wrong = self.world, ""
        if not placement.knows_node:
            own = (placement.node_rank, placement.num_nodes, placement.local_rank, placement.local_size)
            wrong = _misfit(self.exchange.exchange("place", own, "ltx.init, comparing nodes"))
        self._made = True
        self.watcher.tell(wait=True)  # must come before peers hear that this rank's watcher ends
        self.exchange.announce("made", True)
        if world.rank == 0:
            self.exchange.collect("made", "ltx.init")
        if wrong:
            raise WorldError(f"rank {world.rank} of {world.size} (launcher {world.launcher}): {wrong}")


def _misfit(places: Sequence[Sequence[int]]) -> str:
    """An error text about all ranks' (node, number of nodes, local rank, local size); "" if they are consistent."""
    taken: dict[tuple[int, int], int] = {}
    on_node = Counter(place[0] for place in places)
    for rank, (node, num_nodes, local_rank, local_size) in enumerate(places):
        other = taken.setdefault((node, local_rank), rank)
        if other == rank and (num_nodes, local_size) == (len(on_node), on_node[node]):
            continue
        found = f"rank {other} is there too" if other != rank else f"{len(on_node)} with {on_node[node]} on this one"
        return (
            f"rank {rank} takes itself for local rank {local_rank} of {local_size} on node {node} of {num_nodes}, but "
            f"all together found {found}. Where nodes have unequal numbers of ranks, which node it is doesn't follow "
            "from what mpirun or arguments say. Under mpirun, set GROUP_RANK to the index of the node and "
            "GROUP_WORLD_SIZE to the number of nodes; instead of arguments, set torchrun's environment variables."
        )
    return ""
