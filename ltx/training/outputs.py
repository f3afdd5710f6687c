"""The arguments and the result of the user's step inside a train step."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ltx import tree
from ltx.errors import StepError
from ltx.transforms.run import Run
from ltx.transforms.weighted import Weighted
from ltx.typing import Step, Tree


class Batch(NamedTuple):
    """The arguments of a train step after the state: by position and by keyword."""

    args: tuple[Any, ...]
    named: dict[str, Any]


class Outputs(NamedTuple):
    """The parts of what a step returned.

    Attributes:
        loss: part of the graph.
        buffers: the next ones, or None if there are none.
        aux: everything else; None without `has_aux`.
    """

    loss: torch.Tensor | Weighted
    buffers: Tree
    aux: Any


def arguments_of(params: Tree, buffers: Tree, batch: Batch) -> tuple[Any, ...]:
    """The positional arguments of the user's step."""
    return (params, *batch.args) if buffers is None else (params, buffers, *batch.args)


def check_call(fn: Step, buffers: Tree, batch: Batch) -> None:
    """Raise if the user's step can't be called so, and could be with buffers, or without them."""
    step = getattr(fn, "fn", fn)  # that of given gradients
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # a built-in without a signature
        return

    def fits(*before: Any) -> bool:
        try:
            signature.bind(*before, *batch.args, **batch.named)
        except TypeError:
            return False
        return True

    with_buffers, without = fits(None, None), fits(None)
    if buffers is None and with_buffers and not without:
        raise StepError(
            f"train_step: the step takes {signature}, one argument more than parameters and batch, and the state has "
            "no buffers. If these are what it takes: train.init(params, dict(module.named_buffers()))."
        )
    if buffers is not None and without and not with_buffers:
        raise StepError(
            f"train_step: the step takes {signature}, and is called with parameters, buffers and batch, as the state "
            "has buffers. Take them and return the next ones, (params, buffers, x) -> (loss, buffers), or leave them "
            "out of train.init."
        )


def loss_in(output: Any) -> Any:
    """The entry `loss` of a mapping or dataclass that a step returned, such as a ModelOutput; None if there is none."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None) if dataclasses.is_dataclass(output) else None


def outputs_of(run: Run, buffers: Tree, has_aux: bool) -> Outputs:
    """The parts of what `run` returned, which was given `buffers`.

    A mapping or dataclass with an entry `loss` counts as that loss, and with `has_aux` as aux too. Buffers and aux are
    means over ranks with ``data_parallel(outputs="mean")``.
    """
    output = run.output
    wanted = 1 + (buffers is not None) + has_aux
    if wanted == 1:
        parts: tuple[Any, ...] = (output,)
    elif isinstance(output, tuple) and not isinstance(output, Weighted) and len(output) == wanted:
        parts = output
    elif has_aux and buffers is None and loss_in(output) is not None:
        parts = (output, output)
    else:
        names = ["loss", *(["buffers"] if buffers is not None else []), *(["aux"] if has_aux else [])]
        raise StepError(f"train_step: the step must return ({', '.join(names)}), got {_what(output)}.")
    within = loss_in(parts[0])
    loss = parts[0] if within is None else within
    if not isinstance(loss, Weighted) and not (
        isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point()
    ):
        raise StepError(
            f"train_step: the loss must be a 0-dim floating tensor or ltx.Weighted, got {_what(loss)}. Take its "
            "mean or sum; a step that returns (loss, aux) wants has_aux=True. A mapping holds it as `loss`."
        )
    rest = run.averaged(tree.map(_detach, parts[1:]))
    return Outputs(loss, None if buffers is None else rest[0], rest[-1] if has_aux else None)


def unshared(values: Tree, others: Tree) -> Tree:
    """`values`, with copies of the tensors that share memory with one of `others`."""
    if not any(isinstance(x, torch.Tensor) for x in tree.flatten(values)[0]):
        return values
    owned = {x.untyped_storage().data_ptr() for x in tree.flatten(others)[0]}

    def apart(x: Any) -> Any:
        shares = isinstance(x, torch.Tensor) and x.layout is torch.strided and x.untyped_storage().data_ptr() in owned
        return x.clone() if shares else x

    return tree.map(apart, values)


def _detach(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
