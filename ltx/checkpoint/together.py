"""The ranks that save or load together: they exchange values through the store, and use no channel.

By collectives, as in DCP, ranks would wait for one that calls something else until the group's timeout, and a save in
the background would need a group of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]

from ltx import errors
from ltx.core import comm
from ltx.core.base.errors import message_of
from ltx.core.ranks.axis import Axis
from ltx.errors import CheckpointError, LtxError, UnsupportedError, WorldError
from ltx.peers.store_exchange import StoreExchange

T = TypeVar("T")

_HEARD_S, _LEAVING_S = 10.0, 1.0  # how long rank 0 waits until the others have read its outcome; and if it raises
_PARTS, OUTCOME, _HEARD = 2, 3, 4  # places of conclude(): parts for rank 0, its outcome (errors by rank, and why it
# has left), that others have read it

Trouble = tuple[str, str] | None  #: a rank's error as the others learn of it: (class name, text); None without an error


def said_of(error: BaseException) -> tuple[str, str]:
    """`error` as (class name, text) for the other ranks. Of torch's writer's errors it takes the cause, an OSError."""
    if isinstance(error, LtxError):
        return type(error).__name__, message_of(error)
    cause: BaseException | None = error if isinstance(error, Exception) else None
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    told = cause or error
    return CheckpointError.__name__, ": ".join(filter(None, (type(told).__name__, message_of(told))))


def refuse(by_rank: Sequence[Trouble], own: Exception | None, what: str, after: str = "") -> None:
    """If any rank failed, raise one error on all, of the ltx class that they agree on; `own` is this rank's."""
    failed = {rank: trouble for rank, trouble in enumerate(by_rank) if trouble is not None}
    if not failed:
        return
    kinds, texts = ({trouble[i] for trouble in failed.values()} for i in (0, 1))
    made: type[LtxError] = getattr(errors, kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    same = len(failed) == len(by_rank) and len(texts) == 1
    told = texts.pop() if same else "; ".join(f"rank {rank}: {said}" for rank, (_, said) in failed.items())
    if not same or made is CheckpointError:  # an ltx error of all ranks needs no context
        told = f"{what}: {told.rstrip('.')}.{after}"
    error = made(told)
    if own is not None and (type(own), message_of(own)) == (made, str(error)):
        raise own
    raise error from own


def _tried(make: Callable[[], T]) -> tuple[T | None, Exception | None, Trouble]:
    """(the result of `make`, its exception, the exception for the other ranks)."""
    try:
        return make(), None, None
    except Exception as error:
        return None, error, said_of(error)


class Together:
    """One call of save or load, on all ranks of an axis, which meet at places 1, 2, ... of the call. A rank that leaves
    early, even by an interrupt, says so at all places where peers might wait for it.
    """

    def __init__(self, operation: str, axis: Any):
        found: Axis = comm.resolve(axis)
        if found.size > 1 and found.comm is None:
            raise UnsupportedError(
                f"{operation}: the ranks of axis {found.name!r} are simulated, and simulated ranks have no files of "
                "their own. Call it outside of ltx.vmap, with the state of all ranks."
            )
        self.operation, self._signature = operation, comm.Signature(operation, ())
        self.comm: comm.AxisComm | None = found.comm
        if self.comm is not None and isinstance(self.comm.user.failed, WorldError):
            raise self.comm.user.failed  # this is a fork, which mustn't tell peers anything in the rank's name
        if self.comm is not None and self.comm.peers.replayed:
            raise UnsupportedError(
                f"{operation}: a replay has one rank, and would write over the training's files. Leave it out there."
            )
        self.size = found.size
        self.rank = 0 if self.comm is None else self.comm.rank
        alone = StoreExchange(HashStore(), 0, 1, 0.0, list)
        self._exchange = alone if self.comm is None else self.comm.peers.store_exchange
        self._places = self._exchange.new_place()
        self._at = 0  # the last place at which this rank has announced something
        self._over = False  # all is said
        self.undo = ExitStack()  # what this rank takes back if it leaves

    def exchange(self, make: Callable[[], tuple[T, Any]], failed: str, after: str = "") -> tuple[T, list[Any]]:
        """`make` returns a pair: return its first, and every rank's second, which is JSON. For the training's thread.
        If it raises on a rank, all raise one error, whose text begins with `failed` and ends with `after`.
        """
        with self.leaving():
            made, failure, trouble = _tried(make)
            posts = self._meet([None if made is None else made[1], trouble])
            refuse([trouble for _, trouble in posts], failure, failed, after)
            assert made is not None
            return made[0], [told for told, _ in posts]

    def _meet(self, post: list[Any]) -> list[list[Any]]:
        """Announce `post` at the next place; return every rank's post there."""
        if self._at == 0 and self.comm is not None:  # peers may be at another call
            posts = self.comm.peers.exchange(self._signature, post, f"{self._places}/1")
            self._at = 1
            return posts
        self.announce(self._at + 1, post)
        return self._collect(self._at, range(self.size))

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """A context in which peers wait for this rank; if it raises, they learn of it at all places, and it undoes."""
        try:
            yield
        except BaseException as error:
            post, places = [None, said_of(error)], range(self._at + 1, max(self._at + 1, _HEARD) + 1)
            with self.undo, suppress(LtxError):  # peers will notice that this rank is unreachable
                for at in places if not self._over else ():
                    if at == 1 and self.comm is not None:
                        self.comm.peers.exchange(self._signature, post, f"{self._places}/1", wait=False)
                    else:
                        self._exchange.announce(f"{self._places}/{at}", post)
            raise

    def conclude(self, make: Callable[[], T], decide: Callable[[list[T]], None], failed: str, after: str = "") -> None:
        """Call `make` on all ranks, ``decide(results)`` on rank 0; raise as :meth:`exchange`. In any thread."""
        patience_s = _LEAVING_S
        try:
            with self.leaving():
                mine, failure, trouble = _tried(make)
                if self.rank > 0:
                    self.announce(_PARTS, [mine, trouble])
                    ((troubles, left),) = self._collect(OUTCOME, [0])
                    troubles = [left, None] if left else troubles  # rank 0 has left, and others may not have
                    self.announce(_HEARD, None)
                else:
                    parts = [[mine, trouble], *self._collect(_PARTS, range(1, self.size))]
                    troubles = [trouble for _, trouble in parts]
                    if not any(troubles):
                        _, failure, troubles[0] = _tried(lambda: decide([part for part, _ in parts]))
                    self.announce(OUTCOME, [troubles, None])
            patience_s = _HEARD_S
        finally:
            if self.rank == 0 and not self._over:  # rank 0 may end next, and the store with it
                with suppress(LtxError):
                    self._collect(_HEARD, range(1, self.size), patience_s)
                    for at in (_PARTS, OUTCOME, _HEARD):
                        self._exchange.forget(f"{self._places}/{at}")
            self._over = True
        refuse(troubles, failure, failed, after)

    def announce(self, at: int, value: Any) -> None:
        self._exchange.announce(f"{self._places}/{at}", value)
        self._at = at

    def _collect(self, at: int, ranks: Sequence[int], timeout_s: float | None = None) -> list[Any]:
        return self._exchange.collect(f"{self._places}/{at}", self.operation, ranks, timeout_s)
