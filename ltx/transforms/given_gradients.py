"""Steps that return gradients, as losses of which those are the gradients: what a train step makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ltx import tree
from ltx.arguments import brief
from ltx.errors import StepError
from ltx.transforms.captured import nodes_made, refuse_captured
from ltx.transforms.data_parallel import DataParallel
from ltx.transforms.weighted import Weighted
from ltx.typing import Step, Tree


@dataclass(frozen=True)
class GivenGradients:
    """``(params, *batch) -> loss, *rest`` of a step that returns ``(grads, loss, *rest)``.

    To the loss is added the product of parameters and gradients, less itself: its value is 0, and its gradient the
    given one. So whatever a train step does with a loss it does with gradients, in one way.
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
        extra = self._product(params, grads)
        loss = self._plus(loss, extra - extra.detach())
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

    def _product(self, params: Tree, grads: Tree) -> Tensor:
        leaves, spec = tree.flatten(params)
        try:
            given = spec.flatten_up_to(grads)
        except (ValueError, TypeError) as error:
            raise StepError(
                f'train_step: a step with returns="grads" returns gradients in the structure of its parameters: {error}'
            ) from None
        total: Tensor | None = None
        for index, (x, g) in enumerate(zip(leaves, given, strict=True)):
            if g is None:
                continue
            if not isinstance(g, Tensor) or g.shape != x.shape or g.dtype != x.dtype:
                path = tree.leaf_paths(params)[index]
                got = tree.describe(g) if isinstance(g, Tensor) else brief(g)
                raise StepError(f"train_step: the gradient of {path!r} must be {tree.describe(x)}, got {got}.")
            g = g.detach()
            product = (x * g.conj()).real.sum() if x.is_complex() else (x * g).sum()
            total = product if total is None else total + product.to(total.dtype)
        if total is None:
            raise StepError('train_step: a step with returns="grads" returned no gradient at all.')
        return total


def as_loss(step: DataParallel) -> DataParallel:
    """`step`, or if it returns gradients, the step whose loss has them."""
    return step if step.returns == "value" else replace(step, fn=GivenGradients(step.fn), returns="value")
