"""A store whose calls can be given up: those of torch's own block for as long as it doesn't answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ltx.core.base.errors import PeerLostError, StoreGoneError

T = TypeVar("T")

#: How long the end of a thread waits that is idle or in a call to the store.
ENDING_S = 1.0


class StoreCaller:
    """Calls the store in a thread of its own, which may wait for longer than the one that asks.

    Args:
        rank: this process' rank in the world.
        limit_s: how long a call may take; it may be set later.
    """

    def __init__(self, rank: int, limit_s: float):
        self.limit_s = limit_s
        self._rank = rank
        self._gone: str | None = None  # its text; the error itself would keep frames alive, and what is in them
        self._late: Future[Any] | None = None
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="ltx-asks-the-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread.

        One that came back from the store while Python ends would abort the process, so this waits for it; not for one
        that waits for a store that doesn't answer.
        """
        self._questions.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(ENDING_S)

    def ask(self, question: Callable[[], T]) -> T:
        """Call `question`, which reads from the store, in the thread; return its result.

        Raises:
            StoreGoneError: the store is gone.
            PeerLostError: the store hasn't answered in time.
        """
        if self._gone is not None:  # it stays gone, and torch logs a page about each attempt
            raise self._told_gone(self._gone)
        asked = self._put(question)
        if not wait([asked], self.limit_s).done:
            self._late = asked
            raise PeerLostError(
                f"rank {self._rank}: the store through which the ranks meet hasn't answered for {self.limit_s:g} "
                "s. The process that holds it (rank 0's, or the launcher's on its machine) has been stopped, or its "
                "machine or the link to it is down."
            )
        try:
            return asked.result()
        except dist.DistError as error:
            raise self._told_gone(str(error)) from error

    def _put(self, question: Callable[[], T]) -> Future[T]:
        asked: Future[T] = Future()
        self._questions.put((question, asked))
        return asked

    def tell(self, statement: Callable[[], None]) -> None:
        """Call `statement`, which writes to the store and waits for no answer. Raises :class:`StoreGoneError`."""
        if self._gone is not None:
            raise self._told_gone(self._gone)
        if self._late is not None and not self._late.done():
            # A pending call occupies the connection: this one queues behind it, should the store ever answer.
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
            f"rank {self._rank}: the store through which the ranks meet is gone, and with it the process that held it. "
            "Steps whose collectives are known go on without it; nothing new can be compared. Save a checkpoint and "
            f"start again. ({said})"
        )

    def _answer(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)


class TimeoutStore:
    """The interface of `store`; calls that wait for an answer go through `caller` and can time out."""

    def __init__(self, store: Store, caller: StoreCaller):
        self.store = store
        self._caller = caller

    def set(self, key: str, value: str) -> None:
        self._caller.tell(lambda: self.store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._caller.ask(lambda: self.store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._caller.ask(lambda: self.store.multi_get(keys))

    def check(self, keys: list[str]) -> bool:
        return self._caller.ask(lambda: bool(self.store.check(keys)))

    def append(self, key: str, value: str) -> None:
        self._caller.tell(lambda: self.store.append(key, value))  # type: ignore[attr-defined]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._caller.ask(lambda: self.store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return self._caller.ask(lambda: bool(self.store.delete_key(key)))
