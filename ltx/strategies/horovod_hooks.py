"""What Horovod's strategy does with buckets: sums scaled before and after, and Adasum in delta form.

A scaled sum may run over several backward passes. In delta form parameters go by the adaptive sum of what each rank's
optimizer would add (Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import ClassVar, Literal

import torch

from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import (
    Bucket,
    BucketInput,
    LeafState,
    Old,
    Optimizer,
    PostUpdateHook,
    PostUpdateResult,
    Reduced,
    Reduction,
    States,
    StepInfo,
    Strategy,
    Terms,
    Update,
    Updated,
    around,
    communicate_after_update,
    unpack,
    wide,
)

#: In the communication state: the sum of a parameter's gradients in the passes since the last update.
PASSES = "passes"


@around("hook")
@dataclass(frozen=True)
class Scaled(hooks.CommHook):
    """`hook`, by Horovod's scales and for the gradients of several passes.

    Attributes:
        hook: what is done to the shares.
        op: "sum" doesn't divide by n.
        predivide: the mean is divided by this before the sum, and by n / predivide after it; None: by n before it.
        passes: whether the gradients of earlier passes, which the communication state holds, are added.
    """

    hook: hooks.CommHook
    op: Literal["average", "sum"] = "average"
    predivide: float | None = None
    passes: bool = False

    @property
    def gives_gradients(self) -> bool:  # type: ignore[override]
        return self.hook.gives_gradients and not self.passes  # which no scale has multiplied

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*self.hook.state_names, PASSES) if self.passes else self.hook.state_names

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        passes = {PASSES: torch.zeros_like(param, dtype=wide(param.dtype))} if self.passes else {}
        return {**self.hook.init(param, path), **passes}

    def at(self, step: int) -> hooks.CommHook:
        return replace(self, hook=self.hook.at(step))

    def cast(self, dtype: torch.dtype) -> hooks.CommHook:
        return replace(self, hook=hooks.cast(self.hook, dtype))

    def scale(self, axis_size: int) -> float:
        whole = self.hook.scale(axis_size) * axis_size
        if self.op == "sum":
            return whole
        return whole / (axis_size if self.predivide is None else self.predivide)

    def derivative_scale(self, axis_size: int) -> float:
        return self.hook.derivative_scale(axis_size) * (axis_size if self.op == "sum" else 1)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        narrow = self.hook.wire_dtype(dtype)
        # Passes are added before anything is rounded.
        return wide(dtype) if self.passes else narrow

    def reduce(self, inputs: BucketInput) -> Reduction:
        dtype, states, flat = inputs.bucket.dtype, inputs.states, inputs.flat
        if self.passes:
            earlier = torch.cat([state[PASSES].reshape(-1) for state in states])
            flat = (flat + earlier * self.scale(inputs.axis_size)).to(self.hook.wire_dtype(dtype))
            states = [{name: x for name, x in state.items() if name != PASSES} for state in states]
        total, after = yield from self.hook.reduce(replace(inputs, flat=flat, states=states))
        if self.passes:
            zeros = [torch.zeros_like(state[PASSES]) for state in inputs.states]
            after = [{**state, PASSES: zero} for state, zero in zip(after, zeros, strict=True)]
        if self.predivide is not None:
            total = total.to(dtype) * (self.predivide / inputs.axis_size)
        return total, after


@lru_cache(maxsize=64)
def with_scaled_lr(optimizer: Optimizer, factor: int) -> Optimizer:
    """`optimizer` with `factor` times its learning rate.

    Raises:
        StrategyError: it isn't one of torch's, whose learning rates are known.
    """
    scaled = optimizer.times_lr(factor)
    if scaled is None:
        raise StrategyError(
            "HorovodStrategy.scale_lr multiplies the learning rate of ltx.optim.from_torch's optimizers, which "
            f"{optimizer!r} isn't one of. Scale its rate yourself."
        )
    return scaled


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
        moved = [torch.sub(p, move, alpha=-self.sign) for p, move in zip(old.params, moves, strict=True)]
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
