"""Activation checkpointing inside functional calls: the second forward pass sees the tensors of the first.

``torch.utils.checkpoint`` runs a function again in the backward pass. By then a functional call has given the module
its own tensors back, so the function would see those, and gradients would be wrong without a word. Torch has no place
to say what a second pass needs, so three of its classes are replaced by subclasses here. Outside of functional calls
and data-parallel steps these do what torch's do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch._C import _autograd
from torch.nn.utils import stateless
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook, _CheckpointFrame, checkpoint

from ltx.core.base import tree
from ltx.core.base.errors import StepError
from ltx.core.gradients.planning import in_step
from ltx.core.transforms.swap import Swap, placed, put


def tensors_in_place() -> set[int]:
    """The ids of tensors that functional calls under way, ltx's and torch's, have put into modules."""
    ids = {id(x) for swap in placed.get() for x in swap.tensors.values()}
    return ids.union(*({id(x) for x in call.tensors.values()} for call in _calls()[0]))


def functional_calls_of_torch() -> list[nn.Module]:
    """The modules of torch.func.functional_call that are under way in this thread."""
    return [call.module for call in _calls()[0]]


class _Call(NamedTuple):
    """A torch.func.functional_call under way. `for_ltx`: ltx.functional_call called it."""

    module: nn.Module
    tensors: Mapping[str, torch.Tensor]
    for_ltx: bool


def _calls() -> tuple[list[_Call], bool]:
    """What runs in this thread: functional calls of torch, and whether a data-parallel step does.

    Found on the stack. Where a part of a compiled function can't be compiled, it runs in branches for graphs.
    """
    found, inside = [], in_step.get()
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code  # Dynamo makes another of the same name
        if code.co_name == _CALL.co_name and code.co_filename == _CALL.co_filename:
            caller = frame.f_back.f_back
            for_ltx = caller is not None and caller.f_globals.get("__name__") == "ltx.core.transforms.functional_call"
            found.append(_Call(frame.f_locals["module"], frame.f_locals["parameters_and_buffers"], for_ltx))
        elif code.co_name == "run" and frame.f_globals.get("__name__") == "ltx.core.transforms.data_parallel":
            inside = True
        frame = frame.f_back
    return found, inside


_CALL = stateless._functional_call.__code__


def _run_again(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, for a second pass, with the tensors that modules hold now."""
    if torch._C._are_functorch_transforms_active():
        return fn  # there is no second pass
    calls, inside = _calls()
    if not (calls or inside or placed.get()):
        return fn
    swaps = [swap.again() for swap in placed.get()]
    swaps += [Swap.of_call(call.module, call.tensors).again() for call in calls if call.for_ltx]
    stale = [Swap.of_call(call.module, call.tensors) for call in calls if inside and not call.for_ltx]

    def again(*args: Any, **kwargs: Any) -> Any:
        token = in_step.set(inside)
        try:
            with ExitStack() as stack:
                for swap in swaps:
                    stack.enter_context(swap())
                for call in stale:
                    stack.enter_context(_refused(call))
                return fn(*args, **kwargs)
        finally:
            in_step.reset(token)

    return again


# --- torch's three classes -------------------------------------------------------------------------------------------


class _Frame(_CheckpointFrame):
    """A checkpointed call."""

    def __init__(self, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any):
        super().__init__(_run_again(recompute_fn), *args, **kwargs)


class _Hook(_checkpoint_hook):
    """What makes a checkpointed call forget its activations; not under torch.func, which has no such hooks."""

    def __enter__(self) -> None:
        refused = _autograd._saved_tensors_hooks_get_disabled_error_message() is not None
        self._off = torch._C._are_functorch_transforms_active() and (refused or bool(placed.get()))
        if not self._off:
            super().__enter__()

    def __exit__(self, *args: object) -> None:
        if not self._off:
            super().__exit__(*args)


class _Reentrant(CheckpointFunction):
    """``use_reentrant=True``.

    Its backward pass would differentiate down to the step's parameters on its own, past the reduction; and for what it
    closes over there would be no gradient, without a word. Inside ltx.functional_call and data-parallel steps the other
    kind runs in its place, which has the same gradients.
    """

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        calls, inside = _calls()
        if placed.get() or inside or any(call.for_ltx for call in calls):
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
        passes = iter([function])
        again = _run_again(function)
        return CheckpointFunction.apply(lambda *xs: next(passes, again)(*xs), preserve, *args)


checkpointing._CheckpointFrame = _Frame  # type: ignore[misc]
checkpointing._checkpoint_hook = _Hook  # type: ignore[misc]
checkpointing.CheckpointFunction = _Reentrant  # type: ignore[misc]


@contextmanager
def checkpoints_allowed() -> Iterator[None]:
    """For plain autograd below a transform: it may have hooks of saved tensors, which torch.func turns off."""
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is None:
        yield
        return
    _autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        _autograd._saved_tensors_hooks_disable(message)


# --- torch.func.functional_call --------------------------------------------------------------------------------------


class _Stale(torch.Tensor):
    """In the place of a tensor that a second pass may not use."""

    message: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stale = [x for x in tree.flatten((args, kwargs))[0] if isinstance(x, _Stale)]
        raise StepError(stale[0].message)


@contextmanager
def _refused(call: Swap) -> Iterator[None]:
    """Let whoever uses a tensor of the module raise, unless it is still the one that `call` was given."""
    standing: dict[int, torch.Tensor] = {}  # one for each tensor, so that tied names stay tied
    stale = {}
    for name, given in call.tensors.items():
        kept_in, key = call.members.slots[name]
        if (own := kept_in[key]) is not given:
            stale[name] = standing.setdefault(id(own), _stale(call.members.module, name))
    with put(call.members, stale):
        yield


def _stale(module: nn.Module, name: str) -> _Stale:
    made = torch.empty((), device="meta").as_subclass(_Stale)
    made.message = (
        f"{name!r} of {type(module).__name__}: activation checkpointing runs the forward pass again in the backward "
        "pass, and torch.func.functional_call has put the module's own parameters back by then, so the gradients "
        "would be those of other parameters. Write ltx.functional_call(module, params, inputs) in the step: it takes "
        "the same arguments, and its parameters are in place in the second pass too."
    )
    return made
