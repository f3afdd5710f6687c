"""Optimizers as pairs of pure functions, ``init(params)`` and ``update(grads, state, params)``, as in optax."""

from __future__ import annotations

from ltx.core.optim.averages import EmaState, averaged, ema
from ltx.core.optim.base import LossState, Optimizer, TorchState, apply_updates, with_loss
from ltx.core.optim.combine import chain, from_functions, identity
from ltx.core.optim.from_torch import from_torch
from ltx.core.optim.grad_transforms import (
    ClipState,
    add_noise,
    clip_by_global_norm,
    clip_by_value,
    grad_norm,
    measure_global_norm,
)
from ltx.core.optim.partition import masked, partition
from ltx.core.optim.quantized_adam import qadam
from ltx.core.optim.schedules import adjust, adjustable, from_scheduler, linear, reduce_on_plateau, warmup_cosine

__all__ = [
    "ClipState",
    "EmaState",
    "LossState",
    "Optimizer",
    "TorchState",
    "add_noise",
    "adjust",
    "adjustable",
    "apply_updates",
    "averaged",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "ema",
    "from_functions",
    "from_scheduler",
    "from_torch",
    "grad_norm",
    "identity",
    "linear",
    "masked",
    "measure_global_norm",
    "partition",
    "qadam",
    "reduce_on_plateau",
    "warmup_cosine",
    "with_loss",
]


def __dir__() -> list[str]:
    return sorted(__all__)
