"""Horovod's scaling: of sums, before and after, over several backward passes; and of learning rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch

from ltx import hooks
from ltx.errors import StrategyError
from ltx.gradients.reduction import BucketInput, Reduction
from ltx.optim.base import Optimizer
from ltx.optim.chain import Chain
from ltx.optim.from_torch import TorchOptimizer
from ltx.optim.partition import Partition

#: In the communication state: the sum of a parameter's gradients in the passes since the last update.
PASSES = "passes"


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
    def exact(self) -> bool:  # type: ignore[override]
        return self.hook.exact

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return self.hook.elementwise

    @property
    def reads_step(self) -> bool:  # type: ignore[override]
        return self.hook.reads_step

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*self.hook.state_names, PASSES) if self.passes else self.hook.state_names

    @property
    def bucket_factor(self) -> int:  # type: ignore[override]
        return self.hook.bucket_factor

    def at(self, step: int) -> hooks.CommHook:
        return replace(self, hook=self.hook.at(step))

    @property
    def constant_after(self) -> int | None:
        return self.hook.constant_after

    def phases_on(self, axis_size: int) -> int:
        return self.hook.phases_on(axis_size)

    def scale(self, axis_size: int) -> float:
        whole = self.hook.scale(axis_size) * axis_size
        if self.op == "sum":
            return whole
        return whole / (axis_size if self.predivide is None else self.predivide)

    def derivative_scale(self, axis_size: int) -> float:
        return self.hook.derivative_scale(axis_size) * (axis_size if self.op == "sum" else 1)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        narrow = self.hook.wire_dtype(dtype)
        return dtype if self.passes else narrow  # passes are added before anything is rounded

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


def _times(lr: Callable[[int], Any], factor: int, count: int) -> Any:
    return lr(count) * factor


@lru_cache(maxsize=64)
def with_scaled_lr(optimizer: Optimizer, factor: int) -> Optimizer:
    """`optimizer` with `factor` times its learning rate.

    Raises:
        StrategyError: it isn't one of torch's, whose learning rates are known.
    """
    match optimizer:
        case TorchOptimizer(cls=cls, lr=lr, kwargs=kwargs) if callable(lr) or "lr" in optimizer.kernel.group:
            scaled = partial(_times, lr, factor) if callable(lr) else optimizer.kernel.group["lr"] * factor
            return TorchOptimizer(cls, scaled, kwargs)
        case Chain(members=(*front, last)):
            return Chain((*front, with_scaled_lr(last, factor)))
        case Partition(members=members, labels=labels):
            return Partition(tuple((label, with_scaled_lr(member, factor)) for label, member in members), labels)
    raise StrategyError(
        "HorovodStrategy.scale_lr multiplies the learning rate of ltx.optim.from_torch's optimizers, which "
        f"{optimizer!r} isn't one of. Scale its rate yourself."
    )
