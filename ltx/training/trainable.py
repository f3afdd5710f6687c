"""Which parameters a train step trains, and what it takes them from: a tree of tensors, or a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltx import collectives, tree
from ltx.arguments import brief
from ltx.axis import Axis
from ltx.errors import StepError, TreeError
from ltx.training.donated import give_away
from ltx.typing import Tree

#: Which leaves are trained: patterns of paths (as in :mod:`fnmatch`), or a function of a path.
Trainable = str | Sequence[str] | Callable[[str], bool] | None

# A module's parameters are broadcast so many bytes at a time, since both copies exist while that goes on.
_PIECE_BYTES = 64 << 20


def check_trainable(trainable: Any) -> None:
    """Raise unless `trainable` is of the type :data:`Trainable`."""
    patterns = [trainable] if isinstance(trainable, str) else trainable
    if trainable is None or callable(trainable):
        return
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise StepError(
            "train_step: trainable must be a pattern of paths, a list of patterns, a function of a path, or None, got "
            f'{brief(trainable)}. Such as trainable=["*.lora_*", "head.*"].'
        )


def split(params: Tree, trainable: Trainable) -> tuple[Tree, Tree]:
    """(trained, frozen) parameters: each with None in the places of the other; None for `frozen` if there are none.

    A leaf is frozen if it doesn't require gradients while others do, or is a parameter of a module that doesn't; and if
    `trainable` leaves it out. Where no leaf requires gradients and none is a module's parameter, all are trained.
    """
    leaves, spec = tree.flatten(params)
    paths = tree.leaf_paths(params)
    says = any(x.requires_grad or isinstance(x, torch.nn.Parameter) for x in leaves)
    frozen = [says and not x.requires_grad for x in leaves]
    if trainable is not None:
        if callable(trainable):
            wanted = {path for path in paths if trainable(path)}
        else:
            wanted = tree.wanted(trainable, paths, StepError, "train_step: trainable=")
        frozen = [f or path not in wanted for f, path in zip(frozen, paths, strict=True)]
    _check(leaves, paths, frozen)
    if not any(frozen):
        return params, None
    if all(frozen):
        raise StepError(
            "train_step: every parameter is frozen, so there is nothing to train. Frozen are those whose requires_grad "
            "is False while others' isn't, and those that trainable= leaves out."
        )
    parts = zip(leaves, frozen, strict=True)
    halves = [(None, x) if f else (x, None) for x, f in parts]
    return tree.unflatten(spec, [x for x, _ in halves]), tree.unflatten(spec, [x for _, x in halves])


def _check(leaves: Sequence[torch.Tensor], paths: Sequence[str], frozen: Sequence[bool]) -> None:
    """Refuse what can't be trained, and two names for one tensor, which would go apart."""
    known: dict[Any, str] = {}
    for x, path, is_frozen in zip(leaves, paths, frozen, strict=True):
        if not is_frozen and not (x.is_floating_point() or x.is_complex()):
            raise TreeError(
                f"params: leaf {path!r} is {tree.describe(x)}, and only floating or complex tensors can be "
                "trained. Pass it in the buffers, or close over it."
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_meta or not x.numel():
            continue
        place = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        if place in known:
            raise TreeError(
                f"params: leaves {known[place]!r} and {path!r} are one tensor (tied weights), and would be trained "
                "apart. Pass each once: dict(model.named_parameters()) has one name for both, and "
                "ltx.functional_call(model, params, ...) puts it in both places."
            )
        known[place] = path


def taken_from(module: torch.nn.Module, axis: Axis, trainable: Trainable) -> tuple[Tree, Tree]:
    """(trained, frozen) parameters of `module`, in its own memory, with rank 0's values on every rank.

    The module's trained parameters can't be used any more, and say so.
    """
    parameters = dict(module.named_parameters())
    if axis.comm is not None:
        tree.check_values(list(parameters.values()), parameters, "train.init(module)")
    trained, frozen = split(parameters, trainable)
    with torch.no_grad():
        for piece in _pieces(list(parameters.values())) if axis.size > 1 else ():
            given = collectives.broadcast([parameter.detach() for parameter in piece], axis=axis)
            for parameter, value in zip(piece, given, strict=True):
                parameter.data = value
    held: tuple[Tree, Tree] = tree.map(torch.Tensor.detach, (trained, frozen))
    give_away(
        tree.flatten(trained)[0],
        f"this parameter of a {type(module).__name__} was taken over by train.init(module): the train state has it. "
        "Call the module with ltx.functional_call(module, state.params, (inputs,)), or give it the state's values back "
        "with ltx.to_module(module, state). train.init(dict(module.named_parameters())) copies instead.",
    )
    return held


def _pieces(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    pieces: list[list[torch.Tensor]] = []
    room = 0
    for x in tensors:
        room -= x.nbytes
        if room < 0:
            pieces.append([])
            room = _PIECE_BYTES - x.nbytes
        pieces[-1].append(x)
    return pieces
