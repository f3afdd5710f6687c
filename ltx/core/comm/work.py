"""Works: started collectives, and how a rank waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ltx.core.base.errors import (
    AxisError,
    CollectiveTimeoutError,
    LtxError,
    PeerLostError,
    RankMismatchError,
    TransportError,
)
from ltx.core.comm import ledger
from ltx.core.comm.backends import HostCopy
from ltx.core.comm.group_collectives import as_it_is, is_of_network
from ltx.core.comm.transports.shared_memory import (
    SharedMemoryTransport,
    SharedMemoryWork,
    any_transport_busy,
    progress_everywhere,
    wait_for,
)

#: A wait returns to Python this often, so that a signal or an abort is seen at once.
TICK = timedelta(seconds=0.1)
_SHORT_TICK = timedelta(milliseconds=1)


class Issuer(Protocol):
    """What a work needs of the channel that issued it: :class:`ltx.core.comm.channel.Channel`."""

    rank: int
    axis_name: str
    begun: int
    failed: LtxError | None
    transport: SharedMemoryTransport | None
    negotiation: Any

    def look_around(self, began: float, number: int, label: str) -> None: ...

    def timed_out(self, number: int, label: str) -> CollectiveTimeoutError: ...

    def transport_failed(self, label: str) -> TransportError: ...


class Work:
    """A started collective. :meth:`wait` returns its result; until then nothing may read the buffer."""

    def __init__(
        self,
        channel: Issuer,
        work: dist.Work | SharedMemoryWork,
        value: torch.Tensor,
        label: str,
        event: ledger.Event | None,
        finish: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
        ordered: bool = False,
    ):
        self._ordered = ordered
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
        return self._work is None or self._ordered or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it. On a stream-ordered backend the current stream waits, not the host.

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
            elif self._ordered:
                work.wait()
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
        if self._ordered:
            ledger.note_on_device(self._event, self._value.device)
        elif self._event is not None:
            now = time.perf_counter()
            self._event.waited_s, self._event.completed_s = now - began, self._event.completed_s or now
        self._value = self._finish(self._value)
        return self._value

    def read(self) -> HostCopy:
        """The result on its way to the host: :meth:`Channel.wait_for_host` waits for it."""
        started = self._work
        if not self._ordered or started is None or isinstance(started, SharedMemoryWork):
            return HostCopy(self.wait())
        return HostCopy(self.wait(), started.is_completed)

    def _block(self, work: dist.Work, began: float) -> None:
        ticks = 0
        while True:
            try:
                # Peers may wait for this rank's progress in shared memory while it waits here.
                work.wait(_SHORT_TICK if any_transport_busy() else TICK)
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or completed just after the tick
                    self._find_out(work)
                    return
            if progress_everywhere() or any_transport_busy():
                ticks += 1
                if ticks % 100:
                    continue
            self._channel.look_around(began, self._number, self._label)

    def _find_out(self, work: dist.Work) -> None:
        channel = self._channel
        try:
            work.wait()
        except RuntimeError as error:
            if not is_of_network(error):
                raise
            if "Timed out" in str(error):  # gloo's own clock was a little ahead
                raise channel.timed_out(self._number, self._label) from error
            channel.negotiation.answer_peers()  # a peer that has aborted may have said why
            raise PeerLostError(
                f"rank {channel.rank}: {self._label} on axis {channel.axis_name!r} failed while waiting for its peers: "
                f"{channel.negotiation.missing_peers()}. ({error})"
            ) from error

    def _pass(self, work: SharedMemoryWork, began: float) -> None:
        channel = self._channel
        assert channel.transport is not None
        while not wait_for(work, TICK.total_seconds()):
            if channel.transport.failures():
                raise channel.transport_failed(self._label) from channel.transport.error
            lost = channel.transport.lost_peers()
            channel.look_around(began, self._number, self._label)  # first: a peer that ended may have said why
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


def stamp_completion(work: dist.Work, event: ledger.Event) -> None:
    def completed(_future: object) -> None:
        event.completed_s = time.perf_counter()

    with suppress(RuntimeError):  # some of gloo's works have no future; then the wait tells
        work.get_future().add_done_callback(completed)
