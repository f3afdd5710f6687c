"""The ranks that save or load together: they exchange values through the store, and use no channel.

DCP (torch.distributed.checkpoint) gathers failures by collectives. These were tried, and broke promises: if a rank
calls something else, the others wait until the group's timeout; a KeyboardInterrupt becomes an error of DCP's; messages
of peers are unpickled; and the group for saving in the background can't be made once the store is gone. If the store is
gone, ranks that save exchange values through a file in the checkpoints' directory instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ltx import errors
from ltx.checkpoint.directory import EXCHANGE
from ltx.core import comm
from ltx.core.base.errors import message_of
from ltx.core.comm.signature import Post
from ltx.core.ranks.axis import Axis
from ltx.errors import CheckpointError, LtxError, StoreGoneError, UnsupportedError

T = TypeVar("T")

# How long rank 0 waits for the others to have heard what it tells them; and if that is why it raises.
_HEARD_S, _LEAVING_S = 10.0, 1.0
# The places of conclude(): to rank 0, from it, and to it.
_PARTS, _OUTCOME, _HEARD = 2, 3, 4

#: An error on a rank, as it is told to the others: (the name of its class, its text). None if nothing did.
Trouble = tuple[str, str] | None


def said_of(error: BaseException) -> tuple[str, str]:
    """`error` for the other ranks; for another library's error its cause: torch's writer hides the disk's error."""
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

    The ranks meet at places 1, 2, ... of this call, where each announces its result or its error. A rank that leaves
    early says so at the places where peers might yet wait for it, and waits for no peer: no rank waits for a rank that
    has raised, even by an interrupt. All ranks see `folder`: if the store is gone, they exchange values by a file in
    it.
    """

    def __init__(self, operation: str, axis: Any, folder: Path | None = None):
        found: Axis = comm.resolve(axis)
        if found.size > 1 and found.comm is None:
            raise UnsupportedError(
                f"{operation}: the ranks of axis {found.name!r} are simulated, and simulated ranks have no files of "
                "their own. Call it outside of ltx.vmap or ltx.simulate, with the state of all ranks."
            )
        self.operation, self._signature = operation, comm.Signature(operation, ())
        self.comm: comm.AxisComm | None = found.comm
        if self.comm is not None:
            self.comm.check_not_forked()  # before peers could be told anything in the rank's name
        self.size = found.size
        self.rank = 0 if self.comm is None else self.comm.rank
        self._folder = folder
        self._exchange: comm.StoreExchange | None = None if self.comm is None else self.comm.store_exchange
        self._places = "" if self._exchange is None else self._exchange.new_place()
        self._at = 0  # the last place at which this rank has announced something

    def exchange(self, make: Callable[[], tuple[T, Any]], failed: str, after: str = "") -> tuple[T, list[Any]]:
        """`make` returns a pair: return its first, and every rank's second, which is JSON. For the thread that
        trains.

        If it raises on a rank, all raise one error. `failed`: what didn't go well then; `after`: what to know besides.
        So they do, a RankMismatchError, if peers are at something else.
        """
        with self.leaving():
            made, failure, trouble = _tried(make)
            posts = self._meet([None if made is None else made[1], trouble])
            refuse([trouble for _, trouble in posts], failure, failed, after)
            assert made is not None
            return made[0], [told for told, _ in posts]

    def _meet(self, post: list[Any]) -> list[list[Any]]:
        """Every rank's post at the next place."""
        if self.comm is None:
            return [post]
        if self._at == 0:  # peers may be at another call
            try:
                posts = self.comm.negotiation.exchange_values(self._signature, post, f"{self._places}/1")
                self._at = 1
                return posts
            except StoreGoneError as error:
                self._use_file(error)
        self._announce(self._at + 1, post)
        return self._collect(self._at, range(self.size))

    def _use_file(self, gone: StoreGoneError) -> None:
        """Exchange values through a file from now on, if there may be one."""
        assert self.comm is not None
        if self._folder is None or self._exchange is not self.comm.store_exchange:
            raise gone
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.operation}: the ranks' store is gone, and they can't use {self._folder} instead: "
                f"{said_of(error)[1]}"
            ) from error
        name = hashlib.sha1(f"{self.comm.label} of {self.comm.watcher.world}".encode()).hexdigest()[:12]
        self._exchange = self.comm.store_exchange.in_file(self._folder / f"{EXCHANGE}{name}")

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """A context in which peers wait for this rank: they are told if it raises."""
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Leave this call because of `error`, and tell the peers at all places where they might wait for this rank."""
        if self.comm is None or self._exchange is None:
            return
        post = [None, said_of(error)]
        with suppress(LtxError):  # this rank can't reach its peers, which notice it
            try:
                self._exchange.has(self._places, [self.rank])  # a missing store is noticed when it is read
            except StoreGoneError as gone:
                self._use_file(gone)
            for at in range(self._at + 1, max(self._at + 1, _HEARD) + 1):
                if at == 1 and self._exchange is self.comm.store_exchange:
                    self.comm.negotiation.announce(f"{self._places}/1", Post(self._signature, post))
                else:
                    self._exchange.announce(f"{self._places}/{at}", post)
        if self._exchange is not self.comm.store_exchange:  # with a file, no rank has to stay until it has been read
            self.let_go()

    def let_go(self) -> None:
        """Close the exchange: nothing more is told. The last rank to close a file removes it."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None and self.comm is not None and exchange is not self.comm.store_exchange:
            exchange.close()  # close it now, though an exception's frames may still hold it

    def conclude(self, make: Callable[[], T], decide: Callable[[list[T]], None], failed: str, after: str = "") -> None:
        """Let rank 0 `decide` on every rank's result of `make`, which is JSON. For any thread, after an exchange.

        If either raises, all raise one error. `failed`, `after`: as for :meth:`exchange`.
        """
        patience_s = _LEAVING_S
        try:
            with self.leaving():
                mine, failure, trouble = _tried(make)
                if self.rank > 0:
                    self._announce(_PARTS, [mine, trouble])
                    ((troubles, left),) = self._collect(_OUTCOME, [0])
                    troubles = [left, None] if left else troubles  # rank 0 has left, and others may not have
                    self._announce(_HEARD, None)
                else:
                    parts = [[mine, trouble], *self._collect(_PARTS, range(1, self.size))]
                    troubles = [trouble for _, trouble in parts]
                    if not any(troubles):
                        _, failure, troubles[0] = _tried(lambda: decide([part for part, _ in parts]))
                    self.tell(troubles)
            patience_s = _HEARD_S
        finally:
            if self._exchange is not None and self.rank == 0:  # which may end next, and the store with it
                with suppress(LtxError):
                    self._collect(_HEARD, range(1, self.size), patience_s)
                    for at in (_PARTS, _OUTCOME, _HEARD):
                        self._exchange.forget(f"{self._places}/{at}")
            self.let_go()
        refuse(troubles, failure, failed, after)

    def tell(self, troubles: Sequence[Trouble]) -> None:
        """On rank 0: tell the others the errors, by rank."""
        self._announce(_OUTCOME, [troubles, None])

    def _announce(self, at: int, value: Any) -> None:
        if self._exchange is not None:
            self._exchange.announce(f"{self._places}/{at}", value)
            self._at = at

    def _collect(self, at: int, ranks: Sequence[int], timeout_s: float | None = None) -> list[Any]:
        if self._exchange is None:
            return []
        return self._exchange.collect(f"{self._places}/{at}", self.operation, ranks, timeout_s)
