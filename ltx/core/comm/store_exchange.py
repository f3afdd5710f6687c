"""What the ranks of an axis exchange through the store, and the one loop in which a rank waits for it.

The store is out of band: nothing here goes over a channel, so it mixes with no collective, and any thread may use it.
Values are JSON. A rank announces a value at a place, a name that all ranks use for the same thing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from torch._C._distributed_c10d import FileStore

from ltx.core.base.errors import CollectiveTimeoutError, PeerLostError
from ltx.core.comm.transports.shared_memory import progress_everywhere

#: The places of :meth:`StoreExchange.new_place` begin so.
EXCHANGES = "exchanges"

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.05


def poll_until(ready: Callable[[], bool], timeout_s: float, while_waiting: Callable[[], object] = lambda: None) -> bool:
    """Call `ready` until it returns True; returns whether it did within `timeout_s`.

    Every wait for peers in the store goes through here. The pauses between two calls double from 0.5 ms to 50 ms. This
    rank advances shared memory meanwhile: peers may need that to come.

    Waits for a collective are elsewhere, because something better than a pause ends them: the backend's own wait
    (:class:`ltx.core.comm.work.Work`), a counter in memory that changes within microseconds
    (:func:`ltx.core.comm.transports.shared_memory.wait_for`), or a future
    (:meth:`ltx.core.comm.channel.Channel.wait_for_future`).

    Args:
        while_waiting: called every 50 ms. It raises if what this rank waits for won't come.
    """
    began = checked = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while not ready():
        now = time.monotonic()
        if now - began > timeout_s:
            return False
        if now - checked >= _LAST_PAUSE_S:
            while_waiting()
            checked = now
        if not progress_everywhere():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
    return True


class KeyStore(Protocol):
    """What an exchange needs of a store: a :class:`ltx.core.comm.timeout_store.TimeoutStore`, or one of torch's."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def check(self, keys: list[str]) -> bool: ...

    def append(self, key: str, value: str) -> None: ...

    def delete_key(self, key: str) -> bool: ...


class StoreExchange:
    """The exchange of one axis. Every method raises PeerLostError if the store is gone or doesn't answer.

    Args:
        store: what the ranks share.
        rank, size, timeout_s: the axis'.
        lost: returns the ranks whose processes are known to have ended, or that show no sign of life.

    Attributes:
        begun: how many places :meth:`new_place` has returned.
    """

    def __init__(self, store: KeyStore, rank: int, size: int, timeout_s: float, lost: Callable[[], list[int]]):
        self._store, self._lost = store, lost
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.begun = 0
        self._threads: list[threading.Thread] = []

    def in_file(self, file: Path, lost: Callable[[], list[int]]) -> StoreExchange:
        """An exchange of the same ranks in a file that all of them see. The last rank to drop it removes the file."""
        store = cast(KeyStore, FileStore(str(file), self.size))
        return StoreExchange(store, self.rank, self.size, self.timeout_s, lost)

    def new_place(self) -> str:
        """A place that wasn't used before; the same one on all ranks that call this equally often."""
        self.begun += 1
        return f"{EXCHANGES}/item/{self.begun}"

    def announce(self, place: str, value: Any) -> None:
        """Put this rank's `value` at `place`, where its peers find it, without waiting for them."""
        self._store.set(f"{place}/{self.rank}", json.dumps(value))

    def peek(self, place: str, rank: int) -> Any:
        """What `rank` has announced at `place`; None if it hasn't yet."""
        return json.loads(self._store.get(f"{place}/{rank}")) if self.has(place, [rank]) else None

    def has(self, place: str, ranks: Iterable[int] | None = None) -> bool:
        """Whether all of `ranks`, or of the axis, have announced something at `place`."""
        return self._store.check(self._keys(place, ranks))

    def absent(self, place: str, ranks: Iterable[int] | None = None) -> list[int]:
        """Those of `ranks`, or of the axis, that haven't announced anything at `place`."""
        return [rank for rank in (range(self.size) if ranks is None else ranks) if not self.has(place, [rank])]

    def forget(self, place: str, ranks: Iterable[int] | None = None) -> None:
        """Remove what `ranks`, or all of the axis, have announced at `place`, once no rank will read it any more."""
        for key in self._keys(place, ranks):
            self._store.delete_key(key)

    def exchange(self, place: str, value: Any, what: str, timeout_s: float | None = None) -> list[Any]:
        """Announce `value` at `place`, and return every rank's, as :meth:`collect` does."""
        self.announce(place, value)
        return self.collect(place, what, timeout_s=timeout_s)

    def collect(
        self,
        place: str,
        what: str,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        while_waiting: Callable[[], object] | None = None,
        to: str = "do their part",
        fix: str = "",
    ) -> list[Any]:
        """What `ranks`, or all of the axis, have announced at `place`, once all of them have.

        Args:
            what: what this rank waits in; errors say it.
            timeout_s: None: the axis'.
            while_waiting: as in :func:`poll_until`. None: look for peers that are gone.
            to, fix: what the peers are to come for, and how to mend it if they don't; the timeout's error says these.

        Raises:
            PeerLostError: a peer's process has ended, or its heartbeat has stopped.
            CollectiveTimeoutError: the values aren't there within `timeout_s`.
        """
        wanted = range(self.size) if ranks is None else list(ranks)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        check = while_waiting or partial(self.refuse_lost, place, what, wanted)
        if not poll_until(partial(self.has, place, wanted), limit_s, check):
            absent = self.absent(place, wanted)
            raise CollectiveTimeoutError(
                f"rank {self.rank}: {what}: ranks {absent} didn't come to {to} within {limit_s:g} s.{fix}"
            )
        texts = self._store.multi_get(self._keys(place, wanted)) if wanted else []
        return [json.loads(text) for text in texts]

    def refuse_lost(self, place: str, what: str, ranks: Sequence[int]) -> None:
        """Raise PeerLostError if a peer is gone and what `ranks` have to say at `place` isn't all there."""
        if (lost := self._lost()) and not self.has(place, ranks):
            raise PeerLostError(
                f"rank {self.rank}: {what} failed: the process of rank {', '.join(map(str, lost))} is gone, or shows "
                "no sign of life."
            )

    def append(self, place: str, value: Any) -> None:
        """Append `value` to the list at `place`, which the ranks share."""
        self._store.append(place, f"{json.dumps(value)}\n")

    def entries(self, place: str) -> list[Any]:
        """The list at `place`, in the order in which ranks appended to it."""
        return [json.loads(line) for line in self._store.get(place).splitlines()] if self._store.check([place]) else []

    def hold(self, thread: threading.Thread) -> None:
        """`thread` uses this exchange: the axis waits for its end before it closes."""
        self._threads = [other for other in self._threads if other.is_alive()]
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the threads that use this exchange."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _keys(self, place: str, ranks: Iterable[int] | None) -> list[str]:
        return [f"{place}/{rank}" for rank in (range(self.size) if ranks is None else ranks)]
