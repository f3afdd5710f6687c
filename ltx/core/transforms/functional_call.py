"""functional_call: torch.func's, with its tensors in place also while activation checkpointing recomputes.

Tensors are put into the module for the time of the call, as torch does. A copy of the module that holds them would be
simpler, but what refers to the original (a bound method, a patched forward, a list of layers) would use old parameters
without a word.

``torch.utils.checkpoint`` runs a function again in the backward pass. By then a functional call has given the module
its own tensors back, so the function would see those, and gradients would be wrong without a word. Torch has no place
to say what a second pass needs, so three of its classes are replaced by subclasses here. Outside of functional calls
and data-parallel steps these do what torch's do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch._C import _autograd
from torch.nn.utils import stateless
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook, _CheckpointFrame, checkpoint

from ltx.core.base import traced, tree
from ltx.core.base.arguments import brief
from ltx.core.base.errors import InputError, StepError, TreeError, UnsupportedError
from ltx.core.gradients.planning import in_step
from ltx.core.ranks.axis import axes_in_scope
from ltx.core.ranks.batched import unwrapped
from ltx.core.transforms.swap import Buffer, Members, Swap, placed, put, same_values, version_of


def functional_call(
    module: nn.Module,
    params_and_buffers: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    return_buffers: bool = False,
) -> Any:
    """Call a module with the given tensors in the places of its parameters and buffers.

    ``torch.func.functional_call``, and right where that is silently wrong: under activation checkpointing
    (``torch.utils.checkpoint``, ``gradient_checkpointing_enable()``) the second forward pass, in the backward pass,
    sees the given tensors as well. The module and the given tensors stay as they are.

    Args:
        module: any module. Tensors that aren't given are its own.
        params_and_buffers: a dict from names, as in ``module.named_parameters()`` and ``named_buffers()``, to tensors,
            or a tuple of such dicts.
        args: the module's positional arguments, a tuple; anything else is the only one.
        kwargs: its keyword arguments.
        tie_weights: a tensor that the module has under several names is replaced under all of them by the one that is
            given for one. If False, names that aren't given keep the module's own.
        return_buffers: for a module that updates buffers in its forward pass, such as batch norm in training: it
            writes to copies of the given ones, and the call gives ``(output, buffers)`` with their values after it.

    Returns:
        What the module returns, or ``(that, buffers)`` with `return_buffers`: a dict with the given buffers' names.

    Gradient:
        With respect to the given tensors, as through the module. With ``use_reentrant=True`` checkpoints run as with
        False, which have the same gradients. Where torch.func makes the graph (simulated ranks, second derivatives,
        :func:`ltx.grad` in a world of one, compiled steps) torch can't checkpoint: values are the same, and activations
        are kept.

    Raises:
        InputError: a name that the module doesn't have, is given twice, or different tensors for tied names.
        TreeError: `module` isn't a module, or something else than tensors is given.
        StepError: the module wrote to a given buffer without `return_buffers`, or to a buffer of its own.

    Example:
        >>> import torch, ltx
        >>> net = torch.nn.Linear(2, 1)
        >>> ltx.functional_call(net, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, torch.tensor([1.0, 2.0]))
        tensor([3.])
        >>> norm = torch.nn.BatchNorm1d(1)
        >>> params, buffers = dict(norm.named_parameters()), dict(norm.named_buffers())
        >>> y, buffers = ltx.functional_call(norm, (params, buffers), torch.ones(4, 1), return_buffers=True)
        >>> buffers["running_mean"], norm.running_mean
        (tensor([0.1000]), tensor([0.]))
    """
    given = _merged(params_and_buffers)
    args = args if isinstance(args, tuple) else () if args is None else (args,)
    kwargs = {} if kwargs is None else dict(kwargs)
    if traced.recording():
        _check_traceable(module)
        # There checkpoints are operators that have all they need as arguments.
        # Under torch.func, writes to given buffers that nobody takes raise; they would be lost in copies.
        taken = return_buffers or not torch._C._are_functorch_transforms_active()
        names = [name for name, _ in module.named_buffers(remove_duplicate=False) if name in given and taken]
        filled = {**given, **{name: given[name].clone() for name in names}}
        output = torch.func.functional_call(module, filled, args, kwargs, tie_weights=tie_weights)
        return (output, {name: filled[name] for name in names}) if return_buffers else output
    for name, flag in (("tie_weights", tie_weights), ("return_buffers", return_buffers)):
        if not isinstance(flag, bool):
            raise InputError(f"functional_call: {name} must be a bool, got {brief(flag)}.")
    members = Members(module)
    copied: dict[int, torch.Tensor] = {}  # of a buffer with several names there is one copy
    copies = {
        buffer.path: copied.setdefault(id(x), _copied(x))
        for buffer in members.buffers
        if isinstance(x := given.get(buffer.path), torch.Tensor)
    }
    tensors = members.untied({**given, **copies}, tie_weights)
    swap = Swap(members, tensors, {name: given[name] for name in copies})
    versions = {name: version_of(copy) for name, copy in copies.items()}
    values = {} if return_buffers else {name: _value(x, given[name], module.training) for name, x in copies.items()}
    own = [buffer for buffer in members.buffers if buffer.path not in tensors]
    with swap.in_place():
        output = module(*args, **kwargs)
    own_written(own, type(module).__name__)
    if return_buffers:
        # A copy on which the module itself has called requires_grad_() depends on nothing: no gradient goes on from it.
        after = {name: swap.after[name] for name in copies}
        return output, {name: x.detach() if x.is_leaf and x.requires_grad else x for name, x in after.items()}
    moved = (
        name for name, copy in copies.items() if swap.after[name] is not copy or version_of(copy) != versions[name]
    )
    written = next(moved, None) or _written({name: (copies[name], x) for name, x in values.items() if x is not None})
    if written is not None:
        raise StepError(
            f"functional_call: {type(module).__name__} wrote to {written!r}, a buffer that it was given, and what it "
            "wrote would be lost. Take it: output, buffers = ltx.functional_call(module, (params, buffers), "
            "inputs, return_buffers=True), and return the buffers from the step. Or leave them as they are: "
            "module.eval()."
        )
    return output


def refuse_max_norm(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            where = f"{path}.weight" if path else "weight"
            raise StepError(
                f"{where!r} of {type(module).__name__}: {type(part).__name__}(max_norm={part.max_norm}) renormalises, "
                "in place, the rows that this rank's batch looks up, so each rank would change other rows. Set "
                "max_norm=None and renormalise all rows in the step: w = params[...]; w = w * (max_norm / "
                "w.norm(dim=1, keepdim=True)).clamp(max=1)."
            )


@traced.at_trace_time
def _check_traceable(module: nn.Module) -> None:
    if not torch._C._are_functorch_transforms_active():
        return
    refuse_max_norm(module)
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            where = f", {path!r} of this {type(module).__name__}" if path else ""
            raise UnsupportedError(
                f"torch.compile can't trace the gradient of a {type(part).__name__}{where}. Don't compile the step; "
                "or compile parts of the module that have none, such as module.head = torch.compile(module.head)."
            )


def _merged(given: Any) -> dict[str, torch.Tensor]:
    dicts = [given] if isinstance(given, Mapping) else given
    if not isinstance(dicts, Sequence) or not all(isinstance(d, Mapping) for d in dicts):
        raise TreeError(f"functional_call takes a dict of tensors or a tuple of such dicts, got {brief(given)}.")
    merged: dict[str, torch.Tensor] = {}
    for part in dicts:
        for name, tensor in part.items():
            if not isinstance(name, str):
                raise TreeError(f"functional_call: names are strings, got {brief(name)}.")
            if name in merged:
                raise InputError(f"functional_call: {name!r} is in two of the dicts that it was given.")
            merged[name] = tensor
    return merged


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that can be written to, also with what differs among simulated ranks."""
    copied = tensor.clone()
    if torch._C._are_functorch_transforms_active():
        for axis in axes_in_scope():
            if (index := axis.ranks.batch_index(axis.size)) is not None:
                copied = torch.where(index >= 0, copied, copied)
    return copied


def _value(copy: torch.Tensor, given: torch.Tensor, training: bool) -> torch.Tensor | None:
    """What `copy` is, if it may be written to past torch's count of writes."""
    if torch._C._are_functorch_transforms_active():
        with torch._C._DisableFuncTorch():
            return unwrapped(copy).clone()
    return (
        given if training and copy.ndim == 1 and copy.is_floating_point() else None
    )  # as batch norm writes, in vectors


def _written(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> str | None:
    """The name of a tensor that isn't what it was, in pairs of what it is and was; the host waits for values once."""
    if not pairs or same_values(*zip(*((unwrapped(now), was) for now, was in pairs.values()), strict=True)):
        return None
    return next(name for name, (now, was) in pairs.items() if not same_values([unwrapped(now)], [was]))


def own_written(buffers: Sequence[Buffer], where: str) -> None:
    """Raise if one of `buffers`, which `where` says whose they are, isn't any more what it was.

    Raises:
        StepError: with its path, and what to write.
    """
    written = [buffer for buffer in buffers if buffer.written()]
    if not written:
        return
    given = tensors_in_place()  # by a call around this one, which looks after them
    for path, *_, tensor, _, _ in written:
        if id(tensor) not in given:
            raise StepError(own_buffer_text(f"{path!r} of {where}"))


def own_buffer_text(which: str) -> str:
    """What is wrong with a step that writes to a buffer of a module, and what to write."""
    return (
        f"{which}: the module wrote to this buffer of its own. It isn't part of any state, and each rank would have "
        "its own values. Pass buffers in and return them: train.init(params, dict(module.named_buffers())), and in the "
        "step (params, buffers, x) -> (loss, buffers) output, buffers = ltx.functional_call(module, (params, buffers), "
        "x, return_buffers=True). Statistics over all ranks: ltx.nn.convert_sync_batch_norm(module). Or leave them as "
        "they are: module.eval()."
    )


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
