"""The arguments of :func:`ltx.data_parallel`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from ltx.arguments import brief, check_fields
from ltx.errors import StepError, StrategyError
from ltx.hooks import CommHook
from ltx.placements import Placements
from ltx.strategies import DEFAULT, Strategy
from ltx.strategies.base import in_dtype
from ltx.typing import Step

if TYPE_CHECKING:
    from ltx.transforms.precision import Precision


@dataclass(frozen=True)
class StepSettings:
    """The arguments of :func:`ltx.data_parallel`, each checked, and what became of them.

    Attributes:
        fn: the user's step.
        strategy: how gradients are reduced.
        argnums, axis, outputs, returns: as in :func:`ltx.data_parallel`.
        blocked: gradients stay local (:func:`ltx.block_backward_sync`).
        precision: that of :func:`ltx.mixed_precision`, or None.
        placements: how all parameters lie on meshes, for a caller that gives the step their local parts; None: the
            parameters themselves say.
    """

    fn: Step
    strategy: Strategy = DEFAULT
    argnums: int | tuple[int, ...] = 0
    axis: Any = None
    outputs: Literal["local", "mean"] = "local"
    returns: Literal["value", "grads"] = "value"
    blocked: bool = False
    precision: Precision | None = None
    placements: Placements | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, StepError, "argnums")
        if not callable(self.fn):
            raise StepError(f"data_parallel wraps a function, got {type(self.fn).__name__}.")
        if isinstance(self.fn, StepSettings):
            raise StepError(
                "this step is already data parallel, and would be averaged twice. Use dataclasses.replace(step, "
                "strategy=...) for another strategy."
            )
        if not isinstance(self.strategy, Strategy):
            raise StrategyError(
                f"strategy must be an ltx.Strategy such as ltx.DDPStrategy(), got {brief(self.strategy)}."
            )
        if self.outputs not in ("local", "mean"):
            raise StrategyError(f'outputs must be "local" or "mean", got {brief(self.outputs)}.')
        if self.returns not in ("value", "grads"):
            raise StrategyError(f'returns must be "value" or "grads", got {brief(self.returns)}.')
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            if hasattr(self.fn, name):
                object.__setattr__(self, name, getattr(self.fn, name))
        object.__setattr__(self, "__wrapped__", self.fn)

    def hook(self, step: int, training: bool = False) -> CommHook | None:
        """The reduction of the gradients of synchronised step `step`; `training`: in a whole training step."""
        if self.blocked:
            return None
        hook = self.strategy.hook_in_training(step) if training else self.strategy.hook(step)
        return in_dtype(hook, self.reduce_dtype)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return None if self.precision is None else self.precision.reduce
