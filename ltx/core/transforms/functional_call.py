"""functional_call: as torch.func's, but its tensors are also in place while activation checkpointing recomputes.

The tensors are in the module for the time of the call, as with torch. To call a copy of the module would be simpler,
but bound methods, patched forwards and lists of layers refer to the original, and would use its old parameters.

``torch.utils.checkpoint`` runs a function again in the backward pass. By then a functional call has given the module
its own tensors back, so the function would use these, and gradients would be silently wrong. Torch has no hook for
this, so three of its classes are replaced by subclasses here. When a checkpoint begins, they note which tensors
functional calls of ltx (and in a step, of torch) have put into modules. Otherwise they do what torch's classes do.

We also tried to leave the tensors in the module until the backward pass has ended (torch 2.13). That works for one call
of a module in a step that owns its backward pass. It is wrong for two calls with different tensors (a teacher, an inner
loop), for buffers that the first pass has written (power iterations, batch norm), and after ``step(params)`` with a
later backward pass, or none: the module would keep the step's parameters, even after errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.nn.utils import stateless
from torch.nn.utils._named_member_accessor import NamedMemberAccessor
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook, _CheckpointFrame, checkpoint

from ltx.core.base import private, traced
from ltx.core.base.arguments import brief
from ltx.core.base.errors import InputError, StepError, TreeError, UnsupportedError
from ltx.core.base.private import unwrapped
from ltx.core.gradients.planning import in_step
from ltx.core.ranks.axis import axes_in_scope
from ltx.core.transforms.closure_check import Members, own_written, refuse_max_norm, same_values, version_of


def functional_call(
    module: nn.Module,
    params_and_buffers: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    return_buffers: bool = False,
) -> Any:
    """Call a module with the given tensors in place of its parameters and buffers.

    A module of torch has its own parameters; a step of ltx gets them as a dict from names to tensors, such as
    ``dict(model.named_parameters())``. ``ltx.functional_call(model, params, (x,))`` is ``model(x)`` with `params`.

    Unlike ``torch.func.functional_call``, it is also right under activation checkpointing
    (``torch.utils.checkpoint``, ``gradient_checkpointing_enable()``): the second forward pass, which runs in the
    backward pass, gets the given tensors too. The module and the given tensors don't change.

    Args:
        module: any module. It uses its own tensors where none are given.
        params_and_buffers: a dict from names, as in ``module.named_parameters()`` and ``named_buffers()``, to tensors,
            or a tuple of such dicts.
        args: a tuple of the module's positional arguments, or a single argument that isn't a tuple.
        kwargs: the module's keyword arguments.
        tie_weights: if a tensor has several names in the module, and one of them is given, all names get the given
            tensor. If False, names that aren't given keep the module's tensor.
        return_buffers: for a module that updates buffers in its forward pass, such as batch norm in training: it
            writes to copies of the given buffers, and the call returns ``(output, buffers)`` with the new values.

    Returns:
        The module's output; with `return_buffers` ``(output, buffers)``, a dict with the names of the given buffers.

    Gradient:
        With respect to the given tensors, as through the module. Checkpoints with ``use_reentrant=True`` run as if it
        were False, with the same gradients. If torch.func makes the graph (simulated ranks, second derivatives,
        :func:`ltx.grad` in a world of one, compiled steps), torch can't checkpoint: values are the same, but
        activations are kept.

    Raises:
        InputError: the module doesn't have a name, or it is parametrized, or is given twice; or tied names get
            different tensors.
        TreeError: `module` isn't a module, or something that isn't a tensor is given.
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
        tied, buffers = _look_at_trace_time(module)
        # In a graph, checkpoints are operators that get all their tensors as arguments. Under torch.func, writes to
        # given buffers raise without return_buffers; in copies the writes would be lost silently.
        taken = return_buffers or not private.in_transform()
        names = [name for name in buffers if name in given and taken]
        filled = {**given, **{name: given[name].clone() for name in names}}
        output = torch.func.functional_call(module, filled, args, kwargs, tie_weights=tied and tie_weights)
        return (output, {name: filled[name] for name in names}) if return_buffers else output
    for name, flag in (("tie_weights", tie_weights), ("return_buffers", return_buffers)):
        if not isinstance(flag, bool):
            raise InputError(f"functional_call: {name} must be a bool, got {brief(flag)}.")
    members = Members(module)
    copied: dict[int, torch.Tensor] = {}  # a buffer with several names has one copy
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
    own_written(own, type(module).__name__, tensors_in_place)
    if return_buffers:
        # If the module itself called requires_grad_() on a copy, that is a leaf, and no gradient may go on from it.
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


@traced.at_trace_time
def _look_at_trace_time(module: nn.Module) -> tuple[bool, tuple[str, ...]]:
    """Whether tensors have several names in `module`, and its buffers' names. Raises if it can't be traced."""
    members = Members(module)
    found = bool(members.tied), tuple([buffer.path for buffer in members.buffers])
    if not private.in_transform():
        return found
    refuse_max_norm(module)
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            where = f", {path!r} of this {type(module).__name__}" if path else ""
            raise UnsupportedError(
                f"torch.compile can't trace the gradient of a {type(part).__name__}{where}. Don't compile the step; "
                "or compile parts of the module that have none, such as module.head = torch.compile(module.head)."
            )
    return found


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
    """A copy of a tensor, to which also simulated ranks can write different values."""
    copied = tensor.clone()
    if private.in_transform():
        for axis in axes_in_scope():
            if (index := axis.ranks.batch_index(axis.size)) is not None:
                copied = torch.where(index >= 0, copied, copied)
    return copied


def _value(copy: torch.Tensor, given: torch.Tensor, training: bool) -> torch.Tensor | None:
    """The value of `copy`, if it is a buffer to which batch norm may write without torch counting the write."""
    if private.in_transform():
        with private.below_transforms():
            return unwrapped(copy).clone()
    return (
        given if training and copy.ndim == 1 and copy.is_floating_point() else None
    )  # as batch norm writes, in vectors


def _written(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> str | None:
    """The name of a tensor that has changed, or None. `pairs`: {name: (value now, value before)}."""
    if not pairs or same_values(*zip(*((unwrapped(now), was) for now, was in pairs.values()), strict=True)):
        return None
    return next(name for name, (now, was) in pairs.items() if not same_values([unwrapped(now)], [was]))


# --- tensors in places ------------------------------------------------------------------------------------------------

#: The calls of ltx.functional_call that run in this thread, the outermost first.
_placed: ContextVar[tuple[Swap, ...]] = ContextVar("_placed", default=())


class Swap:
    """Replaces a module's tensors by others during a call.

    `tensors`: {name: tensor}, with all tied names. `before`: the given values of buffers whose copies are put in.
    """

    def __init__(self, members: Members, tensors: dict[str, torch.Tensor], before: Mapping[str, torch.Tensor]):
        self.members = members
        self.tensors = tensors
        self.after: dict[str, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}
        # Parametrized tensors aren't kept in a dict of the module.
        self._parametrized, self._others = NamedMemberAccessor(members.module), dict[str, torch.Tensor]()
        # For each buffer: the tensor, the count of writes to it, and its value at that count.
        self._kept = {name: (tensors[name], version_of(tensors[name]), value) for name, value in before.items()}

    @classmethod
    def of_call(cls, module: nn.Module, given: Mapping[str, torch.Tensor]) -> Swap:
        """A swap that repeats a running functional_call of torch: the tensors of `given` that `module` now holds."""
        members, ids = Members(module), {id(x) for x in given.values()}
        tensors = {path: x for path, (kept_in, key) in members.slots.items() if id(x := kept_in[key]) in ids}
        return cls(members, tensors, {b.path: b.tensor.clone() for b in members.buffers if b.path in tensors})

    def _put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        slots = self.members.slots
        self._others, _ = self._parametrized.swap_tensors_dict({k: x for k, x in tensors.items() if k not in slots})
        for name, tensor in tensors.items():
            if name in slots:
                kept_in, key = slots[name]
                self._own[name] = kept_in[key]
                kept_in[key] = tensor

    def _take_out(self) -> dict[str, torch.Tensor]:
        """Put the module's own tensors back. Returns the tensors that were in their places, by name."""
        held = {}
        for name, tensor in self._own.items():
            kept_in, key = self.members.slots[name]
            held[name] = kept_in[key]
            kept_in[key] = tensor
        return held | self._parametrized.swap_tensors_dict(self._others)[0]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the tensors into the module for the block, then put its own tensors back."""
        module, slots = self.members.module, self.members.slots
        token = _placed.set((*_placed.get(), self))
        lost: list[str] = []
        try:
            self._put(self.tensors)
            try:
                yield
            finally:
                self.after = {name: slots[name][0][slots[name][1]] for name in self._kept}
                now = {name: slots[name][0].get(slots[name][1]) for name in self._own}
                lost = [name for name, was in self._own.items() if now[name] is was is not self.tensors[name]]
        finally:
            _placed.reset(token)
            self._take_out()
        if lost:
            raise UnsupportedError(
                f"functional_call: {type(module).__name__} lost the {lost[0]!r} that it was given, during the call. "
                "Two threads called it at a time: give each a module of its own (copy.deepcopy)."
            )

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """A function that puts the tensors in again, for the recomputation of a part of this call.

        Buffers begin with the values that they have now. What the recomputation writes to them is dropped, since the
        first pass has written it already.
        """
        if not self._kept:
            return self.in_place
        # Batch norm counts its calls in one buffer, and writes to its other buffers without torch counting it.
        found = {name: kept_in[key] for name in self._kept for kept_in, key in [self.members.slots[name]]}
        written = {
            _module_of(name)
            for name, (tensor, version, _) in self._kept.items()
            if found[name] is not tensor or version_of(tensor) != version
        }
        for name, tensor in found.items():
            if _module_of(name) in written:
                self._kept[name] = tensor, version_of(tensor), tensor.detach().clone()
        now = dict(self._kept)

        def in_place() -> AbstractContextManager[None]:
            copies: dict[int, torch.Tensor] = {}
            buffers = {}
            for name, (tensor, version, value) in now.items():
                constant = not tensor.is_floating_point() and version_of(tensor) == version
                buffers[name] = tensor if constant else copies.setdefault(id(tensor), value.clone())
            return Swap(self.members, {**self.tensors, **buffers}, buffers).in_place()

        return in_place


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def set_placed_aside() -> Callable[[], None]:
    """Put modules' own tensors back, for the time in which another rank of this process runs.

    The returned function puts the tensors of this thread's running functional calls in again.
    """
    held = [(swap, swap._take_out()) for swap in reversed(_placed.get())]

    def undo() -> None:
        for swap, tensors in reversed(held):
            swap._put(tensors)

    return undo


def tensors_in_place() -> set[int]:
    """The ids of tensors that running functional calls, of ltx and torch, have put into modules."""
    ids = {id(x) for swap in _placed.get() for x in swap.tensors.values()}
    return ids.union(*({id(x) for x in call.tensors.values()} for call in _calls()[0]))


def functional_calls_of_torch() -> list[nn.Module]:
    """The modules of the calls of torch.func.functional_call that run in this thread."""
    return [call.module for call in _calls()[0]]


class _Call(NamedTuple):
    """A running call of torch.func.functional_call. `for_ltx`: whether ltx.functional_call made it."""

    module: nn.Module
    tensors: Mapping[str, torch.Tensor]
    for_ltx: bool


def _calls() -> tuple[list[_Call], bool]:
    """(the functional calls of torch that run in this thread, whether a data-parallel step runs).

    They are found on the stack, since parts of a compiled function that can't be compiled don't set `in_step`.
    """
    found, inside = [], in_step.get()
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code  # Dynamo makes a code object of the same name and file, but not the same object
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
    """`fn` for a recomputation, in which modules have the tensors that they have now."""
    if private.in_transform():
        return fn  # under torch.func there is no recomputation
    calls, inside = _calls()
    swaps = [swap.again() for swap in _placed.get()]
    swaps += [Swap.of_call(call.module, call.tensors).again() for call in calls if inside or call.for_ltx]
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


# --- torch's three classes -------------------------------------------------------------------------------------------


class _Frame(_CheckpointFrame):
    def __init__(self, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any):
        super().__init__(_run_again(recompute_fn), *args, **kwargs)


class _Hook(_checkpoint_hook):
    """torch's hooks that drop the activations of a checkpointed call; off under torch.func, which forbids them."""

    def __enter__(self) -> None:
        refused = private.why_no_saved_hooks() is not None
        self._off = private.in_transform() and (refused or bool(_placed.get()))
        if not self._off:
            super().__enter__()

    def __exit__(self, *args: object) -> None:
        if not self._off:
            super().__exit__(*args)


class _Reentrant(CheckpointFunction):
    """torch's checkpoint for ``use_reentrant=True``.

    It would differentiate down to the step's parameters by itself, past the reduction, and tensors that it closes over
    would silently get no gradient. Inside ltx.functional_call and data-parallel steps the checkpoint for
    ``use_reentrant=False`` replaces it, with the same gradients.
    """

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        calls, inside = _calls()
        if _placed.get() or inside or any(call.for_ltx for call in calls):
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
        return CheckpointFunction.apply(function, preserve, *args)


checkpointing._CheckpointFrame = _Frame  # type: ignore[misc]
checkpointing._checkpoint_hook = _Hook  # type: ignore[misc]
checkpointing.CheckpointFunction = _Reentrant  # type: ignore[misc]


@contextmanager
def checkpoints_allowed() -> Iterator[None]:
    """Let plain autograd below a transform hook saved tensors, though torch.func turns such hooks off."""
    message = private.why_no_saved_hooks()
    if message is None:
        yield
        return
    private.enable_saved_hooks()
    try:
        yield
    finally:
        private.disable_saved_hooks(message)
