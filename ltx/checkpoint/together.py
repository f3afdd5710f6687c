"""The ranks that save or load together: they exchange values through the store, and nothing of it goes over a channel.

Ranks that save because the store is gone exchange values through a file in the directory of the checkpoints instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ltx import errors
from ltx.core import comm
from ltx.core.base.errors import message_of
from ltx.core.comm.signature import Post
from ltx.core.ranks.axis import Axis
from ltx.errors import CheckpointError, LtxError, StoreGoneError, UnsupportedError

T = TypeVar("T")

# How long rank 0 waits for the others to have heard what it tells them; and if that is why it raises.
_HEARD_S, _LEAVING_S = 10.0, 1.0

#: What went wrong on a rank, to be told to the others: the name of the error's class, and text. None if nothing did.
Trouble = tuple[str, str] | None


def said_of(error: BaseException) -> tuple[str, str]:
    """`error` for the other ranks; another library's in the words of its cause: torch's writer hides the disk's."""
    if isinstance(error, LtxError):
        return type(error).__name__, message_of(error)
    cause: BaseException | None = error if isinstance(error, Exception) else None
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    told = cause or error
    return CheckpointError.__name__, ": ".join(filter(None, (type(told).__name__, message_of(told))))


def refuse(by_rank: Sequence[Trouble], own: Exception | None, what: str, after: str = "") -> None:
    """Raise one error for what went wrong, the same on all ranks, if anything did; `own` is this rank's.

    It is of the class that all who failed raised, if that is one of ltx's, else a CheckpointError.
    """
    failed = {rank: trouble for rank, trouble in enumerate(by_rank) if trouble is not None}
    if not failed:
        return
    kinds, texts = ({trouble[i] for trouble in failed.values()} for i in (0, 1))
    made: type[LtxError] = getattr(errors, kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    same = len(failed) == len(by_rank) and len(texts) == 1
    told = texts.pop() if same else "; ".join(f"rank {rank}: {said}" for rank, (_, said) in failed.items())
    if not same or made is CheckpointError:  # else what each caller did, in words that say what
        told = f"{what}: {told.rstrip('.')}.{after}"
    error = made(told)
    if own is not None and (type(own), message_of(own)) == (made, str(error)):
        raise own
    raise error from own


def _tried(make: Callable[[], T]) -> tuple[T | None, Exception | None, Trouble]:
    """What `make` gives; or what it raises, and that for the other ranks."""
    try:
        return make(), None, None
    except Exception as error:
        return None, error, said_of(error)


class Together:
    """One call of a checkpoint's function, on all ranks of an axis.

    A rank that raises tells its peers so wherever they might wait for it, and waits for none of them: nobody waits for
    one that has raised, whatever that was, an interrupt too. All ranks see `folder`: if the store is gone, they
    exchange values through a file in it.
    """

    def __init__(self, operation: str, axis: Any, folder: Path | None = None):
        found: Axis = comm.resolve(axis)
        if found.size > 1 and found.comm is None:
            raise UnsupportedError(
                f"{operation}: the ranks of axis {found.name!r} are simulated, and simulated ranks have no files of "
                "their own. Call it outside of ltx.vmap or ltx.simulate, with the state of all of them."
            )
        self.operation, self._signature = operation, comm.Signature(operation, ())
        self.comm: comm.AxisComm | None = found.comm
        if self.comm is not None:
            self.comm.check_not_forked()  # before peers could be told anything in the rank's name
        self.size = found.size
        self.rank = 0 if self.comm is None else self.comm.rank
        self._folder = folder
        self._exchange: comm.StoreExchange | None = None if self.comm is None else self.comm.store_exchange
        self._place = "" if self._exchange is None else self._exchange.new_place()
        self._exchanges = 0  # that are over
        self._owed = {"outcome"} if self.rank == 0 else {"parts", "heard"}

    def exchange(self, what: str, make: Callable[[], T], failed: str, after: str = "") -> list[T]:
        """What `make` gives on every rank, which is JSON, on every rank. For the thread that trains.

        If it raises on a rank, all raise one error. `failed`: what didn't go well then; `after`: what to know besides.
        So they do, a RankMismatchError, if peers are at something else, or at another `what`.
        """
        with self.leaving():
            mine, failure, trouble = _tried(make)
            posts = self._collect([what, mine, trouble])
            refuse([trouble for *_, trouble in posts], failure, failed, after)
            if any(theirs != what for theirs, *_ in posts):
                values = {rank: theirs for rank, (theirs, *_) in enumerate(posts)}
                raise comm.mismatch(f"of {self.operation}", "what is done", values, "call the same on every rank")
            return [value for _, value, _ in posts]

    def _collect(self, post: list[Any]) -> list[list[Any]]:
        """Every rank's post at the place of the next exchange."""
        if self.comm is None:
            return [post]
        place = f"{self._place}/{self._exchanges + 1}"
        try:
            posts = self.comm.negotiation.exchange_values(self._signature, post, place)
        except StoreGoneError:
            if self._folder is None:
                raise
            posts = self._through_file(self._folder).exchange(place, post, self.operation)
        self._exchanges += 1
        return posts

    def _through_file(self, folder: Path) -> comm.StoreExchange:
        """An exchange for when the store is gone."""
        assert self.comm is not None
        assert self._exchange is not None
        if self._exchange is not self.comm.store_exchange:
            return self._exchange  # another of this rank's on the file would be counted as another rank's
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.operation}: the ranks' store is gone, and they can't use {folder} instead: {said_of(error)[1]}"
            ) from error
        name = hashlib.sha1(f"{self.comm.label} of {self.comm.heartbeat.world}".encode()).hexdigest()[:12]
        self._exchange = self.comm.store_exchange.in_file(folder / f".ltx-exchange-{name}", self.comm.lost)
        return self._exchange

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Surrounds what this rank does when its peers wait for it: they are told what it raises."""
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Do no more of this call because of `error`, and tell the peers wherever they might wait for this rank."""
        if self.comm is None or self._exchange is None or not self._owed:
            return
        told = said_of(error)
        # Peers may have been through the exchange in which this rank is, and be in the next one.
        places = [f"{self._place}/{self._exchanges + ahead}" for ahead in (1, 2)]
        post = ["", None, told]
        troubles = [told if rank == self.rank else None for rank in range(self.size)]
        last_words = {"parts": [None, told], "heard": True, "outcome": troubles}
        with suppress(LtxError):  # this rank can't reach its peers, and they see that
            try:
                for place in places:
                    self.comm.negotiation.announce(place, Post(self._signature, post))
                self._exchange.has(places[0], [self.rank])  # a store that is gone shows when it is read
            except StoreGoneError:
                if self._folder is None:
                    raise
                exchange = self._through_file(self._folder)
                for place in places:
                    exchange.announce(place, post)
            for what in sorted(self._owed):
                self._announce(what, last_words[what])

    def let_go(self) -> None:
        """Nobody will be told anything more. The last rank that lets go of a file in place of the store removes it."""
        self._exchange = None

    def conclude(self, make: Callable[[], T], decide: Callable[[list[T]], None], failed: str, after: str = "") -> None:
        """Have rank 0 `decide` on what `make` gives on every rank, which is JSON. For any thread.

        If either raises, all raise one error. `failed`, `after`: as for :meth:`exchange`.
        """
        patience_s = _LEAVING_S
        try:
            with self.leaving():
                mine, failure, trouble = _tried(make)
                troubles = self._decided((mine, trouble), decide) if self.rank == 0 else self._told((mine, trouble))
            patience_s = _HEARD_S
        finally:
            self._wait_until_heard(patience_s)
            self.let_go()
        refuse(troubles, failure, failed, after)

    def tell(self, troubles: Sequence[Trouble]) -> None:
        """On rank 0: tell the others what went wrong, by rank."""
        self._announce("outcome", troubles)

    def _decided(self, part: tuple[Any, Trouble], decide: Callable[[list[Any]], None]) -> list[Trouble]:
        parts = [part]
        if self._exchange is not None:
            place, others = f"{self._place}/parts", range(1, self.size)
            parts += self._exchange.collect(place, self.operation, others)
            self._exchange.forget(place, others)
        troubles = [trouble for _, trouble in parts]
        if not any(troubles):
            try:
                decide([value for value, _ in parts])
            except Exception as error:
                troubles[0] = said_of(error)
        self.tell(troubles)
        return troubles

    def _told(self, part: tuple[Any, Trouble]) -> list[Trouble]:
        assert self._exchange is not None
        self._announce("parts", part)
        (troubles,) = self._exchange.collect(f"{self._place}/outcome", self.operation, [0])
        self._announce("heard", True)
        return list(troubles)

    def _wait_until_heard(self, patience_s: float) -> None:
        """On rank 0, which may end next, and the store with it."""
        if self._exchange is None or self.rank > 0:
            return
        with suppress(LtxError):
            others = range(1, self.size)
            self._exchange.collect(f"{self._place}/heard", self.operation, others, patience_s)
            self._exchange.forget(f"{self._place}/outcome", [0])
            self._exchange.forget(f"{self._place}/heard", others)

    def _announce(self, what: str, value: Any) -> None:
        if self._exchange is not None:
            self._exchange.announce(f"{self._place}/{what}", value)
            self._owed.discard(what)
