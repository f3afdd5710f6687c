"""Signatures: ranks must agree on them before any data moves.

A rank compares a new signature with its peers through the store, out of band, so that a disagreement is the same named
error on every rank rather than an abort (gloo) or a hang (NCCL). A signature that has been compared is known, and
costs a dictionary look-up where calls follow each other as they did before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ltx.core.base.errors import RankMismatchError
from ltx.core.base.tree import describe


@dataclass(frozen=True)
class Signature:
    """An operation with the shapes and dtypes of its tensors."""

    operation: str  # the operation's public name, such as "psum"
    leaves: tuple[tuple[str, str], ...]  # (path, dtype and shape) of each tensor, in order
    static: str = ""  # all other arguments that must be equal, as text

    @staticmethod
    def of(operation: str, paths: list[str], tensors: list[torch.Tensor], static: str = "") -> Signature:
        return Signature(operation, tuple((p, describe(t)) for p, t in zip(paths, tensors, strict=True)), static)

    @property
    def fingerprint(self) -> int:
        """A 60-bit number, the same in every process."""
        digest = hashlib.blake2b(self.to_json().encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 4

    @property
    def brief(self) -> str:
        """One line: "psum(w: float32[2], b: float32[3])"."""
        shown = [f"{path}: {what}" for path, what in self.leaves[:3]]
        if len(self.leaves) > 3:
            shown.append(f"{len(self.leaves) - 3} more")
        inside = ", ".join([*shown, *([self.static] if self.static else [])])
        return f"{self.operation}({inside})" if inside else self.operation

    def to_json(self) -> str:
        """Text for the store. JSON: nothing that a peer sends is ever unpickled."""
        return json.dumps([self.operation, self.leaves, self.static])

    @staticmethod
    def from_json(text: str) -> Signature:
        operation, leaves, static = json.loads(text)
        return Signature(operation, tuple((path, what) for path, what in leaves), static)


@dataclass(eq=False)
class Agreement:
    """A signature that is equal on all ranks, its fingerprint, and rank 0's offer."""

    signature: Signature
    fingerprint: int
    offer: Any
    plan: Any = field(default=None, repr=False)  # the plan that follows from them, once there is one


#: This stands for a collective that a rank has called and that raised before it was issued.
_RAISED = Signature("a call that raised an error", ())
RAISED = Agreement(_RAISED, _RAISED.fingerprint, None)


def mismatch(axis_name: str, what: str, values: Mapping[int, str], fix: str) -> RankMismatchError:
    return RankMismatchError(f"axis {axis_name!r}: ranks disagree on {what}: {list_values(values)}. Fix: {fix}.")


def list_values(values: Mapping[int, str]) -> str:
    """Each value with the ranks that have it: "ranks 0, 2: a; rank 1: b"."""
    counts: dict[str, list[int]] = {}
    for rank, value in values.items():
        counts.setdefault(value, []).append(rank)
    return "; ".join(f"rank{'s' if len(r) > 1 else ''} {_ranks(r)}: {value}" for value, r in counts.items())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


class Seen:
    """Sets of keys, one for each living function. Functions that can't be hashed or weakly referenced share one set;
    with `forgets` nothing is kept for them.
    """

    def __init__(self, forgets: bool = False) -> None:
        self._keys: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
        self._forgets = forgets

    def has(self, fn: Any, key: Hashable = None) -> bool:
        return key in self._of(fn)

    @property
    def has_any(self) -> bool:
        return bool(self._keys)

    def add(self, fn: Any, key: Hashable = None) -> None:
        self._of(fn).add(key)

    def _of(self, fn: Any) -> set[Hashable]:
        try:
            return self._keys.setdefault(fn, set())
        except TypeError:
            return set() if self._forgets else self._keys.setdefault(Seen, set())
