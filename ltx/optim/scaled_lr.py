"""An optimizer with a multiple of its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from ltx.errors import StrategyError
from ltx.optim.base import Optimizer
from ltx.optim.chain import Chain
from ltx.optim.from_torch import TorchOptimizer
from ltx.optim.partition import Partition


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
