"""The arguments and the result of the user's step inside a train step."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import brief, outcome
from ltx.core.base.errors import StepError
from ltx.core.transforms.closure_check import refuse_captured
from ltx.core.transforms.data_parallel import DataParallel
from ltx.core.transforms.run import Run, Weighted, differentiating_itself
from ltx.typing import Step, Tree


class Batch(NamedTuple):
    """The arguments of a train step after the state: by position and by keyword."""

    args: tuple[Any, ...]
    named: dict[str, Any]


def check_call(fn: Step, buffers: Tree, batch: Batch) -> None:
    """Raise if the user's step can't be called with these arguments, but could be with, or without, buffers."""
    step = getattr(fn, "fn", fn)  # the user's function inside GivenGradients
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return

    def fits(*before: Any) -> bool:
        with suppress(TypeError):
            return bool(signature.bind(*before, *batch.args, **batch.named))
        return False

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
    """The entry `loss` of a step's output, a mapping or dataclass such as ModelOutput; None for other outputs."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None) if dataclasses.is_dataclass(output) else None


def outputs_of(
    run: Run, buffers: Tree, has_aux: bool, detached: bool = True
) -> tuple[torch.Tensor | Weighted, Tree, Any]:
    """(loss, next buffers, aux) of `run`, a step that got `buffers`. A mapping or dataclass with an entry `loss` stands
    for that loss, and with `has_aux` for aux too. Buffers and aux are means over ranks if the step says so.
    """
    output = run.output
    names = ("loss", *(() if buffers is None else ("buffers",)), *(("aux",) if has_aux else ()))
    if len(names) == 1:
        parts = {"loss": output}
    elif isinstance(output, tuple) and not isinstance(output, Weighted) and len(output) == len(names):
        parts = dict(zip(names, output, strict=True))
    elif names == ("loss", "aux") and loss_in(output) is not None:
        parts = {"loss": output, "aux": output}
    else:
        raise StepError(f"train_step: the step must return ({', '.join(names)}), got {outcome(output)}.")
    loss = parts.pop("loss")
    if not isinstance(loss, torch.Tensor) and (within := loss_in(loss)) is not None:
        loss = within
    plain = isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point()
    if not (plain or isinstance(loss, Weighted)):
        raise StepError(
            f"train_step: the loss must be a 0-dim floating tensor or ltx.Weighted, got {outcome(loss)}. Take its "
            "mean or sum; a step that returns (loss, aux) wants has_aux=True. A mapping holds it as `loss`."
        )
    if buffers is not None and tree.flatten(parts["buffers"])[1] != tree.flatten(buffers)[1]:
        returned = tree.leaf_paths(parts["buffers"])
        if lost := [path for path in tree.leaf_paths(buffers) if path not in returned]:
            raise StepError(
                f"train_step: the step was given a buffer {lost[0]!r} and returned none, so the state would lose it. "
                "Return all buffers, such as {**buffers, **new}."
            )
    rest: dict[str, Any] = run.averaged(tree.detached(parts) if detached else parts) if parts else parts
    return loss, rest.get("buffers"), rest.get("aux")


class ZeroWithGradients(torch.autograd.Function):
    """``apply(n, *params, *grads)``: a 0 whose gradients are `grads`; in float64, so that no cotangent is rounded."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *params_and_grads: Tensor) -> Tensor:
        return params_and_grads[0].new_zeros((), dtype=torch.float64)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.count = inputs[0]
        ctx.save_for_backward(*inputs[1 + inputs[0] :])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        grads = [(g * cotangent).to(g.dtype) for g in ctx.saved_tensors]
        return None, *grads, *[None] * ctx.count


@dataclass(frozen=True)
class GivenGradients:
    """Makes of a step that returns ``(grads, loss, *rest)`` one whose loss has a zero added with these gradients."""

    fn: Step

    def __call__(self, params: Tree, *args: Any, **named: Any) -> Any:
        apart = tree.detached(params)  # the step differentiates itself
        before = 0 if (recording := traced.recording()) else private.nodes_made()
        with nullcontext() if recording else differentiating_itself():
            returned = self.fn(apart, *args, **named)
        if not isinstance(returned, tuple) or isinstance(returned, Weighted) or len(returned) < 2:
            raise StepError(
                'train_step: a step with returns="grads" returns (grads, loss), as ltx.grad_and_value and '
                f"torch.func.grad_and_value do, and buffers and aux after them; got {brief(returned)}."
            )
        grads, loss, *rest = returned
        if not recording:  # gradients of a module's own parameters would be lost
            refuse_captured(self.fn, loss, (apart, args, named), private.nodes_made() - before)
        zero = self._zero(params, grads)
        if isinstance(loss, Weighted):
            total, weight = loss.checked()
            loss = Weighted(total.detach() + zero.to(total.dtype), weight)
        elif isinstance(loss, Tensor) and not loss.dim():
            loss = loss.detach() + zero.to(loss.dtype)
        else:
            raise StepError(
                'train_step: a step with returns="grads" returns (grads, loss) with a 0-dim tensor or ltx.Weighted as '
                f"its loss, got {tree.describe(loss) if isinstance(loss, Tensor) else brief(loss)}."
            )
        return (loss, *rest) if rest else loss

    def _zero(self, params: Tree, grads: Tree) -> Tensor:
        """A zero whose gradients are `grads`. Raises if there are none."""
        leaves, spec = tree.flatten(params)
        try:
            given = spec.flatten_up_to(grads)
        except (ValueError, TypeError, RecursionError) as error:
            raise StepError(
                'train_step: a step with returns="grads" returns (grads, loss), with gradients in the structure of its '
                "parameters and None for those that have none, such as {name: grads.get(name) for name in params}; got "
                f"another structure: {brief(error, str)}"
            ) from None
        for index, (x, g) in enumerate(zip(leaves, given, strict=True)):
            if g is not None and not (isinstance(g, Tensor) and g.shape == x.shape and g.dtype == x.dtype):
                path = tree.leaf_paths(params)[index]
                got = tree.describe(g) if isinstance(g, Tensor) else brief(g)
                raise StepError(f"train_step: the gradient of {path!r} must be {tree.describe(x)}, got {got}.")
        xs = [x for x, g in zip(leaves, given, strict=True) if g is not None]
        if not xs:
            raise StepError('train_step: a step with returns="grads" returned no gradient at all.')
        there = [g.detach() for g in given if g is not None]
        zero: Tensor = ZeroWithGradients.apply(len(xs), *xs, *there)  # type: ignore[no-untyped-call]
        return zero


def as_loss(step: DataParallel) -> DataParallel:
    """`step`; if it returns gradients, a step whose loss has these gradients."""
    return step if step.returns == "value" else replace(step, fn=GivenGradients(step.fn), returns="value")
