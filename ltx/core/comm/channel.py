"""Channels: process groups on which collectives go out in one fixed order, each with a name.

An axis has one channel for the user's collectives, one for the buckets of gradients (one more for each further phase
of a communication hook) and one for background work. Different ranks interleave these kinds differently, and on a
single group a collective of one kind would pair with one of another kind.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist

from ltx.core.base import errors, private
from ltx.core.base.traced import recording
from ltx.core.comm import ledger
from ltx.core.comm.backends import HostCopy, StreamGroup, is_of_network, is_out_of_memory, to_device
from ltx.core.comm.operations import OPERATIONS, SUMMED, Arguments, as_bytes, as_it_is, bytes_sent, from_bytes
from ltx.core.comm.peers import PATIENCE_S, Peers
from ltx.core.comm.signature import RAISED, Agreement
from ltx.core.comm.transport import Transport, TransportWork, any_busy, poll_until, progress_everywhere, wait_for

#: How to find the call in which ranks differ.
WHICH_CALL = "Wrap the program in ltx.debug_checks() to see which call differs."
#: A wait returns to Python this often, so that a signal or an abort is seen at once.
TICK = timedelta(seconds=0.1)
_SHORT_TICK = timedelta(milliseconds=1)


@dataclass(eq=False, repr=False)
class Work:
    """A started collective. :meth:`wait` returns its result; nothing may read the buffer before."""

    _channel: Channel
    number: int  # of the issue on the channel
    _begun_s: float  # the time of the issue
    _work: dist.Work | TransportWork | None
    _value: torch.Tensor
    _label: str
    _event: ledger.Event | None
    _finish: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    _ordered: StreamGroup | None = None  # set if waits order streams
    _given_up: errors.LtxError | None = None
    # the sum of the result's elements, if asked for; NaN if unknown
    total: float | None = None
    note: Sequence[float] = ()  # the sums over ranks of the note that :meth:`Channel.issue` was given

    @staticmethod
    def arrived(channel: Channel, value: torch.Tensor) -> Work:
        return Work(channel, channel.begun, time.perf_counter(), None, value, "", None)

    def give_up(self) -> None:
        """Drop this work, for which peers won't come any more. A later :meth:`wait` raises."""
        if self._work is not None:
            self._work = None
            self._given_up = errors.AxisError(
                f"{self._label} was under way on axis {self._channel.axis_name!r} when that was closed, or when "
                "train.init began another training there, and was given up. Finish it before: train.finish(state)."
            )

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        if isinstance(self._work, TransportWork):
            progress_everywhere()
            return self._work.completed or bool(self._work.transport.failures())
        if self._work is None or self._ordered or self._work.is_completed():
            return True
        # Whether a wait would raise.
        waited_s, issue = time.perf_counter() - self._begun_s, (self._channel.name, self.number)
        return waited_s >= PATIENCE_S and (
            waited_s > self._channel.timeout_s or self._channel.peers.diagnosed(True, issue) is not None
        )

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it. On a stream-ordered backend the current stream waits, not the host."""
        work = self._work
        if self._given_up is not None:
            raise self._given_up
        if work is None:
            return self._value
        began = time.perf_counter()
        try:
            if self._ordered is not None and not isinstance(work, TransportWork):
                self._order(work, self._ordered)
                if self._event is not None:
                    ledger.note_on_device(self._event, self._value.device)
            else:
                try:
                    self._pass(work, began) if isinstance(work, TransportWork) else self._block(work, self._begun_s)
                finally:
                    if (peers := self._channel.peers).waits:
                        peers.done()
                if self._event is not None:
                    now = time.perf_counter()
                    self._event.waited_s, self._event.completed_s = now - began, self._event.completed_s or now
        except errors.LtxError as error:
            self._channel.failed = error
            raise
        self._work = None  # only now: after a failed or interrupted wait the collective is still incomplete
        if self._finish is not as_it_is:
            self._value = self._finish(self._value)
        return self._value

    def read(self) -> HostCopy:
        """The result, as it is copied to the host: :meth:`Channel.wait_for_host` waits for it."""
        started, group = self._work, self._ordered
        if group is None or started is None or isinstance(started, TransportWork):
            return HostCopy(self.wait())

        def arrived() -> bool:
            if not self._ask(started.is_completed):
                return False
            self._order(started, group)  # raises if the work has failed
            return True

        return HostCopy(self.wait(), arrived)

    def _order(self, work: dist.Work, group: StreamGroup) -> None:
        """Make the current stream wait for `work`. Raises if the work has failed: its buffer holds garbage then."""
        self._ask(work.wait)
        if group.cut_off or group.failed:
            self._channel.check_device(group, self.number, self._label)

    def _block(self, work: dist.Work, began: float) -> None:
        ticks = 0
        while True:
            try:
                # Peers may wait for this rank's progress in shared memory while it waits here.
                work.wait(_SHORT_TICK if any_busy() else TICK)
                return
            except RuntimeError:
                if work.is_completed():  # the work failed, or completed just after the tick
                    self._ask(work.wait)
                    return
            if progress_everywhere() or any_busy():
                ticks += 1
                if ticks % 100:
                    continue
            self._channel.look_around(began, self.number, self._label)

    def _ask(self, ask: Callable[[], bool]) -> bool:
        """What the backend answers. If the wait fails because of peers, the error says what happened to them."""
        try:
            return ask()
        except RuntimeError as error:
            self._channel.explain(error, self.number, self._label)
            raise

    def _pass(self, work: TransportWork, began: float) -> None:
        channel = self._channel
        while not wait_for(work, TICK.total_seconds()):
            if work.transport.failures():
                raise channel.transport_failed(self._label) from work.transport.error
            lost = work.transport.lost_peers()
            # This comes first: a peer that ended may have said why.
            channel.look_around(began, self.number, self._label, now=bool(lost))
            if lost:
                raise errors.PeerLostError(
                    f"rank {channel.rank}: {self._label} on axis {channel.axis_name!r} failed while waiting for its "
                    f"peers: {channel.peers.why('lost', lost)}."
                )
        if self._event is not None:
            self._event.completed_s = work.completed_s
        if work.refused:
            channel.look_around(began, self.number, self._label, now=True)  # a peer may say why
            raise errors.RankMismatchError(
                f"rank {channel.rank}: {self._label} on axis {channel.axis_name!r}: a peer has issued another "
                "collective here, or the same ones in another order. Nothing of it was used. "
                f"{channel.peers.why('refused') or WHICH_CALL}"
            )
        self.total, self.note = work.total, work.note


_DIGEST_PRIME = (1 << 61) - 1
#: How long a rank that closes a channel waits for its peers to close it too.
DRAINING_S = 3.0


@dataclass(eq=False, repr=False)
class Channel:
    """One ordered stream of collectives between the ranks of an axis."""

    name: str
    axis_name: str
    group: Any  # the group for tensors on the host; None once it was dropped
    timeout_s: float
    peers: Peers
    transport: Transport | None  # shared memory, if all ranks are on one machine
    stream_group: StreamGroup | None  # the group for tensors on the device, if the axis has a stream-ordered backend
    _on_streams: str | None  # the type of device whose tensors the stream group takes
    failed: errors.LtxError | None = None  # the error after which a collective never completed
    issued: int = 0
    compared: int = 0
    begun: int = 0  # the number of buffers that `threads` have issued (see diagnosis)
    digest: int = 0
    #: The last collectives, on `device`, kept because ranks may end without having waited for them (:meth:`drain`).
    history: deque[tuple[str, torch.Size, torch.dtype, Arguments]] | None = None

    def __post_init__(self) -> None:
        self.device = torch.device("cpu")
        self.rank: int = self.group.rank()
        self.size: int = self.group.size()
        self.threads: set[int] = set()
        #: Which calls follow which. Shared memory compares each call itself.
        self.habit = self.peers.habit() if self.transport is None and self.size > 1 else None
        self.works: WeakSet[Work] = WeakSet()
        #: The last agreements, for a peer that compares another signature (see Negotiation).
        self.recent: deque[tuple[int, Agreement]] = deque(maxlen=256)

    def check_in_step(self, label: str) -> None:
        """Raise if `label` can't be issued because of an earlier failure."""
        if self.failed is None and self.transport is not None and self.transport.error is not None:
            self.failed = self.transport_failed("an earlier collective")
        if isinstance(self.failed, errors.WorldError):  # no collective has failed: this process is a fork of the rank
            raise self.failed
        if self.failed is not None:
            raise type(self.failed)(
                f"rank {self.rank}: {label} can't be issued: axis {self.axis_name!r} has been out of step since an "
                f"earlier failure. ltx.init() on all ranks begins a new world. The failure was: {self.failed}"
            )

    def advance(self, agreement: Agreement) -> None:
        """Count a call into the running digest: once for each call, even if the call moves several buffers."""
        if self.habit is not None and agreement is not RAISED:
            self.habit.add(agreement.fingerprint)
        self.recent.append((self.issued, agreement))
        self.issued += 1
        self.digest = (self.digest * 1_000_003 + agreement.fingerprint) % _DIGEST_PRIME

    def transport_failed(self, label: str) -> errors.TransportError:
        """The error for a collective that can't complete because the shared-memory transport has failed on a rank."""
        assert self.transport is not None
        each = "; ".join(f"on rank {rank}: {why}" for rank, why in self.transport.failures().items())
        return errors.TransportError(
            f"rank {self.rank}: {label} on axis {self.axis_name!r} failed halfway in shared memory {each}. Nothing "
            "more can be issued on this axis: ltx.shutdown() and start again. LTX_SHARED_MEMORY=0 goes by sockets."
        )

    def look_around(self, began: float, number: int, label: str, now: bool = False) -> None:
        """Raise if a long wait for issue `number` is in vain; asked now and then. `now`: as :meth:`Peers.waiting`."""
        waited_s = time.perf_counter() - began
        self.peers.waiting(self, number, label, waited_s, now)
        if waited_s > self.timeout_s:
            raise self.timed_out(number, label)

    def explain(
        self, error: RuntimeError, number: int, label: str, failed: str = "failed while waiting for its peers"
    ) -> None:
        """If the backend's `error` at issue `number` is due to the peers, raise an error that says so."""
        self.peers.done()
        if not is_of_network(error):
            return
        if "Timed out" in str(error) or "operation timeout" in str(error):  # the backend's own timeout
            raise self.timed_out(number, label) from error
        # A peer that has aborted may have told the reason.
        self.peers.waiting(self, number, label, 0.0, now=True)
        raise errors.PeerLostError(
            f"rank {self.rank}: {label} on axis {self.axis_name!r} {failed}: {self.peers.why('broken')}. ({error})"
        ) from error

    def check_device(self, group: StreamGroup | None, number: int, label: str) -> None:
        """Raise if `group` was aborted after an error: the device has gone on with garbage."""
        if group is not None and group.failed and not group.aborted:
            group.abort()
        if group is not None and group.cut_off:
            self.explain(dist.DistBackendError("its communicator was aborted"), number, label)

    def timed_out(self, number: int, label: str) -> errors.CollectiveTimeoutError:
        """The error for issue `number`, to which some peers haven't come; this rank may have issued more since."""
        return errors.CollectiveTimeoutError(
            f"rank {self.rank}: {label} (issue {number}) on axis {self.axis_name!r}, channel {self.name!r}, "
            f"didn't complete within {self.timeout_s:g} s: {self.peers.why('late', self, number)}. Every rank "
            "must call the same collectives in the same order."
        )

    def wait_for_host(self, copy: HostCopy, label: str) -> torch.Tensor:
        """The value of `copy`. While the host waits for the device, it checks deadlines, peers and interrupts."""
        try:
            self._watch(copy.ready, label)
            self.check_device(self.stream_group, self.begun, label)
        except errors.LtxError as error:
            self.failed = error
            raise
        return copy.read()

    def wait_for_device(self, label: str) -> None:
        """Wait until the device has completed all collectives of its group."""
        group = self.stream_group
        done = HostCopy(torch.zeros((), device="cpu"), lambda: group is None or not group.outstanding)
        self.wait_for_host(done, label)

    def wait_for_future(self, future: torch.futures.Future[Any], label: str) -> None:
        """Wait, as :meth:`wait_for_host` does, for a collective that another library has issued beside this channel."""
        try:
            self._watch(future.done, label)
        except errors.CollectiveTimeoutError:  # the usual text lists issues of this channel, which this isn't
            raise errors.CollectiveTimeoutError(
                f"rank {self.rank}: {label} on axis {self.axis_name!r} didn't complete within {self.timeout_s:g} s."
            ) from None

    def _watch(self, ready: Callable[[], bool], label: str) -> None:
        began, looked, pause_s = time.perf_counter(), time.perf_counter(), 1e-5
        try:
            while not ready():
                progress_everywhere()  # peers may wait for this rank's progress in shared memory
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1e-3)
                if time.perf_counter() - looked > TICK.total_seconds():
                    looked = time.perf_counter()
                    self.look_around(began, self.begun, label)
        finally:
            self.peers.done()

    def drain(self, told: Callable[[Any], list[Any]]) -> None:
        """Join what peers have issued on this channel, by its history: at its end, and before a new training.

        A rank may have sums under way that its peers haven't begun (``train.finish(state)`` waits for them): a group
        with one can't be closed, and a new training would be averaged with them. So ranks tell each other how many they
        have issued (`told` gives all ranks' values), and those behind issue the rest, of zeros, for DRAINING_S at most.
        """
        deadline = time.monotonic() + DRAINING_S
        history = self.history or ()
        own = [self.begun, [(op, list(shape), str(dtype), list(args)) for op, shape, dtype, args in history]]
        try:
            by_rank = told(own)
            begun, issues = max(by_rank, key=lambda issued: issued[0])
            missing = begun - self.begun
            if missing > len(issues):
                return
            works = list(self.works)
            for operation, shape, dtype, arguments in issues[len(issues) - missing :]:
                zeros = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=self.device)
                works.append(self.issue(operation, zeros, "drain_background", tuple(arguments)))
            # If a group is closed while this rank's part is under way, its peers' connections break.
            poll_until(lambda: all(work.done for work in works), deadline - time.monotonic())
            for work in works:
                if work.number > min(issued for issued, _ in by_rank):
                    work.give_up()  # ranks behind have added zeros
        except errors.LtxError:
            return  # a peer is gone, or has issued something else: the peer won't join

    def refuse_recording(self, label: str) -> None:
        """Raise if the call is recorded, to run later."""
        if recording():
            raise errors.UnsupportedError(
                f"rank {self.rank}: {label} on axis {self.axis_name!r}: no graph (torch.export, make_fx, linearize) "
                "can hold it, and fake tensors can't be sent. Call it outside of what is recorded."
            )

    def orders_streams(self, device: torch.device) -> bool:
        return device.type == self._on_streams

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        groups = [self.group, self.stream_group and self.stream_group.group]
        return [group for group in groups if group is not None]

    def release(self) -> list[dist.ProcessGroup]:
        """Give up the channel's process groups, and return them."""
        groups, self.group, self.stream_group, self._on_streams = self.groups, None, None, None
        return groups

    def group_for(self, device: torch.device) -> dist.ProcessGroup:
        ordered = self.stream_group if self.orders_streams(device) else None
        return cast(dist.ProcessGroup, ordered.group if ordered else self.group)

    def issue(
        self,
        operation: str,
        buffer: torch.Tensor,
        label: str,
        arguments: Arguments = (),
        summed: bool = False,
        on_host: bool = False,
        note: Sequence[float] = (),
        eager: bool = False,
    ) -> Work:
        """Start `operation` on a contiguous `buffer`, which belongs to the channel from now on. `label`: its name in
        errors and in the ledger. `summed`: the work of a reduction records the sum of all elements, where that costs
        almost nothing. `on_host`: the host waits for the result, whatever the backends. `note`: a few numbers to sum
        beside it, where a transport has it. `eager`: nothing records the call (:meth:`refuse_recording`).
        """
        if self.failed is not None or (self.transport is not None and self.transport.error is not None):
            self.check_in_step(label)
        if not eager:
            self.refuse_recording(label)
        entry, dtype = OPERATIONS[operation], buffer.dtype
        if not entry.moves and dtype not in SUMMED:
            raise errors.UnsupportedError(
                f"rank {self.rank}: {label} on axis {self.axis_name!r}: {dtype} has no {operation} among ranks. Cast."
            )
        self.begun += 1
        self.peers.own.sent += 1
        self.threads.add(threading.get_ident())
        if self.history is not None:
            self.history.append((operation, buffer.shape, buffer.dtype, arguments))
            self.device = buffer.device
        ordered, restored = None if on_host or buffer.device.type != self._on_streams else self.stream_group, as_it_is
        if not ordered and buffer.device.type != "cpu":
            restored, buffer = partial(to_device, device=buffer.device), buffer.cpu()
        if entry.moves and dtype is not torch.uint8:
            moved, buffer = restored, as_bytes(buffer)
            restored = lambda completed: moved(from_bytes(completed, dtype))  # noqa: E731
        event = None
        if ledger.recordings:
            nbytes = partial(bytes_sent, operation, buffer, self.size)
            event = ledger.note(self.name, operation, label, nbytes, self.size)
        at = self, self.begun, time.perf_counter()
        if self.transport is not None and not ordered:
            begun = self.transport.begin(operation, buffer, arguments, self.digest, summed, note)
            return Work(*at, *begun, label, event, restored)
        if ordered and event is not None:
            ledger.note_on_device(event, buffer.device)
        given = ordered.group if ordered else self.group, buffer, arguments
        try:
            if private.count_of_modes() or private.count_of_function_modes():
                with private.below_modes():
                    work, value, finish = entry.start(*given)
            else:
                work, value, finish = entry.start(*given)
        except RuntimeError as error:
            if is_out_of_memory(error):  # only this rank failed: its peers would pair its next collective with this one
                why = f"rank {self.rank}: {label} couldn't be issued for want of memory."
                self.failed = errors.RankMismatchError(why)
                for axis in [axis for axis in self.peers.own.axes if self in axis.channels]:
                    axis.passes.end_world(self.failed, label)  # its peers, which may wait already, are told
            self.explain(error, self.begun, label, "could not be issued")
            raise
        if ordered:
            ordered.last, ordered.issue = work, (self.name, self.begun)
        elif event is not None:  # on streams, futures are complete when they are made
            with suppress(RuntimeError):  # some works of gloo have no future; then the wait raises
                work.get_future().add_done_callback(lambda _: setattr(event, "completed_s", time.perf_counter()))
        both = finish if restored is as_it_is else lambda completed: restored(finish(completed))
        started = Work(*at, work, value, label, event, both, ordered)
        if self.history is not None:
            self.works.add(started)
        return started
