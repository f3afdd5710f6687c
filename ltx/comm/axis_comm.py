"""The communicator of one axis whose ranks are processes.

It owns the axis' channels, and the signatures that the ranks have compared. All ranks of a group open their
communicators together, in the same order; ``ltx.shutdown`` closes them.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore

from ltx.axis import Axis
from ltx.backings import GroupBacking, Part
from ltx.comm.buffer_pool import BufferPool
from ltx.comm.channel import Channel
from ltx.comm.debug import under_way
from ltx.comm.drain_background import drain_background
from ltx.comm.heartbeat import TimeoutStore, hold_heartbeat, release_heartbeat
from ltx.comm.negotiation import Negotiation
from ltx.comm.network import Network
from ltx.comm.notes import Notes
from ltx.comm.posts import StorePosts
from ltx.comm.process_groups import open_group, unregister
from ltx.comm.recovery import Recovery
from ltx.comm.signature import Agreement, Post, Signature
from ltx.comm.transports.open_shared_memory import open_transport
from ltx.errors import LtxError, PeerLostError, WorldError

_DEFAULT_TIMEOUT = timedelta(seconds=1800)
_HISTORY = 1024  # collectives in the background that are remembered


class Later(Protocol):
    """A step whose reductions are still pending on the bucket channels."""

    def wait_all(self) -> None:
        """Wait for all of them, on this rank."""
        ...


class AxisComm:
    """Channels and known signatures of one axis in this process."""

    def __init__(self, name: str, group: dist.ProcessGroup, timeout: timedelta, heartbeat_s: float):
        self.name = name
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.timeout_s = timeout.total_seconds()
        self.global_ranks = dist.get_process_group_ranks(group)
        self._timeout = timeout
        # The label has the ranks, the name, and how many times this rank has opened them, which the store counts. So a
        # communicator that is opened again after a shutdown doesn't find what the earlier one left.
        store = c10d._get_default_store()
        label = f"ltx/{name}/{hashlib.sha1(repr(self.global_ranks).encode()).hexdigest()}"
        self.label = f"{label}/{store.add(f'{label}/opened by {self.rank}', 1)}"
        self.heartbeat = hold_heartbeat(store, dist.get_rank(), heartbeat_s)
        self._store = TimeoutStore(PrefixStore(f"{self.label}/", store), self.heartbeat)
        self.posts = StorePosts(self._store, self.rank, self.size)
        self._known: dict[Any, Agreement] = {}
        self._phases: list[Channel] = []
        self.closed = False
        self._pid = os.getpid()
        self._foreign: WorldError | None = None  # in a fork of the rank's process: why it can't be used
        self._compared: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
        self.network: Network | None = None  # once it has been measured
        self.buffer_pool = BufferPool()  # of the gradients' buckets
        self._parts: dict[tuple[int, ...], Axis] = {}
        #: Backward passes that land later (see ltx.training.pending_step), oldest first.
        self.pending_steps: list[Later] = []
        #: Collectives that were begun and not waited for yet (see ltx.collectives.futures), oldest first.
        self.futures: list[Any] = []
        self.under_way = ""  # what is issued on the bucket channels; errors say it
        self._left: list[Channel] = []  # the channels of the last aborted pass
        self.recovery = Recovery(
            self._store, self.posts.holds, self.rank, self.size, name, self.timeout_s, self._fail_channels, self._renew
        )
        self.negotiation = Negotiation(self)
        self.user = self._open_channel("user", transports=True)
        self.background = self._open_background()
        self.open_phases(1)
        self.heartbeat.reports[self.label] = lambda: {channel.address: channel.issued for channel in self.channels}
        self.notes = Notes(self._store, self.posts.holds, self.gone, self.rank, self.size, self.timeout_s)
        self.heartbeat.deadlocks.counts[self.label] = self.negotiation.counts

    def _open_channel(self, name: str, transports: bool = False, generation: int = 0, in_turn: bool = False) -> Channel:
        address = f"{name}.{generation}" if generation else name
        group = open_group(
            self.global_ranks,
            f"{self.label}/{address}",
            dist.get_backend(self.group),
            self._timeout,
            f"ltx:{self.name}:{name}",
            in_turn,
        )
        transport = None
        if transports and self.size > 1 and dist.get_backend(self.group) == "gloo":
            transport = open_transport(self.rank, self.size, PrefixStore(f"{address}/", self._store.store))
        return Channel(name, address, self.name, group, self.timeout_s, self.negotiation, transport)

    def _open_background(self) -> Channel:
        channel = self._open_channel("background", generation=self.recovery.generation)
        channel.history = deque(maxlen=_HISTORY)
        return channel

    def open_phases(self, count: int) -> None:
        """Open bucket channels until there are `count`. Opening waits for all ranks, so all must call this together."""
        while len(self._phases) < count:
            name = f"buckets {len(self._phases)}"
            made = self._open_channel(name, transports=True, generation=self.recovery.generation, in_turn=True)
            self._phases.append(made)

    def part(self, name: str, part: Part) -> Axis:
        """The axis of those ranks of this one that `part` puts together with this rank. All ranks open it together."""
        members = part.members(self.rank)
        if members not in self._parts:
            ranks = [self.global_ranks[member] for member in members]
            label = f"{self.label}/{name} of ranks {ranks}"
            group = open_group(ranks, label, dist.get_backend(self.group), self._timeout, name)
            axis_comm = AxisComm(name, group, self._timeout, self.heartbeat.heartbeat_s)
            self._parts[members] = Axis(name, axis_comm.size, GroupBacking(axis_comm.rank, axis_comm))
        return self._parts[members]

    @property
    def parts(self) -> list[Axis]:
        """The open parts."""
        return list(self._parts.values())

    def bucket_channel(self, phase: int) -> Channel:
        """The channel for the `phase`-th collective of each bucket."""
        return self._phases[phase]

    def is_later_phase(self, channel: Channel) -> bool:
        """Whether `channel` is that of a second or later collective of each bucket."""
        return channel in self._phases[1:]

    def _fail_channels(self, error: LtxError) -> None:
        for channel in (*self._phases, self.background):
            channel.failed = channel.failed or error
            # Compiled graphs find a process group by its name: they can't use this one either.
            unregister(channel.group)
        for part in self._part_lines:
            part.recovery.abort(error)

    @property
    def _part_lines(self) -> list[AxisComm]:
        return [axis.comm for axis in self._parts.values() if axis.comm is not None]

    def _renew(self) -> None:
        """Replace the failed channels. Their process groups stay open until the next time: a schedule may still refer
        to them.
        """
        _let_go(self._left)
        self._left = [*self._phases, self.background]
        for channel in self._phases:
            if channel.transport is not None:
                channel.transport.close()
        count, self._phases = len(self._phases), []
        self.background = self._open_background()
        self.open_phases(count)
        for part in self._part_lines:
            part.recovery.recover()

    def wait_for_earlier(self) -> None:
        """Wait for pending steps before more is issued on the bucket channels. All ranks do so in the same order."""
        for later in list(self.pending_steps):
            later.wait_all()

    @property
    def device(self) -> torch.device:
        """Where the backend needs its tensors: the current CUDA device for NCCL, else the CPU."""
        nccl = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    @property
    def channels(self) -> list[Channel]:
        """All channels."""
        return [self.user, self.background, *self._phases, *self._left]

    def close(self) -> None:
        """Close the channels and the parts, and destroy their process groups."""
        if self.closed:
            return
        self.notes.finish()
        self.closed = True
        self.buffer_pool.clear()
        for later in list(self.pending_steps):
            with suppress(LtxError):  # a later read of that state raises
                later.wait_all()
        for future in list(self.futures):
            future.wait_all()
        drain_background(self.background, self._store, self.posts.holds, self.lost)
        for work in list(self.background.works):
            work.give_up()
        with suppress(PeerLostError):  # the store is gone
            self.posts.leave()
        self.heartbeat.reports.pop(self.label, None)
        self.heartbeat.deadlocks.counts.pop(self.label, None)
        release_heartbeat(self.heartbeat)
        for axis_comm in self._part_lines:
            axis_comm.close()
            dist.destroy_process_group(axis_comm.group)
        for channel in self.channels:
            if channel.transport is not None:
                channel.transport.close()
            dist.destroy_process_group(channel.group)

    def negotiate(
        self,
        channel: Channel,
        key: Any,
        describe: Callable[[], Signature],
        offer: Callable[[], Any] = lambda: None,
    ) -> Agreement:
        """Make sure that all ranks are about to issue the same thing on `channel`.

        Args:
            channel: the channel of the collective that follows.
            key: hashable; equal keys mean equal signatures. A known key costs a dictionary look-up.
            describe: returns the :class:`Signature`; called for a new key.
            offer: returns a JSON value that may differ between ranks; called for a new key. All ranks take rank 0's.

        Raises:
            RankMismatchError: on every rank, before any data has moved.
        """
        if self._foreign is not None:
            raise self._foreign
        known = self._known.get(key)
        if under_way and channel is not self.background:
            known = self._known[key] = under_way[-1].negotiate(self, key, describe, offer, known)
        elif known is None:
            signature = describe()
            known = Agreement(signature, signature.fingerprint, self._compare(channel, signature, offer()))
            self._known[key] = known
        return known

    def has_compared(self, fn: Any, key: Hashable) -> bool:
        """Whether the ranks have compared the parameters of the function `fn` under this `key`."""
        try:
            return key in self._compared.get(fn, ())
        except TypeError:  # `fn` can't be hashed or weakly referenced
            return key in self._compared.get(AxisComm, ())

    def count_as_compared(self, fn: Any, key: Hashable) -> None:
        """Make :meth:`has_compared` true for `fn` and `key`."""
        try:
            self._compared.setdefault(fn, set()).add(key)
        except TypeError:
            self._compared.setdefault(AxisComm, set()).add(key)

    def agree(self, keys: Iterable[Any], agreement: Agreement) -> None:
        """Record an agreement about a whole call for each of its parts, which are issued under `keys`."""
        parts = list(keys)
        self._known.update(dict.fromkeys(parts, agreement))
        if under_way:
            under_way[-1].cover(self, parts)

    def negotiate_issue(self, channel: Channel, key: Any, describe: Callable[[], Signature]) -> None:
        """:meth:`negotiate`, and count the collective that follows into the channel's digest."""
        channel.advance(self.negotiate(channel, key, describe))

    def refuse_fork(self) -> None:
        """Refuse every collective from now on: this process is a fork of the rank's own.

        A fork has copies of the rank's connections and shares its memory, so peers would take it for the rank.
        """
        self._foreign = WorldError(
            f"rank {self.rank}: this process ({os.getpid()}) is a fork of the rank's own ({self._pid}), and can't take "
            f"part in collectives on axis {self.name!r}: its peers would take it for the rank. Call them in the rank's "
            "own process. Forks that only compute, such as workers of a DataLoader, are fine."
        )
        for channel in self.channels:
            channel.failed = self._foreign

    def _compare(self, channel: Channel, signature: Signature, offer: Any) -> Any:
        place = f"{channel.address}/{channel.compared}/{channel.issued}"
        channel.compared += 1
        return self.negotiation.exchange(place, Post(signature, offer))[0].value

    def notes_without_store(self, folder: Path) -> Notes:
        """Notes in a file in `folder` that all ranks see, for when the store is gone."""
        name = hashlib.sha1(f"{self.label} of {self.heartbeat.world}".encode()).hexdigest()[:12]
        return self.notes.through(folder / f".ltx-notes-{name}", self.lost)

    def exchange_values(self, place: str, signature: Signature, value: Any) -> list[Any]:
        """Every rank's `value`, as JSON, at a place that `notes` began. No collective is issued. For the main thread.

        If a peer waits in a collective instead, both ranks raise.

        Raises:
            RankMismatchError, PeerLostError, CollectiveTimeoutError: as :meth:`Negotiation.exchange`.
        """
        if self._foreign is not None:
            raise self._foreign
        issued = {channel.address: channel.issued for channel in self.channels}
        return [post.value for post in self.negotiation.exchange(place, Post(signature, value, issued=issued))]

    def lost(self) -> list[int]:
        """The peers whose processes have died, where all ranks share a machine."""
        return self.user.transport.lost_peers() if self.user.transport is not None else []

    def gone(self) -> list[int]:
        """The peers whose processes have ended, as far as is known, or whose heartbeats have stopped.

        Raises:
            PeerLostError: the store is gone or doesn't answer.
        """
        silent = [self.global_ranks.index(rank) for rank in self.heartbeat.look(self.global_ranks)]
        return sorted({*self.lost(), *silent})


def _let_go(channels: list[Channel]) -> None:
    """Drop the process groups of channels that are no longer used.

    A group ends with its last reference, and waits then for its pending collectives: forever, if a peer never joins
    them. So a thread drops it.
    """
    groups = []
    for channel in channels:
        dist.destroy_process_group(channel.group)
        groups.append(channel.group)
        channel.group = None
    Thread(target=groups.clear, name="ltx-let-go", daemon=True).start()
