"""Fields that several strategies have: what they may hold, and what they stand for."""

from __future__ import annotations

import math
from typing import Any

import torch

from ltx import hooks
from ltx.arguments import brief
from ltx.errors import StrategyError


def resolve_hook(strategy: Any, name: str, *besides: str) -> hooks.CommHook:
    """The hook in field `name`. Where that holds the name of a hook, it comes to hold the hook: they are equal.

    `besides`: names that it may hold too, which the strategy knows what to do with.
    """
    value = getattr(strategy, name)
    if isinstance(value, str) and value in hooks.NAMED:
        value = getattr(hooks, hooks.NAMED[value])()
        object.__setattr__(strategy, name, value)
    if not isinstance(value, hooks.CommHook):
        raise StrategyError(
            f"{type(strategy).__name__}.{name} must be one of {sorted((*hooks.NAMED, *besides))} or an "
            f"ltx.hooks.CommHook, got {brief(value)}."
        )
    return value


def check_number(strategy: Any, name: str, least: float, below: float = math.inf) -> None:
    """Raise unless field `name` is a number from `least` on and less than `below`."""
    value = getattr(strategy, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < below:
        allowed = f"of at least {least:g}" if below == math.inf else f"from {least:g} on, and less than {below:g}"
        raise StrategyError(f"{type(strategy).__name__}.{name} must be a number {allowed}, got {brief(value)}.")


def in_dtype(hook: hooks.CommHook | None, dtype: torch.dtype | None) -> hooks.CommHook | None:
    """`hook`, whose sums travel in `dtype`."""
    return hook if hook is None or dtype is None else hooks.cast(hook, dtype)
