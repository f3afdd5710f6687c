"""A store whose calls a thread can give up: torch's own calls block until the store answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ltx.core.base.errors import PeerLostError, StoreGoneError

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
        """What `question` reads from the store. StoreGoneError if it is gone, PeerLostError if it doesn't answer."""
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
