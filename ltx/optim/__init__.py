"""Optimizers as pairs of pure functions, ``init(params)`` and ``update(grads, state, params)``, as in optax."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ltx.extend import arguments, optimizers

if TYPE_CHECKING:
    from ltx.optim.by_path import from_torch, masked, partition
    from ltx.optim.clipping import clip_by_global_norm, clip_by_value, measure_global_norm
    from ltx.optim.combine import chain, identity
    from ltx.optim.functions import from_functions
    from ltx.optim.quantized_adam import qadam
    from ltx.optim.schedules import adjust, adjustable, from_scheduler, warmup_cosine

ClipState = optimizers.ClipState
Optimizer = optimizers.Optimizer
TorchState = optimizers.TorchState
apply_updates = optimizers.apply_updates
grad_norm = optimizers.grad_norm

__all__ = ["ClipState", "Optimizer", "TorchState"]
__all__ += ["apply_updates", "chain", "from_functions", "from_torch", "identity", "masked", "partition", "qadam"]
__all__ += ["clip_by_global_norm", "clip_by_value", "grad_norm", "measure_global_norm"]
__all__ += ["adjust", "adjustable", "from_scheduler", "warmup_cosine"]

# Most programs need few of these, and making their dataclasses takes time: each module is imported at first use.
_LATER = {
    **dict.fromkeys(("from_torch", "masked", "partition"), "by_path"),
    **dict.fromkeys(("clip_by_global_norm", "clip_by_value", "measure_global_norm"), "clipping"),
    **dict.fromkeys(("chain", "identity"), "combine"),
    "from_functions": "functions",
    "qadam": "quantized_adam",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise arguments.lacks(f"module {__name__!r}", name)
    return getattr(import_module(f"{__name__}.{_LATER.get(name, 'schedules')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
