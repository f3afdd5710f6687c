"""Adasum in delta form: parameters go by the adaptive sum of what each rank's optimizer would add.

Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from ltx import hooks
from ltx.gradients.buckets import Bucket
from ltx.gradients.packing import plus, unpack
from ltx.gradients.reduction import BucketInput, LeafState, Reduced, Reduction, Terms
from ltx.optim.update import Update
from ltx.strategies.base import Strategy
from ltx.strategies.post_update import Old, PostUpdateHook, PostUpdateResult, communicate_after_update
from ltx.strategies.update import States, StepInfo, Updated

#: Where a parameter was before its move.
START = "start"


@dataclass(frozen=True)
class AdasumOfMoves(hooks.Adasum, PostUpdateHook):
    """The adaptive sum of moves, which the old parameters are moved by."""

    sign: ClassVar[int] = 1

    def reduce(self, inputs: BucketInput) -> Reduction:
        total, _ = yield from super().reduce(inputs)
        return total, ()

    def finish_bucket(self, bucket: Bucket, reduced: Reduced, old: Old) -> PostUpdateResult:
        moves = unpack(reduced[0], bucket)
        if old.may_overwrite:
            return PostUpdateResult(old.params, old.states, partial(_move, old.params, moves, self.sign))
        moved = [plus(p, move, self.sign) for p, move in zip(old.params, moves, strict=True)]
        return PostUpdateResult(moved, old.states)


@dataclass(frozen=True)
class AdasumOfWaysBack(AdasumOfMoves):
    """The adaptive sum of the ways back: from new parameters to where they were.

    It is that of the moves negated, to the bit, and packing takes one pass over both.
    """

    sign: ClassVar[int] = -1

    def begun(self, old: Old) -> list[LeafState]:
        return [{START: start} for start in old.params]

    def extra_terms(self, state: LeafState, axis_size: int) -> Terms:
        return [(state[START], 1.0)]

    def scale(self, axis_size: int) -> float:
        return -1.0


@torch.no_grad()
def _move(params: Sequence[torch.Tensor], moves: list[torch.Tensor], sign: int) -> None:
    torch._foreach_add_(list(params), moves, alpha=sign)


def moved_together(
    strategy: Strategy, short: torch.dtype | None, update: Update, states: States, info: StepInfo
) -> Updated:
    """Parameters moved by the adaptive sum of what this rank's optimizer would add, and its next state.

    `short`: the dtype that moves travel in, if not their own; `states`: the next communication state.
    """
    if info.axis.size == 1 or update.finite is False:
        return Updated(*update.apply(), states)
    hook: AdasumOfMoves
    if update.optimizer.moves_params:
        # The differences are formed while they are packed.
        given, opt_state = update.optimizer.apply(update.grads, update.opt_state, update.params)
        hook = AdasumOfWaysBack(short)
    else:
        given, opt_state = update.optimizer.update(update.grads, update.opt_state, update.params)
        hook = AdasumOfMoves(short)
    moved = communicate_after_update(strategy.exchange, hook, update, given, opt_state, states, info)
    kept = update.if_finite((moved.params, opt_state), (update.params, update.opt_state))
    return replace(moved, params=kept[0], opt_state=kept[1])
