"""broadcast and its transpose, the sum that only one rank keeps.

broadcast:  y_r = x_src                            transpose:  x̄_src = sum_s ȳ_s, 0 elsewhere
psum_to:    y_dst = sum_s x_s, 0 elsewhere         transpose:  x̄_r = ȳ_dst   (broadcast)
"""

from __future__ import annotations

from typing import Any

import torch

from ltx.arguments import checked
from ltx.collectives.calls import collective
from ltx.collectives.linear import Rule, Static, add_rule
from ltx.collectives.scale import GradScale, scale_gradient
from ltx.errors import AxisError
from ltx.typing import Tree


def _only_at(summed: torch.Tensor, n: int, static: Static) -> tuple[torch.Tensor, bool]:
    at = torch.arange(n, device=summed.device) == static[0]
    here = at.reshape(n, *[1] * summed.ndim)
    return torch.where(here, summed, torch.zeros((), dtype=summed.dtype, device=summed.device)), True


add_rule(
    Rule(
        name="broadcast",
        operation="broadcast",
        before=lambda x, n, static: x.clone(memory_format=torch.contiguous_format),
        after=lambda result, rank, n, static: result,
        stacked=lambda xs, n, static: (xs[static[0]].clone(), False),
        alone=lambda x, static: x,
        transpose=lambda shape, static: ("psum_to", static),
        batched=lambda static: static,
        arguments=lambda static: static,
        keeps_strides=True,
    )
)

add_rule(
    Rule(
        name="psum_to",
        operation="psum",
        before=lambda x, n, static: x.clone(memory_format=torch.contiguous_format),
        after=lambda result, rank, n, static: result if rank == static[0] else torch.zeros_like(result),
        stacked=lambda xs, n, static: _only_at(xs.sum(0, dtype=xs.dtype), n, static),
        alone=lambda x, static: x,
        transpose=lambda shape, static: ("broadcast", static),
        batched=lambda static: static,
    )
)


@checked("src")
def broadcast(value: Tree, src: int = 0, axis: Any = None, *, grad_scale: GradScale = "sum") -> Tree:
    """Rank `src`'s tree, on every rank.

    Args:
        value: tree of tensors, the same structure, shapes and dtypes on every rank; only `src`'s values matter.
        src: an index on the axis (not a global rank), 0 to n - 1.
        axis: as in :func:`ltx.psum`.
        grad_scale: "mean" divides the gradient by n, as Horovod does.

    Returns:
        What each rank sees: new tensors with the values of rank `src`, which lie in memory as its own do (channels
        last stays so).

    Gradient:
        psum(ȳ) on rank `src`, 0 elsewhere.

    Raises:
        AxisError: `axis` isn't in scope, or `src` isn't on it.
        TreeError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(lambda x: ltx.broadcast(x, src=1))(torch.tensor([1.0, 2.0]))
        tensor([2., 2.])
    """

    def static(x: torch.Tensor, n: int) -> Static:
        if not 0 <= src < n:
            raise AxisError(f"broadcast: src={src} isn't an index on an axis of {n} ranks, 0 to {n - 1}.")
        return (src,)

    return collective("broadcast", scale_gradient(value, axis, grad_scale, lambda n: 1 / n), axis, static)
