"""Noop, and the names of hooks that strategies accept in place of the hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ltx import hooks
from ltx.errors import StrategyError
from ltx.extend import AllReduce, BucketInput, CommHook, Packing, Reduction, Strategy, brief

NAMES = ("allreduce", "bf16", "fp16")
EXACT = AllReduce()


@dataclass(frozen=True)
class Noop(CommHook):
    """No communication, to measure the time of a step without it. Ranks use their own gradients.

    For training with local gradients use ``ltx.block_backward_sync``, whose derivatives are local too; derivatives of a
    step with Noop raise, since it isn't a mean over ranks. It is torch.distributed's ``noop_hook``.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.Noop())
        >>> ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(torch.tensor([1.0, 3.0]))
        tensor([1., 3.])
    """

    exact: ClassVar[bool] = False
    alike: ClassVar[bool] = False
    reach: ClassVar[str] = "element"
    sums: ClassVar[bool] = False

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return Packing(dtype, 1.0, None)

    def reduce(self, inputs: BucketInput) -> Reduction:
        return inputs.flat, inputs.states
        yield  # this makes a generator that requests nothing


def resolve_hook(strategy: Strategy, field: str, *besides: str) -> CommHook:
    """The hook in a strategy's `field`, where it replaces its name, so both compare equal. `besides`: other names."""
    value = getattr(strategy, field)
    if isinstance(value, str) and value in NAMES:
        value = EXACT if value == "allreduce" else getattr(hooks, value.upper())()
        object.__setattr__(strategy, field, value)
    if not isinstance(value, CommHook):
        raise StrategyError(
            f"{type(strategy).__name__}.{field} must be one of {sorted((*NAMES, *besides))} or an "
            f"ltx.hooks.CommHook, got {brief(value)}."
        )
    return value


def resolved(hook: str | CommHook) -> CommHook:
    """`hook`, in a field that :func:`resolve_hook` has resolved already."""
    assert isinstance(hook, CommHook)
    return hook
