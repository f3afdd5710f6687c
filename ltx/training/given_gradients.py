"""Steps that return gradients, as losses of which those are the gradients: what a train step makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ltx import tree
from ltx.arguments import brief
from ltx.errors import StepError
from ltx.transforms.closure_check import nodes_made, refuse_captured
from ltx.transforms.data_parallel import DataParallel
from ltx.transforms.weighted import Weighted
from ltx.typing import Step, Tree


class ZeroWithGradients(torch.autograd.Function):
    """``apply(n, *params, *grads)`` is 0, with those gradients; a sum of products took twice as long as the update."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *params_and_grads: Tensor) -> Tensor:
        zero = params_and_grads[0].new_zeros(())
        return zero.real.clone() if zero.is_complex() else zero

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
    """``(params, *batch) -> loss, *rest`` of a step that returns ``(grads, loss, *rest)``.

    To the loss is added a zero whose gradient is the given one. So whatever a train step does with a loss it does with
    gradients, in one way.
    """

    fn: Step

    def __call__(self, params: Tree, *args: Any, **named: Any) -> Any:
        apart = tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, params)  # the step differentiates itself
        before = 0 if torch.compiler.is_compiling() else nodes_made()
        returned = self.fn(apart, *args, **named)
        if not isinstance(returned, tuple) or isinstance(returned, Weighted) or len(returned) < 2:
            raise StepError(
                'train_step: a step with returns="grads" returns (grads, loss), as ltx.grad_and_value and '
                f"torch.func.grad_and_value do, and buffers and aux after them; got {brief(returned)}."
            )
        grads, loss, *rest = returned
        if not torch.compiler.is_compiling():  # a module's own parameters would stay as they are
            refuse_captured(self.fn, loss, (apart, args, named), nodes_made() - before)
        loss = self._plus(loss, self._zero(params, grads))
        return (loss, *rest) if rest else loss

    def _plus(self, loss: Any, zero: Tensor) -> Any:
        if isinstance(loss, Weighted):
            total, weight = loss.checked()
            return Weighted(total.detach() + zero, weight)
        if not isinstance(loss, Tensor) or loss.dim():
            raise StepError(
                'train_step: a step with returns="grads" returns (grads, loss) with a 0-dim tensor or ltx.Weighted as '
                f"its loss, got {tree.describe(loss) if isinstance(loss, Tensor) else brief(loss)}."
            )
        return loss.detach() + zero

    def _zero(self, params: Tree, grads: Tree) -> Tensor:
        """A 0 with these gradients, where there are some."""
        leaves, spec = tree.flatten(params)
        try:
            given = spec.flatten_up_to(grads)
        except (ValueError, TypeError) as error:
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
        pairs = [(x, g.detach()) for x, g in zip(leaves, given, strict=True) if g is not None]
        if not pairs:
            raise StepError('train_step: a step with returns="grads" returned no gradient at all.')
        tensors = (*(x for x, _ in pairs), *(g for _, g in pairs))
        zero: Tensor = ZeroWithGradients.apply(len(pairs), *tensors)  # type: ignore[no-untyped-call]
        return zero


def as_loss(step: DataParallel) -> DataParallel:
    """`step`, or if it returns gradients, the step whose loss has them."""
    return step if step.returns == "value" else replace(step, fn=GivenGradients(step.fn), returns="value")
