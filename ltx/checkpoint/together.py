"""The ranks that save or load together: they exchange values through the store, and nothing of it goes over a channel.

Ranks that save because the store is gone exchange values through a file in the directory of the checkpoints instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ltx import comm, errors
from ltx.axis import Axis
from ltx.errors import CheckpointError, LtxError, StoreGoneError, UnsupportedError, message_of

# How long rank 0 waits for the others to have heard what it tells them.
_HEARD_S = 10.0


#: What went wrong on a rank, to be told to the others: the name of the error's class, and text. None if nothing did.
Trouble = tuple[str, str] | None


def said_of(error: BaseException) -> tuple[str, str]:
    """`error` for the other ranks; another library's in the words of its cause: torch's writer hides the disk's."""
    if isinstance(error, LtxError):
        return type(error).__name__, message_of(error)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    told = cause or error
    return CheckpointError.__name__, f"{type(told).__name__}: {message_of(told)}"


def refuse(by_rank: Sequence[Trouble], own: Exception | None, what: str, after: str = "") -> None:
    """Raise one error for what went wrong, the same on all ranks, if anything did; `own` is this rank's.

    It is of the class that all who failed raised, if that is one of ltx's, else a CheckpointError.
    """
    error = _refusal(by_rank, what, after)
    if error is not None and own is not None and (type(own), message_of(own)) == (type(error), str(error)):
        raise own
    if error is not None:
        raise error from own


def _refusal(by_rank: Sequence[Trouble], what: str, after: str) -> LtxError | None:
    failed = {rank: trouble for rank, trouble in enumerate(by_rank) if trouble is not None}
    if not failed:
        return None
    (kind, text), *others = failed.values()
    kind = kind if all(other[0] == kind for other in others) else CheckpointError.__name__
    made: type[LtxError] = getattr(errors, kind, CheckpointError)
    same = len(failed) == len(by_rank) and all(other[1] == text for other in others)
    if same and made is not CheckpointError:  # what each caller did, in words that say what
        return made(text)
    told = text if same else "; ".join(f"rank {rank}: {said}" for rank, (_, said) in failed.items())
    return made(f"{what}: {told.rstrip('.')}.{after}")


class Together:
    """One call of a checkpoint's function, on all ranks of an axis.

    Args:
        operation: what is called.
        folder: one that all ranks see. If the store is gone, they exchange values through a file in it.
        axis: as in :func:`ltx.psum`.

    Attributes:
        rank, size: this rank's place among how many.
    """

    def __init__(self, operation: str, axis: Any, folder: Path | None = None):
        found: Axis = comm.resolve(axis)
        if found.size > 1 and found.comm is None:
            raise UnsupportedError(
                f"{operation}: the ranks of axis {found.name!r} are simulated, and simulated ranks have no files of "
                "their own. Call it outside of ltx.vmap or ltx.simulate, with the state of all of them."
            )
        self.operation = operation
        self.comm: comm.AxisComm | None = found.comm
        self.size = found.size
        self.rank = 0 if self.comm is None else self.comm.rank
        self._folder = folder
        self._exchange: comm.StoreExchange | None = None if self.comm is None else self.comm.store_exchange
        self._place = "" if self._exchange is None else self._exchange.new_place()
        self._exchanges = 0

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value`, which is JSON, on every rank. For the thread that trains.

        Raises:
            RankMismatchError: peers are at something else, or at another `what`.
        """
        if self.comm is None:
            return [value]
        self._exchanges += 1
        place = f"{self._place}/{self._exchanges}"
        try:
            return self.comm.negotiation.exchange_values(comm.Signature(self.operation, (), what), value, place)
        except StoreGoneError:
            if self._folder is None:
                raise
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.operation}: the ranks' store is gone, and they can't use {self._folder} instead: "
                f"{said_of(error)[1]}"
            ) from error
        # Through a file, for when the store is gone.
        name = hashlib.sha1(f"{self.comm.label} of {self.comm.heartbeat.world}".encode()).hexdigest()[:12]
        self._exchange = self.comm.store_exchange.in_file(self._folder / f".ltx-exchange-{name}", self.comm.lost)
        told = self._exchange.exchange(place, [what, value], self.operation)
        if any(theirs != what for theirs, _ in told):
            values = {rank: theirs for rank, (theirs, _) in enumerate(told)}
            raise comm.mismatch(f"of {self.operation}", "what is done", values, "call the same on every rank")
        return [value for _, value in told]

    def let_go(self) -> None:
        """Nobody will be told anything more. The last rank that lets go of a file in place of the store removes it."""
        self._exchange = None

    def gather(self, text: str) -> list[str] | None:
        """On rank 0 every rank's text; None on the others, whom :meth:`tell` tells the outcome. For any thread."""
        if self._exchange is None:
            return [text]
        place, others = f"{self._place}/parts", range(1, self.size)
        if self.rank > 0:
            self._exchange.announce(place, text)
            return None
        texts = self._exchange.collect(place, self.operation, others)
        self._exchange.forget(place, others)
        return [text, *texts]

    def tell(self, text: str | None) -> str:
        """Rank 0's text, on every rank."""
        if self._exchange is None:
            return text or ""
        exchange, outcome, heard = self._exchange, f"{self._place}/outcome", f"{self._place}/heard"
        if self.rank > 0:
            (told,) = exchange.collect(outcome, self.operation, [0])
            exchange.announce(heard, True)
            return str(told)
        exchange.announce(outcome, text or "")
        with suppress(LtxError):  # rank 0 may end next, and the store with it
            others = range(1, self.size)
            exchange.collect(heard, self.operation, others, _HEARD_S)
            exchange.forget(outcome, [0])
            exchange.forget(heard, others)
        return text or ""
