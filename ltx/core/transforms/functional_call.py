"""functional_call: as torch.func's, but its tensors are also in place where a backward pass calls a module again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ltx.core.base import private, traced
from ltx.core.base.arguments import brief
from ltx.core.base.errors import InputError, TreeError, UnsupportedError
from ltx.core.transforms.calls_again import record, recording_calls
from ltx.core.transforms.closure_check import Members, refuse_max_norm
from ltx.core.transforms.swap import Swap
from ltx.typing import Tree


def functional_call(
    module: nn.Module,
    params_and_buffers: Tree,
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
            a tuple of such dicts, or an :class:`ltx.TrainState`.
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
        :func:`ltx.grad` in a world of one, compiled steps), torch keeps activations instead: values are the same.

    Raises:
        InputError: the module doesn't have a name, or it is parametrized, or given twice; or tied names differ.
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
    if not isinstance(kwargs, Mapping | None):
        raise InputError(
            f"functional_call: kwargs is a dict of keyword arguments, got {brief(kwargs)}. Several positional "
            "arguments are a tuple: ltx.functional_call(module, params, (x, y))."
        )
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
    swap = Swap.of_call(module, given, "functional_call", tie_weights, return_buffers)
    with swap.in_place():
        output = module(*args, **kwargs)
    record(swap.tensors, partial(Swap, swap.members, first=swap.first), output)
    after = swap.done(return_buffers)
    return (output, after) if return_buffers else output


@contextmanager
def using(*modules: Any) -> Iterator[None]:
    """In the block, modules compute with the given tensors, whatever of their methods is called.

    ``with ltx.using(model, params):`` is for what one call of a module can't be: ``flow(x).log_prob(y)``,
    ``elbo(model, guide)``, a criterion with weights of its own. :func:`ltx.functional_call` is this for one call, and
    says what holds for both. Buffers that the block writes to raise; that function returns them.

    Args:
        modules: a module and its tensors, as :func:`ltx.functional_call` takes them, or several such pairs:
            ``ltx.using((encoder, params["encoder"]), (loss, params["loss"]))``.

    Raises:
        InputError: as :func:`ltx.functional_call`; or a module is given twice, or inside of another one.
        UnsupportedError: in a compiled graph.

    Example:
        >>> import torch, ltx
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> with ltx.using(net, {"weight": torch.full((1, 1), 2.0)}):
        ...     net(net(torch.ones(1)))
        tensor([4.])
    """
    if traced.recording():
        traced.refuse("torch.compile can't trace ltx.using. Call ltx.functional_call in what is compiled.")
    pairs = (modules,) if modules and isinstance(modules[0], nn.Module) else modules
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TreeError(f"using takes a module and its tensors, or several such pairs, got {brief(modules)}.")
    swaps = [Swap.of_call(module, _merged(given), "using") for module, given in pairs]
    parts = [id(part) for swap in swaps for part in swap.members.module.modules()]
    if len(parts) > len({*parts}):
        raise InputError("using: a module is given twice, or is a part of another one. Give the outer one alone.")
    records = [record(swap.tensors, partial(Swap, swap.members, first=swap.first)) for swap in swaps]

    def watch(_: Any, __: Any, output: Any) -> None:
        for calls in filter(None, records):
            calls.watch(output)

    with ExitStack() as stack:
        for swap in swaps:
            stack.enter_context(swap.in_place())
        if any(records) and recording_calls.get() is None:  # somebody else will run the backward pass
            stack.callback(register_module_forward_hook(watch).remove)
        yield
    for swap in swaps:
        swap.done()


@traced.at_trace_time
def _look_at_trace_time(module: nn.Module) -> tuple[bool, tuple[str, ...]]:
    """Whether tensors have several names in `module`, and its buffers' names. Raises if it can't be traced."""
    members = Members(module)
    found = bool(members.tied()), tuple([buffer.path for buffer in members.buffers])
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
    if hasattr(given, "params") and hasattr(given, "buffers"):  # a train state
        given = given.params if given.buffers is None else (given.params, given.buffers)
    dicts = [given] if isinstance(given, Mapping) else given
    merged: dict[str, torch.Tensor] = {}
    for part in dicts if isinstance(dicts, Sequence) else [None]:
        if not isinstance(part, Mapping):
            raise TreeError(f"functional_call takes a dict of tensors or a tuple of such dicts, got {brief(given)}.")
        for name, tensor in part.items():
            if not isinstance(name, str):
                raise TreeError(f"functional_call: names are strings, got {brief(name)}.")
            if name in merged:
                raise InputError(f"functional_call: {name!r} is in two of the dicts that it was given.")
            merged[name] = tensor
    return merged
