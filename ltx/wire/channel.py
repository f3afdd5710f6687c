"""A channel: a process group of its own on which issues go out in one fixed order, each with a name.

An axis has one channel for the user's collectives, one for the buckets of gradients (one more for each further phase
of a communication hook) and one for background work, because these interleave differently on different ranks and on a
single group would pair with each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ltx.errors import CollectiveTimeoutError, PeerLostError
from ltx.wire import ledger
from ltx.wire.operations import OPERATIONS
from ltx.wire.signature import Signature

# A wait returns to Python this often, so that a signal or an abort is seen at once.
_TICK = timedelta(seconds=0.1)
_DIGEST_PRIME = (1 << 61) - 1


class Ticket:
    """An issue under way. :meth:`wait` gives its result; until then nobody may read the buffer."""

    __slots__ = ("_channel", "_event", "_label", "_value", "_work")

    def __init__(
        self, channel: Channel, work: dist.Work | None, value: torch.Tensor, label: str, event: ledger.Event | None
    ):
        self._channel = channel
        self._work = work
        self._value = value
        self._label = label
        self._event = event

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """The result, once it has landed.

        Raises:
            PeerLostError: the connection to a peer broke.
            CollectiveTimeoutError: it didn't land within the axis' timeout.
        """
        work, self._work = self._work, None
        if work is None:
            return self._value
        began = time.perf_counter()
        if self._value.is_cuda and self._channel.group.name() == "nccl":
            work.wait()  # orders the current stream behind the collective; the host goes on
        else:
            self._block(work, began)
        if self._event is not None:
            self._event.waited_s = time.perf_counter() - began
            if self._event.landed_s is None:
                self._event.landed_s = time.perf_counter()
        return self._value

    def _block(self, work: dist.Work, began: float) -> None:
        channel = self._channel
        while True:
            try:
                work.wait(_TICK)
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise PeerLostError(
                        f"rank {channel.rank}: {self._label} on axis {channel.axis_name!r} failed while waiting for "
                        f"its peers, one of which is gone: {error}"
                    ) from error
            channel.while_waiting()
            if time.perf_counter() - began > channel.timeout_s:
                raise CollectiveTimeoutError(
                    f"rank {channel.rank}: {self._label} (issue {channel.issued}) on axis {channel.axis_name!r}, "
                    f"channel {channel.name!r}, didn't complete within {channel.timeout_s:g} s: a peer hasn't issued "
                    "it. Every rank must call the same collectives in the same order."
                )


class Channel:
    """One ordered stream of issues between the ranks of an axis."""

    def __init__(
        self, name: str, axis_name: str, group: dist.ProcessGroup, timeout_s: float, while_waiting: Callable[[], None]
    ):
        self.name = name
        self.axis_name = axis_name
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.timeout_s = timeout_s
        self.while_waiting = while_waiting
        self.issued = 0
        self.compared = 0
        self.digest = 0
        # What was issued lately, for a peer that stands at another signature (see Line).
        self.recent: deque[tuple[int, Signature]] = deque(maxlen=256)

    def advance(self, signature: Signature, fingerprint: int) -> None:
        """Count an issue of `signature` into the running digest. Once for a call, however many buffers it moves."""
        self.recent.append((self.issued, signature))
        self.issued += 1
        self.digest = (self.digest * 1_000_003 + fingerprint) % _DIGEST_PRIME

    def issue(self, operation: str, buffer: torch.Tensor, label: str, argument: int = 0) -> Ticket:
        """Start `operation` on a contiguous `buffer` that now belongs to the wire."""
        entry = OPERATIONS[operation]
        event = ledger.note(
            self.name, operation, label, entry.wire_bytes(buffer.numel() * buffer.element_size(), self.size)
        )
        try:
            work, value = entry.start(self.group, buffer, argument)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank}: {label} on axis {self.axis_name!r} could not be issued: {error}"
            ) from error
        if event is not None:
            _stamp_landing(work, event)
        return Ticket(self, work, value, label, event)


def _stamp_landing(work: dist.Work, event: ledger.Event) -> None:
    def landed(_future: object) -> None:
        event.landed_s = time.perf_counter()

    work.get_future().add_done_callback(landed)
