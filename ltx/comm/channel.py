"""Channels: process groups on which collectives go out in one fixed order, each with a name.

An axis has one channel for the user's collectives, one for the buckets of gradients (one more for each further phase
of a communication hook) and one for background work. These interleave differently on different ranks, and on a single
group a collective of one kind would pair with one of another.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ltx.comm import ledger
from ltx.comm.deadlock import PATIENCE_S
from ltx.comm.events import Event
from ltx.comm.operations import OPERATIONS, SUMMED, bytes_sent
from ltx.comm.process_groups import Arguments, as_bytes, as_it_is, from_bytes
from ltx.comm.signature import Agreement
from ltx.comm.transports.shared_memory import (
    SharedMemoryTransport,
    SharedMemoryWork,
    any_transport_busy,
    progress_everywhere,
    wait_for,
)
from ltx.errors import (
    AxisError,
    CollectiveTimeoutError,
    DeadlockDetectedError,
    LtxError,
    PeerLostError,
    RankMismatchError,
    TransportError,
    UnsupportedError,
    WorldError,
)

if TYPE_CHECKING:
    from ltx.comm.negotiation import Negotiation

# A wait returns to Python this often, so that a signal or an abort is seen at once.
_TICK = timedelta(seconds=0.1)
_SHORT_TICK = timedelta(milliseconds=1)
_DIGEST_PRIME = (1 << 61) - 1


class Work:
    """A started collective. :meth:`wait` returns its result; until then nothing may read the buffer."""

    __slots__ = (
        "__weakref__",
        "_channel",
        "_event",
        "_finish",
        "_given_up",
        "_label",
        "_number",
        "_value",
        "_work",
        "total",
    )

    def __init__(
        self,
        channel: Channel,
        work: dist.Work | SharedMemoryWork,
        value: torch.Tensor,
        label: str,
        event: Event | None,
        finish: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
    ):
        self._finish = finish
        self._channel = channel
        self._number = channel.begun
        self._work: dist.Work | SharedMemoryWork | None = work
        self._value = value
        self._label = label
        self._event = event
        self._given_up: LtxError | None = None
        #: Once it is complete: the sum of the result's elements, or NaN, where it was asked for and is known.
        self.total: float | None = None

    def give_up(self) -> None:
        """Drop this work because its channel is closed. A later :meth:`wait` raises."""
        if self._work is not None:
            self._work = None
            self._given_up = AxisError(
                f"{self._label} was under way on axis {self._channel.axis_name!r} when that was closed, and was given "
                "up. Finish it before ltx.shutdown(): train.finish(state)."
            )

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        if isinstance(self._work, SharedMemoryWork):
            assert self._channel.transport is not None
            progress_everywhere()
            return self._work.completed or bool(self._channel.transport.failures())
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it.

        Raises:
            PeerLostError: the connection to a peer broke.
            CollectiveTimeoutError: the collective didn't complete within the axis' timeout.
        """
        work = self._work
        if self._given_up is not None:
            raise self._given_up
        if work is None:
            return self._value
        began = time.perf_counter()
        try:
            if isinstance(work, SharedMemoryWork):
                self._pass(work, began)
            elif self._value.is_cuda and self._channel.group.name() == "nccl":
                work.wait()  # orders the current stream behind the collective; the host doesn't wait
            else:
                self._block(work, began)
        except LtxError as error:
            self._channel.failed = error
            raise
        finally:
            self._channel.negotiation.deadlocks.done()
        if isinstance(work, SharedMemoryWork):
            self.total = work.total
        self._work = None  # not before: a failed or interrupted wait leaves the collective incomplete
        if self._event is not None:
            self._event.waited_s = time.perf_counter() - began
            if self._event.completed_s is None:
                self._event.completed_s = time.perf_counter()
        self._value = self._finish(self._value)
        return self._value

    def _block(self, work: dist.Work, began: float) -> None:
        ticks = 0
        while True:
            try:
                # Peers may wait for this rank's progress in shared memory while it waits here.
                work.wait(_SHORT_TICK if any_transport_busy() else _TICK)
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or completed just after the tick
                    self._find_out(work)
                    return
            if progress_everywhere() or any_transport_busy():
                ticks += 1
                if ticks % 100:
                    continue
            self._look_around(began)

    def _find_out(self, work: dist.Work) -> None:
        channel = self._channel
        try:
            work.wait()
        except RuntimeError as error:
            if "Timed out" in str(error):  # gloo's own clock was a little ahead
                raise self._timed_out() from error
            channel.negotiation.answer_peers()  # a peer that has aborted may have said why
            raise PeerLostError(
                f"rank {channel.rank}: {self._label} on axis {channel.axis_name!r} failed while waiting for its peers: "
                f"{channel.negotiation.missing_peers()}. ({error})"
            ) from error

    def _pass(self, work: SharedMemoryWork, began: float) -> None:
        channel = self._channel
        assert channel.transport is not None
        while not wait_for(work, _TICK.total_seconds()):
            if channel.transport.failures():
                raise channel.transport_failed(self._label) from channel.transport.error
            lost = channel.transport.lost_peers()
            self._look_around(began)  # first: a peer that ended may have said why
            if lost:
                raise PeerLostError(
                    f"rank {channel.rank}: {self._label} on axis {channel.axis_name!r} failed while waiting for its "
                    f"peers: {channel.negotiation.describe_lost(lost)}."
                )
        if self._event is not None:
            self._event.completed_s = work.completed_s
        if work.refused:
            raise RankMismatchError(
                f"rank {channel.rank}: {self._label} on axis {channel.axis_name!r}: a peer has issued another "
                "collective here, or the same ones in another order. Nothing of it was used. Wrap the program in "
                "ltx.debug_checks() to see which call differs."
            )

    def _look_around(self, began: float) -> None:
        """Check whether the peers can still come: called now and then during a long wait."""
        channel = self._channel
        try:
            channel.negotiation.answer_peers()
        except (DeadlockDetectedError, PeerLostError) as error:
            error.args = (f"{error} It waited for {self._label} (issue {channel.issued}).",)
            raise
        waited_s = time.perf_counter() - began
        if waited_s > channel.timeout_s:
            raise self._timed_out()
        if waited_s > PATIENCE_S:
            channel.negotiation.check_deadlock(channel, self._number, self._label)

    def _timed_out(self) -> CollectiveTimeoutError:
        channel = self._channel
        return CollectiveTimeoutError(
            f"rank {channel.rank}: {self._label} (issue {channel.issued}) on axis {channel.axis_name!r}, "
            f"channel {channel.name!r}, didn't complete within {channel.timeout_s:g} s: "
            f"{channel.negotiation.stragglers(channel)}. Every rank must call the same collectives in the same order."
        )


class Channel:
    """One ordered stream of collectives between the ranks of an axis."""

    def __init__(
        self,
        name: str,
        address: str,
        axis_name: str,
        group: dist.ProcessGroup,
        timeout_s: float,
        negotiation: Negotiation,
        transport: SharedMemoryTransport | None = None,
    ):
        self.name = name
        self.address = address  # its name and generation: what peers call it
        self.axis_name = axis_name
        self.group: Any = group  # None once it was dropped
        self.rank = group.rank()
        self.size = group.size()
        self.timeout_s = timeout_s
        self.negotiation = negotiation
        self.transport = transport  # shared memory, where all ranks share a machine
        self.failed: LtxError | None = None  # the error after which a collective never completed
        self.issued = 0
        self.compared = 0
        # How many buffers were issued, and by which threads: what peers that wait here wait for (see deadlock).
        self.begun = 0
        self.threads: set[int] = set()
        self.digest = 0
        # The last collectives and their device, for ranks that may end without having waited (see drain_background).
        self.history: deque[tuple[str, torch.Size, torch.dtype, Arguments]] | None = None
        self.works: WeakSet[Work] = WeakSet()
        self.device = torch.device("cpu")
        # The last agreements, for a peer that compares another signature (see Negotiation).
        self.recent: deque[tuple[int, Agreement]] = deque(maxlen=256)

    def advance(self, agreement: Agreement) -> None:
        """Count a call into the running digest: once for a call, however many buffers it moves."""
        self.recent.append((self.issued, agreement))
        self.issued += 1
        self.digest = (self.digest * 1_000_003 + agreement.fingerprint) % _DIGEST_PRIME

    def transport_failed(self, label: str) -> TransportError:
        """The error for a collective that can't complete because the shared-memory transport has failed on a rank."""
        assert self.transport is not None
        failures = self.transport.failures()
        each = "; ".join(f"on rank {rank}: {why}" for rank, why in failures.items())
        return TransportError(
            f"rank {self.rank}: {label} on axis {self.axis_name!r} failed halfway in shared memory {each}. Nothing "
            "more can be issued on this axis: ltx.shutdown() and start again. LTX_SHARED_MEMORY=0 in the environment "
            "goes by sockets instead."
        )

    def uses_transport(self, buffer: torch.Tensor) -> bool:
        """Whether a collective on `buffer` goes through shared memory."""
        return self.transport is not None and buffer.device.type == "cpu"

    def issue(
        self, operation: str, buffer: torch.Tensor, label: str, arguments: Arguments = (), summed: bool = False
    ) -> Work:
        """Start `operation` on a contiguous `buffer`, which belongs to the channel from now on.

        `summed`: the work of a reduction records the sum of all elements, where that costs almost nothing.
        """
        if self.failed is None and self.transport is not None and self.transport.error is not None:
            self.failed = self.transport_failed("an earlier collective")
        if isinstance(self.failed, WorldError):  # nothing has failed: this process isn't the rank's
            raise self.failed
        if self.failed is not None:
            raise type(self.failed)(
                f"rank {self.rank}: {label} can't be issued: axis {self.axis_name!r} has been out of step since an "
                f"earlier failure; ltx.shutdown() and start again. The failure was: {self.failed}"
            )
        entry, dtype = OPERATIONS[operation], buffer.dtype
        if not entry.moves and dtype not in SUMMED:
            raise UnsupportedError(
                f"rank {self.rank}: {label} on axis {self.axis_name!r}: {dtype} has no {operation} among ranks. "
                "Cast it."
            )
        self.begun += 1
        self.threads.add(threading.get_ident())
        if self.history is not None:
            self.history.append((operation, buffer.shape, buffer.dtype, arguments))
            self.device = buffer.device
        restored = as_it_is
        if entry.moves and dtype is not torch.uint8:
            buffer, restored = as_bytes(buffer), partial(from_bytes, dtype=dtype)
        event = ledger.note(self.name, operation, label, bytes_sent(operation, buffer, self.size))
        if self.transport is not None and self.uses_transport(buffer):
            begun = self.transport.begin(operation, buffer, arguments, self.digest, summed)
            return Work(self, *begun, label, event, restored)
        try:
            work, value, finish = entry.start(self.group, buffer, arguments)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank}: {label} on axis {self.axis_name!r} could not be issued: "
                f"{self.negotiation.missing_peers()}. "
                f"({error})"
            ) from error
        if event is not None:
            _stamp_completion(work, event)
        both = finish if restored is as_it_is else lambda completed: restored(finish(completed))
        started = Work(self, work, value, label, event, both)
        if self.history is not None:
            self.works.add(started)
        return started


def _stamp_completion(work: dist.Work, event: Event) -> None:
    def completed(_future: object) -> None:
        event.completed_s = time.perf_counter()

    with suppress(RuntimeError):  # some of gloo's works have no future; then the wait tells
        work.get_future().add_done_callback(completed)
