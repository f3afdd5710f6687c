"""grad_scale: Horovod's gradients, where they differ from ltx's.

ltx's rule is that of the global map with the loss being the sum over ranks of each rank's loss, as in JAX, torch and
Lightning. Horovod's backward passes of allgather and broadcast take the mean over ranks instead of the sum, and that of
a summing reducescatter multiplies by n (horovod/torch/mpi_ops.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from ltx import comm, traced, tree
from ltx.arguments import brief
from ltx.collectives.calls import prepare_trace, traced_size
from ltx.collectives.linear import Function
from ltx.errors import CollectiveError
from ltx.typing import Tree

GradScale = Literal["sum", "mean"]


class ScaledGradient(Function):
    """Identity whose cotangent is multiplied by a number. Forward mode has no such rule, and raises."""

    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        return cotangents[0] * ctx.factor, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, factor: float) -> tuple[torch.Tensor, Any]:
        return ScaledGradient.apply(x, factor), in_dims[0]


def scale_gradient(value: Tree, axis: Any, grad_scale: GradScale, factor: Callable[[int], float]) -> Tree:
    """`value`, whose gradient is multiplied by ``factor(n)`` if `grad_scale` is "mean"."""
    if grad_scale == "sum":
        return value
    if grad_scale != "mean":
        raise CollectiveError(f'grad_scale must be "sum" or "mean", got {brief(grad_scale)}.')
    if torch.compiler.is_compiling():
        n = traced_size(prepare_trace(axis))
        return tree.map(lambda x: scaled_in_graph(x, factor(n)), value)
    by = factor(comm.resolve(axis).size)
    return tree.map(lambda x: ScaledGradient.apply(x, by) if isinstance(x, torch.Tensor) else x, value)


@traced.node
def scaled_in_graph(x: torch.Tensor, factor: float) -> torch.Tensor:
    """The node that a compiled graph holds."""
    scaled: torch.Tensor = ScaledGradient.apply(x, factor)
    return scaled
