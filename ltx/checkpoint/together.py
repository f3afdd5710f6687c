"""The ranks that save or load together: they meet in the store, and nothing of it goes over a channel."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ltx import wire
from ltx.axis import Axis, GroupBacking
from ltx.errors import LtxError, UnsupportedError

# How long rank 0 waits for the others to have heard what it tells them.
_HEARD_S = 10.0


class Together:
    """One call of a checkpoint's function, on all ranks of an axis.

    Args:
        operation: what is called.
        axis: as in :func:`ltx.psum`.

    Attributes:
        rank, size: this rank's place among how many.
    """

    def __init__(self, operation: str, axis: Any):
        found: Axis = wire.resolve(axis)
        if found.size > 1 and not isinstance(found.backing, GroupBacking):
            raise UnsupportedError(
                f"{operation}: the ranks of axis {found.name!r} are simulated, and simulated ranks have no files of "
                "their own. Call it outside of ltx.vmap, with the state of all of them."
            )
        self.operation = operation
        self.line: wire.Line | None = found.backing.line if isinstance(found.backing, GroupBacking) else None
        self.size = found.size
        self.rank = 0 if self.line is None else self.line.rank
        self._place = "" if self.line is None else self.line.notes.begin()
        self._meetings = 0

    def meet(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value`, which is JSON, on every rank. For the thread that trains.

        Raises:
            RankMismatchError: peers are at something else, or at another `what`.
        """
        if self.line is None:
            return [value]
        self._meetings += 1
        return self.line.meet_aside(f"{self._place}/{self._meetings}", wire.Signature(self.operation, (), what), value)

    def gather(self, text: str) -> list[str] | None:
        """On rank 0 every rank's text; None on the others, whom :meth:`tell` tells the outcome. For any thread."""
        if self.line is None:
            return [text]
        keys = [f"{self._place}/note/{rank}" for rank in range(1, self.size)]
        if self.rank > 0:
            self.line.notes.put(keys[self.rank - 1], text)
            return None
        texts = self.line.notes.take(keys, self.operation)
        self.line.notes.forget(keys)
        return [text, *texts]

    def tell(self, text: str | None) -> str:
        """Rank 0's text, on every rank."""
        if self.line is None:
            return text or ""
        notes, key = self.line.notes, f"{self._place}/told"
        heard = [f"{self._place}/heard/{rank}" for rank in range(1, self.size)]
        if self.rank > 0:
            (told,) = notes.take([key], self.operation)
            notes.put(heard[self.rank - 1], "")
            return told
        notes.put(key, text or "")
        with suppress(LtxError):  # rank 0 may end next, and the store with it
            notes.take(heard, self.operation, _HEARD_S)
            notes.forget([key, *heard])
        return text or ""
