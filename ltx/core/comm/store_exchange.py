"""The exchange of values between an axis' ranks through the store, and the one loop in which a rank waits for them.

The store is out of band: nothing here goes over a channel, so it mixes with no collective, and any thread may use it.
Values are JSON. A rank announces a value at a place, a name that all ranks use for the same thing. Calls to the store
can be given up; torch's own calls block until the store answers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from ltx.core.base.errors import CollectiveTimeoutError, PeerLostError, StoreGoneError
from ltx.core.base.private import Store
from ltx.core.comm.backends import look_out
from ltx.core.comm.transport import progress_everywhere

T = TypeVar("T")
Said = Callable[[], str]

#: How long `end` waits for the thread, which is idle or in a call to the store.
ENDING_S = 1.0

#: How long a thread that has waited too long leaves Python's lock to others before it gives up.
YIELD_S = 0.1


class StoreCaller:
    """Calls the store in a thread of its own, so that the calling thread can give up after `limit_s`."""

    def __init__(self, rank: int, limit_s: float, why_gone: Said, when_idle: Callable[[], None], state_of_host: Said):
        self.limit_s = limit_s
        self.host: int | None = None  # the rank that holds the store; None for the launcher
        self._rank, self._why_gone, self._when_idle, self._state_of_host = rank, why_gone, when_idle, state_of_host
        self._gone: str | None = None  # the error's text; the error itself would keep frames and their objects alive
        self._late: Future[Any] | None = None
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="ltx-asks-the-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for it (one that returns from the store while Python ends aborts the process)."""
        self._questions.put(None)
        if self._thread is not threading.current_thread() and not self.is_late:
            self._thread.join(ENDING_S)

    @property
    def is_late(self) -> bool:
        """Whether an answer for which a thread has waited in vain is still not there."""
        return self._late is not None and not self._late.done()

    def refuse(self, why: str) -> None:
        self._gone = why

    def ask(self, question: Callable[[], T]) -> T:
        """The result of `question`, which reads from the store, called in the thread. Raises StoreGoneError if the
        store is gone, PeerLostError if it hasn't answered in time.
        """
        if self._gone is not None:  # don't try again, since torch logs a page for each failed call
            raise self._told_gone(self._gone)
        if self.is_late:
            raise self.unanswered()
        asked = self._put(question)
        # A call of another thread may have held Python's lock all the time, with the answer there.
        if not wait([asked], self.limit_s).done and not wait([asked], YIELD_S).done:
            self._late = asked
            raise self.unanswered()
        try:
            return asked.result()
        except dist.DistError as error:
            raise self._told_gone(str(error)) from error

    def unanswered(self) -> PeerLostError:
        return PeerLostError(
            f"rank {self._rank}: the store through which the ranks meet hasn't answered for {self.limit_s:g} s: "
            f"{self._host}, which holds it, {self._state_of_host()}."
        )

    @property
    def _host(self) -> str:
        return "the launcher's process" if self.host is None else f"rank {self.host}'s process"

    def _put(self, question: Callable[[], T]) -> Future[T]:
        asked: Future[T] = Future()
        self._questions.put((question, asked))
        return asked

    def tell(self, statement: Callable[[], None]) -> None:
        """Call `statement`, which writes to the store and waits for no answer. Raises :class:`StoreGoneError`."""
        if self._gone is not None:
            raise self._told_gone(self._gone)
        if self.is_late:
            # A pending call occupies the connection: this call waits behind it until the store answers.
            self._put(statement)
            return
        try:
            statement()
        except dist.DistError as error:
            raise self._told_gone(str(error)) from error

    def _told_gone(self, said: str) -> StoreGoneError:
        """The error for a store that is gone, given the text of the error that showed it."""
        self._gone = said
        return StoreGoneError(
            f"rank {self._rank}: the store through which the ranks meet is gone, and with it {self._host}, which "
            f"held it.{self._why_gone()} Steps whose collectives are known go on without it; nothing new can be "
            f"compared, and no checkpoint saved: torch.save(state.state_dict(), path) keeps what this rank has. Start "
            f"all ranks again. ({said})"
        )

    def _answer(self) -> None:
        while True:
            try:
                asked = self._questions.get(timeout=min(1.0, self.limit_s / 4))
            except Empty:
                self._when_idle()
                continue
            if asked is None:
                break
            question, answer = asked
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)


class TimeoutStore:
    """The methods of `store`; calls that wait for an answer go through `caller` and can time out."""

    def __init__(self, store: Store, caller: StoreCaller):
        self.store: Any = store
        self._caller = caller

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.store, name)
        call: Callable[[Callable[[], Any]], Any] = self._caller.tell if name in _TELLS else self._caller.ask
        return lambda *arguments: call(lambda: method(*arguments))


#: A store's methods that wait for no answer.
_TELLS = ("set", "append")

#: The prefix of the places that :meth:`StoreExchange.new_place` returns.
EXCHANGES = "exchanges"

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.05


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


class StoreExchange:
    """The exchange of one axis. Every method raises PeerLostError if the store is gone or doesn't answer. `lost`: the
    ranks whose processes are known to have ended, or that show no sign of life.
    """

    def __init__(self, store: TimeoutStore, rank: int, size: int, timeout_s: float, lost: Callable[[], list[int]]):
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
        """The values that `ranks` (None: the axis) have announced at `place`, once all of them have.

        Args:
            what: what this rank waits in; errors say it.
            timeout_s: None: the axis'.
            while_waiting: as in :func:`poll_until`. None: look for peers that are gone. to, fix: texts for the
                timeout's error: what peers should come for, and what to do if they don't.

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
