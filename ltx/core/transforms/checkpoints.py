"""torch.utils.checkpoint runs a function again in the backward pass, with the tensors that modules had in the first.

Torch has no hook for this, so subclasses of three of its classes, which replace them, note at a checkpoint's beginning
which tensors running functional calls have put into modules. Since it begins in the midst of a call, this is right
where :class:`ltx.core.transforms.functional_call.Calls` has to refuse: for several sets of tensors, for buffers that
are half way (power iterations), and in whoever's backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.utils.checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook, _CheckpointFrame, checkpoint

from ltx.core.base import private
from ltx.core.gradients.planning import in_step
from ltx.core.transforms.closure_check import calls_of_torch, placed
from ltx.core.transforms.functional_call import running_again


def _run_again(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for a recomputation, in which modules have the tensors that they have now."""
    if private.in_transform():
        return fn  # under torch.func there is no recomputation
    swaps, inside = running_again(), in_step.get()
    if not (swaps or inside):
        return fn

    def again(*args: Any, **kwargs: Any) -> Any:
        token = in_step.set(inside)
        try:
            with ExitStack() as stack:
                for swap in swaps:
                    stack.enter_context(swap())
                return fn(*args, **kwargs)
        finally:
            in_step.reset(token)

    return again


class _Frame(_CheckpointFrame):
    def __init__(self, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any):
        super().__init__(_run_again(recompute_fn), *args, **kwargs)


class _Hook(_checkpoint_hook):
    """torch's hooks that drop the activations of a checkpointed call; off under torch.func, which forbids them."""

    def __enter__(self) -> None:
        self._off = private.in_transform() and (placed.get() or private.why_no_saved_hooks() is not None)
        if not self._off:
            super().__enter__()

    def __exit__(self, *args: object) -> None:
        if not self._off:
            super().__exit__(*args)


class _Reentrant(CheckpointFunction):
    """torch's checkpoint for ``use_reentrant=True``, which would differentiate down to the step's parameters by itself,
    past the reduction. In functional calls and steps that for ``use_reentrant=False`` replaces it.
    """

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if in_step.get() or placed.get() or calls_of_torch():
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
        return CheckpointFunction.apply(function, preserve, *args)


checkpointing._CheckpointFrame = _Frame  # type: ignore[misc]
checkpointing._checkpoint_hook = _Hook  # type: ignore[misc]
checkpointing.CheckpointFunction = _Reentrant  # type: ignore[misc]


@contextmanager
def checkpoints_allowed() -> Iterator[None]:
    """Let plain autograd below a transform hook saved tensors, though torch.func turns such hooks off."""
    if (message := private.why_no_saved_hooks()) is not None:
        private.enable_saved_hooks()
    try:
        yield
    finally:
        if message is not None:
            private.disable_saved_hooks(message)
