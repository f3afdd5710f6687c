"""The protocol of what carries a channel's collectives in place of its process group, where ranks share something.

:mod:`ltx.shared_memory` implements it, and is handed in when ltx is imported. Without it all goes over sockets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, UntypedStorage

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.05


@dataclass(eq=False)
class TransportWork:
    """A buffer on its way through a transport, chunk by chunk."""

    transport: Transport
    end: int = 0  # the place after the buffer's last chunk
    completed_s: float = 0.0
    refused: bool = False  # ranks have issued different collectives
    sums: dict[int, float] | None = None  # the sum of each chunk's elements, by the chunk's place, if wanted
    note: Sequence[float] = ()  # once the first chunk is complete: the sums of the ranks' notes, in rank order

    @property
    def completed(self) -> bool:
        return self.refused or self.transport.emptied >= self.end  # peers fill no chunk of what they refuse

    @property
    def total(self) -> float | None:
        """The sum of the result's elements, if it was asked for; NaN if a rank hasn't summed its part."""
        return None if self.sums is None else sum(self.sums.values())


class Transport(Protocol):
    """This rank's end of what a channel's ranks share. It moves only while a thread calls it, and never blocks."""

    error: Exception | None  # why this rank's end has failed

    @property
    def busy(self) -> bool: ...  # whether a chunk is pending
    @property
    def emptied(self) -> int: ...  # how many chunks are complete, of all that were begun
    # A work, and the memory of its result. Ranks that have given different tags refuse the work.
    def begin(
        self, operation: str, buffer: Tensor, arguments: tuple[int, ...], tag: int, summed: bool, note: Sequence[float]
    ) -> tuple[TransportWork, Tensor]: ...
    def progress(self) -> bool: ...  # does what can be done now; whether there was anything
    def failures(self) -> dict[int, str]: ...  # why ranks' ends have failed, by rank
    def lost_peers(self) -> list[int]: ...  # the ranks whose processes are gone
    def room(self, nbytes: int) -> UntypedStorage | None: ...  # memory for a buffer that needs no copy, if any
    def close(self) -> None: ...


#: The open transports of this process.
open_transports: list[Transport] = []


def progress_everywhere() -> bool:
    """Advance every transport: peers may wait in another than this rank. Returns whether there was anything to do."""
    return sum([transport.progress() for transport in tuple(open_transports) if transport.busy]) > 0


def any_busy() -> bool:
    """Whether something is pending in any transport of this process."""
    return bool(open_transports) and any(transport.busy for transport in tuple(open_transports))


def wait_for(work: TransportWork, pause_s: float) -> bool:
    """Advance the transports until `work` is complete (True), its transport fails, or `pause_s` is over (False)."""
    began = idle_since = time.perf_counter()
    while not work.completed:
        if progress_everywhere():
            idle_since = time.perf_counter()
            continue
        now = time.perf_counter()
        if now - began > pause_s or work.transport.error is not None:
            return False
        if now - idle_since < 0.0005:
            os.sched_yield()
        else:
            time.sleep(0.0001)
    return True


def poll_until(ready: Callable[[], bool], timeout_s: float, while_waiting: Callable[[], object] = lambda: None) -> bool:
    """Call `ready` until it returns True; returns whether it did within `timeout_s`. Every wait for peers in the store
    goes through here. The pauses between two calls double from 0.5 ms to 50 ms; in a long wait a pause is a twentieth
    of the wait so far, up to a second: many ranks may wait at one store. Meanwhile this rank advances shared memory,
    which peers may need before they can come, and every 50 ms calls `while_waiting`, which raises if that's in vain.
    """
    began = checked = asked = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while not ready():
        while True:
            now = time.monotonic()
            if now - began > timeout_s:
                return ready()
            if now - checked >= _LAST_PAUSE_S:
                while_waiting()
                checked = now
            if not progress_everywhere():
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            if now - asked >= min((now - began) / 20, 1.0):
                break
        asked = now
    return True
