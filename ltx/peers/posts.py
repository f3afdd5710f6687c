"""What ranks put into the store for their peers to compare, and what they say where it differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ltx.core.base.errors import LtxError, RankMismatchError, ReplicaDivergedError
from ltx.core.comm.channel import WHICH_CALL
from ltx.core.comm.signature import Signature, list_values, mismatch
from ltx.core.comm.step_summary import UNREDUCED, Said


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
        signature, *others = vars(self).values()
        return [signature.to_json(), *others]

    @staticmethod
    def of(fields: list[Any]) -> Post:
        return Post(Signature.from_json(fields[0]), *fields[1:])


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


_OF_GRAD = "the .grad that this backward pass adds to", "none", UNREDUCED
#: What ranks have where one has changed its state; where it hasn't; and the fix.
_OF_STATE = (
    "the state that this step takes",
    "as the step before gave it",
    "change a state (weights, a rate by ltx.optim.adjust) on all ranks alike, where all have the reason for it, as "
    "ltx.pmean(loss), and the values; or give all one rank's: train.broadcast(state, src)",
)


def explain_apart(axis_name: str, by_rank: Sequence[Said], late: bool) -> LtxError:
    """The error where ranks' digests differ, by what they have said of them; `late`: the host has gone on meanwhile."""
    axis = f"axis {axis_name!r}"
    applied = "Nothing of this step was applied."
    if late:
        applied = "What the step before this one made of them was applied: load a checkpoint."
    steps = {said.step for said in by_rank}
    if len(steps) > 1:
        at = ["in no train step" if said.step is None else f"at step {said.step}" for said in by_rank]
        each = "; ".join(f"rank {rank} is {where}" for rank, where in enumerate(at))
        return ReplicaDivergedError(
            f"{axis}: ranks are at different steps of the training: {each}. Gradients of different parameters have "
            f"no mean. {applied} Go on from one state on all ranks: train.broadcast(state), or a checkpoint."
        )
    if len({said.weighted for said in by_rank}) > 1:
        of = ["ltx.Weighted" if said.weighted else "a loss without a weight" for said in by_rank]
        fix = "return ltx.Weighted(total, weight) on all ranks, with weight 0 where one has no data, or on none"
        return mismatch(axis_name, "what the step returns", dict(enumerate(of)), fix)
    alone = {rank: said.raised for rank, said in enumerate(by_rank) if said.raised}
    if alone and len(alone) < len(by_rank):
        which = "; ".join(f"rank {rank} has left {what}" for rank, what in alone.items())
        return RankMismatchError(
            f"{axis}: {which}, unlike the others, and has gone on alone. {applied} Where a rank may leave a step "
            "out, let all ranks leave it out: compare a flag, ltx.psum(failed), before the next one."
        )
    what, usual, fix = _OF_STATE if steps - {None} else _OF_GRAD
    unreduced = {rank: said.unreduced or usual for rank, said in enumerate(by_rank)}
    if len(set(unreduced.values())) > 1 and len({said.issued for said in by_rank}) == 1:
        return mismatch(axis_name, what, unreduced, fix)
    return RankMismatchError(
        f"{axis}: ranks have issued different collectives, or the same ones in another order, since the last "
        f"synchronised step; the results since then are not to be trusted. {applied} {WHICH_CALL}"
    )
