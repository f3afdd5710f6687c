"""Notes: what the ranks of a line leave for one another in the store, for threads that do work in the background.

Channels belong to the thread that trains, whose issues have one order. Work beside it, such as an asynchronous
checkpoint, has little to say: it goes through the store, under the number of the piece of work; or through a file that
all ranks see, where the store is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store

from ltx.comm.heartbeat import TimeoutStore
from ltx.errors import CollectiveTimeoutError, PeerLostError

#: Under this address the store holds them.
NOTES = "notes"


class Notes:
    """The notes of one line.

    Args:
        store: what the ranks of the line share.
        posted: whether all of some keys are in it; raises PeerLostError if it is gone.
        lost: the ranks whose processes are known to have ended, or that show no sign of life.
        rank, size, timeout_s: the line's.
    """

    def __init__(
        self,
        store: TimeoutStore | Store,
        posted: Callable[[list[str]], bool],
        lost: Callable[[], list[int]],
        rank: int,
        size: int,
        timeout_s: float,
    ):
        self._store, self._posted, self._lost = store, posted, lost
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self.begun = 0  # how many pieces of work
        self._threads: list[threading.Thread] = []

    def begin(self) -> str:
        """The place of the next piece of work; the same on every rank that counts along."""
        self.begun += 1
        return f"{NOTES}/item/{self.begun}"

    def through(self, file: Path, lost: Callable[[], list[int]]) -> Notes:
        """Notes for the same ranks in a file that all of them see; the last to let go of it removes it."""
        store = FileStore(str(file), self._size)
        return Notes(store, store.check, lost, self._rank, self._size, self._timeout_s)

    def hold(self, thread: threading.Thread) -> None:
        """`thread` leaves notes: the line waits for its end before it closes."""
        self._threads = [other for other in self._threads if other.is_alive()]
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the threads that leave notes."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def put(self, key: str, text: str) -> None:
        """Leave `text` at `key`."""
        self._store.set(key, text)

    def take(self, keys: Sequence[str], what: str, timeout_s: float | None = None) -> list[str]:
        """The texts at `keys`, once all are there. `what` is what this rank waits for, in the words of an error.

        Raises:
            PeerLostError: a peer's process has ended, where all ranks share a machine; or the store is gone.
            CollectiveTimeoutError: they aren't there within `timeout_s`; the axis' timeout if None.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline, pause_s, wanted = time.monotonic() + timeout_s, 0.001, list(keys)
        while not self._posted(wanted):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            if pause_s == 0.05 and (lost := self._lost()) and not self._posted(wanted):
                raise PeerLostError(
                    f"rank {self._rank}: {what} failed: the process of rank {', '.join(map(str, lost))} is gone, or "
                    "shows no sign of life."
                )
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"rank {self._rank}: {what}: its peers haven't done their part within {timeout_s:g} s."
                )
        return [text.decode() for text in self._store.multi_get(wanted)] if wanted else []

    def forget(self, keys: Sequence[str]) -> None:
        """Everyone has read what was at `keys`: keep the store small."""
        for key in keys:
            self._store.delete_key(key)
