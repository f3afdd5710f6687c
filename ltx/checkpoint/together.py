"""The ranks that save or load together: they meet in the store, and nothing of it goes over a channel.

Who saves because the store is gone meets in the folder of the checkpoints instead.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ltx import wire
from ltx.axis import Axis, GroupBacking
from ltx.errors import LtxError, StoreGoneError, UnsupportedError

# How long rank 0 waits for the others to have heard what it tells them.
_HEARD_S = 10.0


class Together:
    """One call of a checkpoint's function, on all ranks of an axis.

    Args:
        operation: what is called.
        folder: one that all ranks see. If the store is gone, they meet there.
        axis: as in :func:`ltx.psum`.

    Attributes:
        rank, size: this rank's place among how many.
    """

    def __init__(self, operation: str, axis: Any, folder: Path | None = None):
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
        self._folder = folder
        self._notes: wire.Notes | None = None if self.line is None else self.line.notes
        self._place = "" if self._notes is None else self._notes.begin()
        self._meetings = 0

    def meet(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value`, which is JSON, on every rank. For the thread that trains.

        Raises:
            RankMismatchError: peers are at something else, or at another `what`.
        """
        if self.line is None:
            return [value]
        self._meetings += 1
        place = f"{self._place}/{self._meetings}"
        try:
            return self.line.meet_aside(place, wire.Signature(self.operation, (), what), value)
        except StoreGoneError:
            if self._folder is None:
                raise
        self._folder.mkdir(parents=True, exist_ok=True)
        self._notes = self.line.notes_without_store(self._folder)
        self._notes.put(f"{place}/{self.rank}", json.dumps([what, value]))
        texts = self._notes.take([f"{place}/{rank}" for rank in range(self.size)], self.operation)
        told = [json.loads(text) for text in texts]
        if any(theirs != what for theirs, _ in told):
            values = {rank: theirs for rank, (theirs, _) in enumerate(told)}
            raise wire.mismatch(f"of {self.operation}", "what is done", values, "call the same on every rank")
        return [value for _, value in told]

    def let_go(self) -> None:
        """Nobody will be told anything more. What was met in instead of a store is gone with the last rank's hold."""
        self._notes = None

    def gather(self, text: str) -> list[str] | None:
        """On rank 0 every rank's text; None on the others, whom :meth:`tell` tells the outcome. For any thread."""
        if self._notes is None:
            return [text]
        keys = [f"{self._place}/note/{rank}" for rank in range(1, self.size)]
        if self.rank > 0:
            self._notes.put(keys[self.rank - 1], text)
            return None
        texts = self._notes.take(keys, self.operation)
        self._notes.forget(keys)
        return [text, *texts]

    def tell(self, text: str | None) -> str:
        """Rank 0's text, on every rank."""
        if self._notes is None:
            return text or ""
        notes, key = self._notes, f"{self._place}/told"
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
