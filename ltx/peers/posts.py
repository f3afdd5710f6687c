"""What ranks put into the store for their peers to compare, and what they say where it differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ltx.core.base.errors import RankMismatchError
from ltx.core.comm.signature import Signature, list_values, mismatch


@dataclass(frozen=True)
class Post:
    """A rank puts this into the store for its peers to compare: the signature of its next collective."""

    signature: Signature
    value: Any = None  # the rank's own value for its peers, as JSON
    caller: str = ""  # file and line of the call, known under ltx.debug_checks()
    issued: Mapping[str, int] = field(default_factory=dict)  # the number of issued buffers, by channels' addresses
    next_check: int = 0  # the number of the rank's next call under ltx.debug_checks()
    # the number of comparisons begun, by channels' addresses
    compared: Mapping[str, int] = field(default_factory=dict)

    @property
    def call(self) -> str:
        return f"{self.signature.brief} at {self.caller}" if self.caller else self.signature.brief

    def fields(self) -> list[Any]:
        issued, compared = dict(self.issued), dict(self.compared)
        return [self.signature.to_json(), self.value, self.caller, issued, self.next_check, compared]

    @staticmethod
    def of(fields: list[Any]) -> Post:
        signature, value, caller, issued, next_check, compared = fields
        return Post(Signature.from_json(signature), value, caller, issued, next_check, compared)


#: Operations that take tensors of different lengths.
_UNEVEN = {
    "all_gather": 'ltx.all_gather(x, tiled=True, splits="infer")',
    "all_to_all": 'ltx.all_to_all(x, ..., splits="infer")',
}


def list_calls(by_rank: Mapping[int, Post]) -> str:
    return list_values({rank: post.call for rank, post in by_rank.items()})


def explain_mismatch(axis_name: str, by_rank: dict[int, Signature]) -> RankMismatchError:
    operations = {rank: s.operation for rank, s in by_rank.items()}
    if len(set(operations.values())) > 1:
        return mismatch(axis_name, "the operation", operations, "call the same collectives in the same order")
    operation = next(iter(operations.values()))
    for path in dict.fromkeys(path for s in by_rank.values() for path, _ in s.leaves):
        values = {rank: dict(s.leaves).get(path, "no such leaf") for rank, s in by_rank.items()}
        if len(set(values.values())) > 1:
            fix = "give every rank the same tree, shapes and dtypes"
            if operation in _UNEVEN and len({value.partition("[")[0] for value in values.values()}) == 1:
                fix += f"; {_UNEVEN[operation]} takes unequal lengths"
            return mismatch(axis_name, f"{operation}, leaf {path!r}", values, fix)
    orders = {rank: str([path for path, _ in s.leaves]) for rank, s in by_rank.items()}
    if len(set(orders.values())) > 1:
        return mismatch(axis_name, f"{operation}, order of leaves", orders, "give every rank the same tree")
    statics = {rank: s.static for rank, s in by_rank.items()}
    return mismatch(axis_name, f"{operation}, its arguments", statics, "call it with the same arguments on every rank")
