"""functional_call: torch.func's, with its tensors in place also while activation checkpointing recomputes.

Tensors are put into the module for the time of the call, as torch does. A copy of the module that holds them would be
simpler, but what refers to the original (a bound method, a patched forward, a list of layers) would use old parameters
without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ltx.core.base import traced
from ltx.core.base.arguments import brief
from ltx.core.base.errors import InputError, StepError, TreeError, UnsupportedError
from ltx.core.ranks.axis import axes_in_scope
from ltx.core.ranks.backings import unwrapped
from ltx.core.transforms.recompute import tensors_in_place
from ltx.core.transforms.swap import Buffer, Members, Swap, version_of


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
    kept = {} if return_buffers else {name: _Kept(copy, given[name], module.training) for name, copy in copies.items()}
    own = [buffer for buffer in members.buffers if buffer.path not in tensors]
    with swap.in_place():
        output = module(*args, **kwargs)
    own_written(own, type(module).__name__)
    if return_buffers:
        # A copy on which the module itself has called requires_grad_() depends on nothing: no gradient goes on from it.
        after = {name: swap.after[name] for name in copies}
        return output, {name: x.detach() if x.is_leaf and x.requires_grad else x for name, x in after.items()}
    for name, copy in kept.items():
        if copy.written(swap.after[name]):
            raise StepError(
                f"functional_call: {type(module).__name__} wrote to {name!r}, a buffer that it was given, and what it "
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
            if axis.simulated:
                copied = torch.where(axis.index() >= 0, copied, copied)
    return copied


class _Kept:
    """Whether a copy of a given buffer is written to from now on."""

    def __init__(self, copy: torch.Tensor, given: torch.Tensor, training: bool):
        self.copy, self.version = copy, version_of(copy)
        # Batch norm in training writes past the count of writes.
        self.value = given if training else None
        if torch._C._are_functorch_transforms_active():
            with torch._C._DisableFuncTorch():
                self.value = unwrapped(copy).clone()

    def written(self, now: torch.Tensor) -> bool:
        """Whether it was written to, or isn't in its place any more."""
        if now is not self.copy or version_of(now) != self.version:
            return True
        if self.value is None:
            return False
        with torch._C._DisableFuncTorch():
            a, b = unwrapped(now), self.value
            return not bool(((a == b) | ((a != a) & (b != b))).all())


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
