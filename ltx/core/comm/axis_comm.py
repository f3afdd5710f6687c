"""The communicator of one axis whose ranks are processes.

It owns the axis' channels, and the signatures that the ranks have compared. All ranks of a group open their
communicators together, in the same order; ``ltx.shutdown`` closes them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ltx.core.base.errors import DeadlockDetectedError, LtxError, PeerLostError, WorldError
from ltx.core.base.traced import refuse_script
from ltx.core.comm import backends
from ltx.core.comm.backends import CommStream, HostCopy, StreamGroup, open_group
from ltx.core.comm.buffer_pool import BufferPool
from ltx.core.comm.channel import DRAINING_S, Channel
from ltx.core.comm.passes import Failed, Passes
from ltx.core.comm.peers import BUCKETS, HandedIn, under_way
from ltx.core.comm.signature import Agreement, Seen, Signature
from ltx.core.comm.transport import Transport, Transports
from ltx.core.ranks.backings import Part, Ranks


@dataclass(frozen=True)
class NewGroup:
    """A process group of some ranks of the world; only these ranks open it, together with its axis."""

    ranks: list[int]  # ranks of the world, in the axis' order
    backend: str  # as torch.distributed.new_group takes it


_HISTORY = 1024  # the number of background collectives that a channel's history keeps


class AxisComm(Ranks):
    """Channels and known signatures of one axis in this process."""

    def __init__(self, name: str | None, group: dist.ProcessGroup | NewGroup, timeout: timedelta, heartbeat_s: float):
        self.global_ranks = group.ranks if isinstance(group, NewGroup) else dist.get_process_group_ranks(group)
        self.rank = self.global_ranks.index(dist.get_rank())
        self.size = len(self.global_ranks)
        self.timeout = timeout
        self.timeout_s = timeout.total_seconds()
        self.peers = HandedIn.peers(self, name, heartbeat_s)
        self.label, self.store_exchange = self.peers.label, self.peers.store_exchange
        self.name = f"ranks {self.global_ranks}, {self.peers.number}" if name is None else name
        self._transport: Transport | None = None  # of the user's channel
        self.opened = False
        self.passes = Passes(self)
        self.peers.meet()
        if isinstance(group, NewGroup):
            label = f"{self.label}/group"
            group = open_group(group.ranks, label, group.backend, timeout, self.name, self._refuse_gone)
        self.group: Any = group  # None once the world is gone
        self.backends = backends.backends_of(group)
        self._known: dict[Any, Agreement] = {}
        self._phases: list[Channel] = []
        self.closed = False
        self._pid = os.getpid()
        self._fork_error: WorldError | None = None  # set once this process is a fork of the rank's process
        self.compared = Seen()
        self.buffer_pool = BufferPool(self._room)  # of the gradients' buckets
        self._parts: dict[tuple[int, ...], AxisComm] = {}
        self.unread: Any = None  # the IssuedSummary of the last pass, if the host hasn't read it
        self.issued_in_graphs = 0  # the number of the user's collectives that may be part of a backward pass
        #: Collectives that have begun and weren't waited for yet (see ltx.core.collectives.futures), oldest first.
        self.futures: list[Any] = []
        self.under_way = ""  # the name, for errors, of the work on the bucket channels
        self._streams: dict[torch.device, CommStream] = {}
        self.stream_group = self._open_stream_group()
        self.user = self._open_channel("user")
        self._transport = self.user.transport
        self.background = self._open_channel("background")
        self.open_phases(1)
        self.opened = True
        self.peers.opened()

    def _open_channel(self, name: str) -> Channel:
        """Open the channel called `name`. Opening waits for all ranks."""
        host, background = self.backends.host, name == "background"
        label, described = f"{self.label}/{name}", f"ltx:{self.name}:{name}"
        how, in_turn = (host, self.timeout, described, self._refuse_gone), name.startswith(BUCKETS)
        group = open_group(self.global_ranks, label, *how, in_turn=in_turn)
        transport = None
        # Not if the host's backend orders streams, as the backend in tests/streams does.
        if not background and self.size > 1 and host == "gloo" and self.backends.device_type != "cpu":
            transport = Transports.open(
                self.rank,
                lambda at, mine: self.store_exchange.exchange(f"{name}/{at}", mine, f"opening axis {self.name!r}"),
            )
        stream_group = None if background else self.stream_group
        channel = Channel(name, self.name, group, self.timeout_s, self.peers, transport, stream_group, self.backends)
        channel.history = deque(maxlen=_HISTORY) if background else None
        return channel

    def _open_stream_group(self) -> StreamGroup | None:
        """Open this axis' only communicator for tensors on the device. Opening waits for all ranks."""
        stream, device_type = self.backends.stream, self.backends.device_type
        if stream is None:
            return None
        label = f"{self.label}/stream"
        backend, device = f"{device_type}:{stream}", self.device
        how = backend, self.timeout, f"ltx:{self.name}", self._refuse_gone
        return StreamGroup(open_group(self.global_ranks, label, *how, device=device))

    def open_phases(self, count: int) -> None:
        """Open bucket channels until there are `count`. Opening waits for all ranks, so all must call this together."""
        while len(self._phases) < count:
            self._phases.append(self._open_channel(f"{BUCKETS}{len(self._phases)}"))

    def stream_of(self, device: torch.device) -> CommStream | None:
        """The stream on which buckets on `device` are reduced; None where waits block the host."""
        if not self.user.orders_streams(device):
            return None
        if device not in self._streams:
            self._streams[device] = CommStream(device)
        return self._streams[device]

    def part(self, name: str, part: Part) -> AxisComm:
        members = part.members(self.rank)
        if members not in self._parts:
            ranks = [self.global_ranks[member] for member in members]
            group = NewGroup(ranks, dist.get_backend_config(self.group))
            self._parts[members] = type(self)(name, group, self.timeout, self.peers.heartbeat_s)
        return self._parts[members]

    @property
    def parts(self) -> list[AxisComm]:
        return list(self._parts.values())

    def _room(self, nbytes: int) -> torch.UntypedStorage | None:
        """Memory for a bucket where its sum is read in place, if there is such."""
        transport = self._phases[0].transport if self._phases else None
        return None if transport is None else transport.room(nbytes)

    def bucket_channel(self, phase: int) -> Channel:
        """The channel for the `phase`-th collective of each bucket."""
        return self._phases[phase]

    @property
    def called(self) -> int:
        return self.user.issued

    @property
    def calls(self) -> int:
        """The number of all that this rank has sent, called, compared and exchanged; what failed counts too."""
        channels = sum(channel.begun + channel.issued + channel.compared for channel in self.channels)
        return channels + self.store_exchange.begun + self.peers.next_check

    def fail(self, failed: Failed) -> None:
        """The world ends: nothing more is issued, and the device gives up collectives under way."""
        if self.passes.failed is not None or not self.opened:
            return
        self.passes.failed = failed
        what = f"{failed.what} on axis" if failed.what else "axis"
        kind = PeerLostError if failed.lost else DeadlockDetectedError
        error = kind(f"rank {self.rank}: {what} {self.name!r} was left halfway ({failed.why}).")
        for channel in self.channels:
            channel.failed = channel.failed or error
            # Compiled graphs find a process group by its name: they can't use this one either.
            backends.unregister(channel.group)
        if self.stream_group is not None:
            if self.unread is not None:  # no pass has begun since the last one: let the device complete that
                with suppress(LtxError):
                    self._wait_for_device("the end of the last pass")
            self.abort_device()
            backends.unregister(self.stream_group.group)

    @property
    def device(self) -> torch.device:
        """The device of this rank's gradients: its accelerator, if the axis has a backend for it; else the CPU."""
        kind = self.backends.device_type
        if kind is None or kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.accelerator.current_device_index())

    def read(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """`tensor` on the host. Until the device has the value, deadlines, peers and interrupts are checked.

        ``bool(tensor)`` and ``tensor.item()`` would stand still for as long as the device waits for a peer.
        """
        return self.user.wait_for_host(HostCopy(tensor), label)

    @property
    def device_outstanding(self) -> bool:
        """Whether the device hasn't completed all collectives of the axis yet; see :attr:`StreamGroup.outstanding`."""
        return self.stream_group is not None and self.stream_group.outstanding

    def note_pass(self) -> None:
        """The host goes on from a pass whose collectives the device may not have completed."""
        if self.stream_group is not None:
            self.stream_group.of_last_pass = self.stream_group.last

    @property
    def has_lost_pass(self) -> bool:
        """Whether the device has given up collectives of the last pass, whose results the host has taken already."""
        return self.stream_group is not None and self.stream_group.has_lost_pass

    def abort_device(self) -> None:
        """Have the device give up collectives that wait for peers, as :meth:`StreamGroup.abort`: from any thread.

        Waits for these collectives then raise.
        """
        if self.stream_group is not None:
            self.stream_group.abort()

    def _wait_for_device(self, label: str) -> None:
        self.user.wait_for_host(HostCopy(torch.zeros((), device="cpu"), lambda: not self.device_outstanding), label)

    @property
    def channels(self) -> list[Channel]:
        return [self.user, self.background, *self._phases]

    def close(self) -> None:
        """Close channels and parts, and destroy all their process groups, even if the last pass has failed."""
        if self.closed:
            return
        self.closed = True
        parts = [end for part in self.parts for end in (part.close, partial(dist.destroy_process_group, part.group))]
        first = [self.store_exchange.finish, self.buffer_pool.clear, self._look_at_last_pass, self._end_pending]
        _in_turn([*first, self._end_device, *parts, self.peers.close, self._destroy_groups])

    def start_anew(self) -> None:
        """All ranks begin a training: complete what some have begun in the background for states that were dropped."""
        told = Signature("train.init of a strategy that exchanges parameters", ())
        for each in (self, *self.parts) if self.size > 1 else ():
            if not any(each.exchange(told, each.background.failed is not None)):
                each.background.drain(partial(each.exchange, told))
                # Ranks may have called it unequally often, but have issued as much by now: they count from there.
                each.background.issued = each.background.begun
                each.background.recent.clear()

    def _end_pending(self) -> None:
        for future in list(self.futures):
            future.wait_all()
        if self.background.history and self.background.failed is None and self.size > 1:
            place, during = f"drain/{self.background.name}", "the end of an axis"
            self.background.drain(lambda own: self.store_exchange.exchange(place, own, during, DRAINING_S))
        for work in list(self.background.works):
            work.give_up()
        self.peers.end()

    def _end_device(self) -> None:
        """Wait until the device has done all its work, whose results states may hold, or gives up after a failure.

        A group whose kernels wait for a peer that won't come can't be destroyed in good order.
        """
        try:
            if all(channel.failed is None for channel in self.channels):
                self._wait_for_device("the end of the axis")
        finally:
            if self.device_outstanding:
                self.abort_device()

    def _destroy_groups(self) -> None:
        for channel in self.channels:
            if channel.transport is not None:
                channel.transport.close()
        for group in {id(group): group for channel in self.channels for group in channel.groups}.values():
            dist.destroy_process_group(group)

    def _look_at_last_pass(self) -> None:
        """Check the last pass, and raise its errors, because nothing else will check it any more."""
        unread, self.unread = self.unread, None
        if unread is not None and self.user.failed is None and self._phases[0].failed is None:
            unread.wait()

    def release(self) -> list[dist.ProcessGroup]:
        """Drop and return the process groups that this axis holds besides those of its channels."""
        groups = [] if self.group is None else [self.group]
        self.group = self.stream_group = None  # the channels hold the stream group, too
        return groups

    def negotiate(
        self, channel: Channel, key: Any, describe: Callable[[], Signature], offer: Callable[[], Any] = lambda: None
    ) -> Agreement:
        """Raise on every rank unless all ranks are about to issue the same collective on `channel`.

        Equal keys mean equal signatures: a known key costs a dictionary look-up. For a new key `describe` is called,
        and `offer`, which gives a JSON value that may differ between ranks: all ranks take rank 0's.
        """
        self._begin_call(lambda: describe().brief)
        known = self._known.get(key)
        if under_way and channel is not self.background:
            known = self._known[key] = under_way[-1].negotiate(self, key, describe, offer, known)
        elif known is None:
            signature = describe()
            if channel in self._phases:
                self.passes.find_dropped()
                self.check_usable()
            with self.passes.aborted_by(*((DeadlockDetectedError,) if channel in self._phases else ())):
                value = self.peers.compare(channel, signature, offer())
            known = self._known[key] = Agreement(signature, signature.fingerprint, value)
        return known

    def _begin_call(self, what: Callable[[], str]) -> None:
        self.check_usable()
        self.peers.begin()
        refuse_script()
        backends.refuse_capture(lambda: f"rank {self.rank}: {what()} on axis {self.name!r}")

    def goes_on(self) -> bool:
        """Whether a call that the ranks have compared may go out again as it is. Raises if none may."""
        self._begin_call(lambda: "a training step")
        return not under_way

    def agree(self, keys: Iterable[Any], agreement: Agreement) -> None:
        """Record an agreement about a whole call under the `keys` of its parts."""
        parts = list(keys)
        self._known.update(dict.fromkeys(parts, agreement))
        if under_way:
            under_way[-1].cover(self, parts)

    def negotiate_issue(self, channel: Channel, key: Any, describe: Callable[[], Signature]) -> None:
        """:meth:`negotiate`, and count the collective that follows into the channel's digest."""
        if channel is self.user and not torch.is_grad_enabled():  # an autograd Function's forward disables gradients
            self.issued_in_graphs += 1
        channel.advance(self.negotiate(channel, key, describe))

    def check_not_forked(self) -> None:
        if self._fork_error is not None:
            raise self._fork_error

    def check_usable(self) -> None:
        """Raise if this process is a fork of the rank's own, or the world has ended."""
        if self._fork_error is not None or self.passes.failed is not None:
            self.user.check_in_step("a collective")

    def refuse_fork(self) -> None:
        """Refuse every collective from now on: this process is a fork of the rank's own.

        A fork has copies of the rank's connections and shares its memory, so peers would take it for the rank.
        """
        self._fork_error = WorldError(
            f"rank {self.rank}: this process ({os.getpid()}) is a fork of the rank's own ({self._pid}), and can't take "
            f"part in collectives on axis {self.name!r}: its peers would take it for the rank. Call them in the rank's "
            "own process. Forks that only compute, such as workers of a DataLoader, are fine."
        )
        for channel in self.channels:
            channel.failed = self._fork_error
        self.peers.refuse(str(self._fork_error))

    def lost(self) -> list[int]:
        """The peers on this machine whose processes are known to have died, found without the store."""
        return self._transport.lost_peers() if self._transport is not None else []

    def _refuse_gone(self) -> None:
        if gone := self.peers.gone():
            who = ", ".join(map(str, gone))
            raise PeerLostError(
                f"rank {self.rank}: rank {who} was lost while the ranks connected on axis {self.name!r}: its process "
                "is gone, or shows no sign of life."
            )


def _in_turn(steps: list[Callable[[], object]]) -> None:
    """Do all `steps`, even if some of them raise. An ExitStack's errors would keep its frames and groups."""
    try:
        steps[0]()
    finally:
        if steps[1:]:
            _in_turn(steps[1:])
