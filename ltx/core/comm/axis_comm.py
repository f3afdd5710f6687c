"""The communicator of one axis whose ranks are processes.

It owns the axis' channels, and the signatures that the ranks have compared. All ranks of a group open their
communicators together, in the same order; ``ltx.shutdown`` closes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ltx.core.base import private
from ltx.core.base.errors import DeadlockDetectedError, PeerLostError, StoreGoneError, UnsupportedError, WorldError
from ltx.core.base.handed_in import HandedIn
from ltx.core.base.traced import refuse_script
from ltx.core.comm.backends import CommStream, StreamGroup, backends_of, open_group
from ltx.core.comm.buffer_pool import BufferPool
from ltx.core.comm.channel import DRAINING_S, Channel
from ltx.core.comm.passes import Passes
from ltx.core.comm.peers import BUCKETS, Peers, under_way
from ltx.core.comm.signature import Agreement, Seen, Signature
from ltx.core.ranks.backings import ALONE, Part, Ranks


class NewGroup(NamedTuple):
    """A process group of some ranks of the world; only these ranks open it, together with its axis."""

    ranks: list[int]  # ranks of the world, in the axis' order
    backend: str  # as torch.distributed.new_group takes it


class AxisComm(Ranks):
    """Channels and known signatures of one axis in this process."""

    def __init__(self, name: str | None, group: dist.ProcessGroup | NewGroup, timeout: timedelta, heartbeat_s: float):
        self.global_ranks = group.ranks if isinstance(group, NewGroup) else dist.get_process_group_ranks(group)
        self.rank = self.global_ranks.index(dist.get_rank())
        self.size = len(self.global_ranks)
        self.timeout = timeout
        #: The user's, the one for background work, and one for each phase of the buckets; none until all are open.
        self.channels: list[Channel] = []
        self.peers: Peers = (HandedIn.peers or Peers)(self, name, heartbeat_s)
        self.name = f"ranks {self.global_ranks}, {self.peers.label.rpartition('/')[2]}" if name is None else name
        self.passes = Passes(self)
        self.peers.meet()
        if isinstance(group, NewGroup):
            group = self._open_group(group.backend, "group", self.name)
        self.group: Any = group  # None once the world is gone
        self._backends = backends_of(group)
        self.known: dict[Any, Agreement] = {}  # what the ranks have agreed on
        self.closed = False
        self.compared = Seen()
        self.parts: list[Any] = []  # communicators of its groups
        self.unread: Any = None  # the IssuedSummary of the last pass, if the host hasn't read it
        self.issued_in_graphs = 0  # the number of the user's collectives that may be part of a backward pass
        self.under_way = ""  # the name, for errors, of the work on the bucket channels
        self._streams: dict[torch.device, CommStream] = {}
        self._stream_group: StreamGroup | None = None  # this axis' only communicator for tensors on the device
        if self._backends.stream is not None:
            on_device = f"{self._backends.device_type}:{self._backends.stream}"
            stream = self._open_group(on_device, "stream", f"ltx:{self.name}", device=self.device)
            self._stream_group = StreamGroup(stream)
        self.user, self.background = self._open_channel("user"), self._open_channel("background")
        self.first_phase = self._open_channel(f"{BUCKETS}0")
        self.channels = [self.user, self.background, self.first_phase]
        self.buffer_pool = BufferPool(self.first_phase.transport)  # of the gradients' buckets
        self.peers.own.axes.append(self)

    def _open_group(self, backend: str, place: str, described: str, **how: Any) -> dist.ProcessGroup:
        """Open a process group of the axis' ranks. Opening waits for all of them."""
        at = self.global_ranks, f"{self.peers.label}/{place}"
        return open_group(*at, backend, self.timeout, described, self._refuse_gone, **how)

    def _open_channel(self, name: str) -> Channel:
        host, background = self._backends.host, name == "background"
        group = self._open_group(host, name, f"ltx:{self.name}:{name}", in_turn=name.startswith(BUCKETS))
        transport = None
        # Not if the host's backend orders streams, as the backend in tests/streams does.
        if not background and self.size > 1 and host == "gloo" and self._backends.device_type != "cpu":
            exchange, opening = self.peers.store_exchange.exchange, f"opening axis {self.name!r}"
            transport = HandedIn.transport(self.rank, lambda at, mine: exchange(f"{name}/{at}", mine, opening))
        ordered = (None, None) if background else (self._stream_group, self._backends.device_type)
        channel = Channel(name, self.name, group, self.timeout.total_seconds(), self.peers, transport, *ordered)
        channel.history = deque(maxlen=1024) if background else None
        if HandedIn.messages is not None:
            HandedIn.messages.opened(self, channel)
        return channel

    def open_phases(self, count: int) -> None:
        """Open bucket channels until there are `count`. Opening waits for all ranks, so all must call this together."""
        while (opened := len(self.channels) - 2) < count:
            self.channels.append(self._open_channel(f"{BUCKETS}{opened}"))

    def stream_of(self, device: torch.device) -> CommStream | None:
        """The stream on which buckets on `device` are reduced; None where waits block the host."""
        if not self.user.orders_streams(device):
            return None
        if device not in self._streams:
            self._streams[device] = CommStream(device)
        return self._streams[device]

    def part(self, name: str, part: Part) -> tuple[int, Ranks]:
        ranks = [self.global_ranks[member] for member in part.members(self.rank)]
        if len(ranks) == 1:
            return 1, ALONE
        known = [each for each in self.parts if each.global_ranks == ranks]
        if not known:
            group = NewGroup(ranks, dist.get_backend_config(self.group))
            known = [type(self)(name, group, self.timeout, self.peers.heartbeat_s)]
            self.parts += known
        return len(ranks), known[0]

    def bucket_channel(self, phase: int) -> Channel:
        """The channel for the `phase`-th collective of each bucket."""
        return self.channels[2 + phase]

    @property
    def device(self) -> torch.device:
        """The device of this rank's gradients: its accelerator, if the axis has a backend for it; else the CPU."""
        kind = self._backends.device_type
        if kind is None or kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.accelerator.current_device_index())

    def close(self) -> None:
        """Close channels and parts, and destroy all their process groups, even if the last pass has failed."""
        if self.closed:
            return
        self.closed = True
        parts = [end for part in self.parts for end in (part.close, partial(dist.destroy_process_group, part.group))]
        forget = partial(self.peers.own.axes.remove, self)
        first = [self.peers.store_exchange.finish, self.buffer_pool.clear, self._look_at_last_pass, self._end_pending]
        _in_turn([*first, self._end_device, *parts, forget, self.peers.close, self._destroy_groups])

    def _end_pending(self) -> None:
        if self.background.history and self.background.failed is None and self.size > 1:
            exchange, place = self.peers.store_exchange.exchange, f"drain/{self.background.name}"
            self.background.drain(lambda own: exchange(place, own, "the end of an axis", DRAINING_S))
        for work in list(self.background.works):
            work.give_up()
        self.peers.tell(ended=True)

    def _end_device(self) -> None:
        """Wait for the device's work, or give it up: a group whose kernels wait for a peer can't be destroyed."""
        try:
            if all(channel.failed is None for channel in self.channels):
                self.user.wait_for_device("the end of the axis")
        finally:
            if self._stream_group is not None and self._stream_group.outstanding:
                self._stream_group.abort()

    def _destroy_groups(self) -> None:
        for channel in self.channels:
            if channel.transport is not None:
                channel.transport.close()
        for group in {id(group): group for channel in self.channels for group in channel.groups}.values():
            dist.destroy_process_group(group)

    def _look_at_last_pass(self) -> None:
        """Check the last pass, and raise its errors, because nothing else will check it any more."""
        unread, self.unread = self.unread, None
        if unread is not None and self.user.failed is None and self.first_phase.failed is None:
            unread.wait()

    def release(self) -> list[dist.ProcessGroup]:
        """Drop and return the process groups of this axis, its channels and its parts."""
        groups = [] if self.group is None else [self.group]
        self.group = self._stream_group = None  # the channels hold the stream group, too
        return groups + [group for holder in (*self.channels, *self.parts) for group in holder.release()]

    def negotiate(
        self, channel: Channel, key: Any, describe: Callable[[], Signature], offer: Callable[[], Any] = lambda: None
    ) -> Agreement:
        """Raise on every rank unless all are about to issue the same on `channel`: of a new key they compare what
        `describe` gives, and all take rank 0's `offer`, a JSON value.
        """
        self._begin_call(lambda: describe().brief)
        known = self.known.get(key)
        if under_way and channel is not self.background:
            known = self.known[key] = under_way[-1].negotiate(self, key, describe, offer, known)
        elif known is None:
            signature = describe()
            value = self._compare(channel, signature, offer())
            known = self.known[key] = Agreement(signature, signature.fingerprint, value)
        return known

    def _compare(self, channel: Channel, signature: Signature, offer: Any) -> Any:
        of_buckets = channel not in (self.user, self.background)
        if of_buckets:
            self.passes.find_dropped()
            self.check_usable()
        with self.passes.aborted_by(*((DeadlockDetectedError,) if of_buckets else ())):
            value = self.peers.compare(channel, signature, offer)
        if channel.habit is not None:
            channel.habit.compared(channel.issued + 1)
        return value

    def _begin_call(self, what: Callable[[], str]) -> None:
        self.check_usable()
        if self.peers.at:
            self.peers.begin()
        if private.script_state() is not None:
            refuse_script()
        if private.capturing():
            raise UnsupportedError(
                f"rank {self.rank}: {what()} on axis {self.name!r} was called in the capture of a CUDA graph. ltx "
                "compares what ranks issue, and reads their summary, on the host; replays would leave that out. "
                'Capture what computes alone: ltx.data_parallel(torch.compile(loss, mode="reduce-overhead")).'
            )

    def goes_on(self) -> bool:
        self._begin_call(lambda: "a step")
        return not under_way

    def agree(self, keys: Iterable[Any], agreement: Agreement) -> None:
        """Record an agreement about a whole call under the `keys` of its parts."""
        parts = list(keys)
        self.known.update(dict.fromkeys(parts, agreement))
        if self.user.habit is not None:
            self.user.habit.compared(self.user.issued + len(parts))
        if under_way:
            under_way[-1].cover(self, parts)

    def negotiate_issue(self, channel: Channel, key: Any, describe: Callable[[], Signature]) -> None:
        """:meth:`negotiate`, and count the collective that follows into the channel's digest."""
        if channel is self.user and not torch.is_grad_enabled():  # an autograd Function's forward disables gradients
            self.issued_in_graphs += 1
        agreed = self.negotiate(channel, key, describe)
        compare_unusual(self, channel, agreed)
        channel.advance(agreed)

    def check_usable(self) -> None:
        """Raise if this process is a fork of the rank's own, or the world has ended."""
        if isinstance(self.user.failed, WorldError) or self.passes.failed is not None:
            self.user.check_in_step("a collective")

    def _refuse_gone(self) -> None:
        if gone := self.peers.gone("left"):
            raise PeerLostError(
                f"rank {self.rank}: rank {', '.join(map(str, gone))} was lost while the ranks connected on axis "
                f"{self.name!r}: its process is gone, or shows no sign of life."
            )


def compare_unusual(axis_comm: AxisComm, channel: Channel, known: Agreement, on: Channel | None = None) -> None:
    """Compare a known call of `channel`, on that or `on`, where another one came before, which peers may issue."""
    usual = channel.habit is None or channel.habit.expects(known.fingerprint, channel.issued)
    if not (usual or under_way):
        with suppress(StoreGoneError):  # training goes on, by what is known
            axis_comm._compare(on or channel, known.signature, None)


def _in_turn(steps: list[Callable[[], object]]) -> None:
    """Do all `steps`, even if some of them raise. An ExitStack's errors would keep its frames and groups."""
    try:
        steps[0]()
    finally:
        if steps[1:]:
            _in_turn(steps[1:])
