"""The names that strategies take in place of a hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ltx import hooks
from ltx.core.base.arguments import brief
from ltx.core.gradients.comm_hook import CommHook
from ltx.errors import StrategyError

if TYPE_CHECKING:
    from ltx.core.transforms.strategy import Strategy

NAMES = ("allreduce", "bf16", "fp16")


def named_hook(name: str) -> CommHook:
    """The hook of one of :data:`NAMES`."""
    return hooks.AllReduce() if name == "allreduce" else hooks.FP16() if name == "fp16" else hooks.BF16()


def resolve_hook(strategy: Strategy, field: str, *besides: str) -> CommHook:
    """The hook in a strategy's `field`. Where that holds the name of a hook, it comes to hold the hook: they are equal.

    `besides`: names that it may hold too, which the strategy knows what to do with.
    """
    value = getattr(strategy, field)
    if isinstance(value, str) and value in NAMES:
        value = named_hook(value)
        object.__setattr__(strategy, field, value)
    if not isinstance(value, CommHook):
        raise StrategyError(
            f"{type(strategy).__name__}.{field} must be one of {sorted((*NAMES, *besides))} or an "
            f"ltx.hooks.CommHook, got {brief(value)}."
        )
    return value
