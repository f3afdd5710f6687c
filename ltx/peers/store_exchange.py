"""The exchange of values between an axis' ranks through the store.

The store is out of band: nothing here goes over a channel, so it mixes with no collective, and any thread may use it.
Values are JSON. A rank announces a value at a place, a name that all ranks use for the same thing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ltx.core.base.errors import CollectiveTimeoutError, PeerLostError
from ltx.core.comm.backends import look_out
from ltx.core.comm.transport import poll_until

#: The prefix of the places that :meth:`StoreExchange.new_place` returns.
EXCHANGES = "exchanges"


class StoreExchange:
    """The exchange of one axis, through `store`, whose errors its methods raise. `lost`: the ranks whose processes are
    known to have ended, or that show no sign of life.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, lost: Callable[[], list[int]]):
        self._store, self._lost = store, lost
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.begun = 0  # the number of places that :meth:`new_place` has returned
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        del self._store

    def new_place(self) -> str:
        """A new place. It is the same on all ranks that have called this equally often."""
        self.begun += 1
        return f"{EXCHANGES}/item/{self.begun}"

    def announce(self, place: str, value: Any) -> None:
        """Put this rank's `value` at `place`, where its peers find it, without waiting for them."""
        self._store.set(f"{place}/{self.rank}", json.dumps(value))

    def peek(self, place: str, rank: int) -> Any:
        """The value that `rank` has announced at `place`; None if it hasn't yet."""
        return json.loads(self._store.get(f"{place}/{rank}")) if self.has(place, [rank]) else None

    def has(self, place: str, ranks: Iterable[int] | None = None) -> bool:
        """Whether all of `ranks`, or of the axis, have announced something at `place`."""
        return bool(self._store.check(self._keys(place, ranks)))

    def absent(self, place: str, ranks: Iterable[int] | None = None) -> list[int]:
        """The ranks among `ranks` (None: the axis) that haven't announced anything at `place`."""
        return [rank for rank in (range(self.size) if ranks is None else ranks) if not self.has(place, [rank])]

    def forget(self, place: str, ranks: Iterable[int] | None = None) -> None:
        """Remove the values that `ranks` (None: the axis) have announced at `place`, once no rank reads them."""
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
        """The values that `ranks` (None: the axis) have announced at `place`, once all of them have. PeerLostError if
        one is gone, CollectiveTimeoutError after `timeout_s` (None: the axis'); these name `what` this rank waits in,
        what the peers should come `to`, and the `fix`. `while_waiting`: in place of the look for peers that are gone.
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
        """Raise PeerLostError if one of `ranks` is gone and hasn't announced its value at `place`."""
        look_out()
        if (lost := [rank for rank in self._lost() if rank in ranks]) and not self.has(place, lost):
            raise PeerLostError(
                f"rank {self.rank}: {what} failed: the process of rank {', '.join(map(str, lost))} is gone, or shows "
                "no sign of life."
            )

    def hold(self, thread: threading.Thread) -> None:
        """Note that `thread` uses this exchange: the axis waits for its end before it closes."""
        self._threads = [other for other in self._threads if other.is_alive()]
        self._threads.append(thread)

    def finish(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _keys(self, place: str, ranks: Iterable[int] | None) -> list[str]:
        return [f"{place}/{rank}" for rank in (range(self.size) if ranks is None else ranks)]
