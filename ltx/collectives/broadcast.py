"""broadcast and its transpose, the sum that only one rank keeps.

broadcast:  y_r = x_src                            transpose:  x̄_src = sum_s ȳ_s, 0 elsewhere
psum_to:    y_dst = sum_s x_s, 0 elsewhere         transpose:  x̄_r = ȳ_dst   (broadcast)
"""

from __future__ import annotations

from typing import Any

import torch

from ltx.arguments import checked
from ltx.axis import check_index
from ltx.collectives.calls import collective, tensors_of
from ltx.collectives.linear import Rule, Static, add_rule, only_at
from ltx.collectives.psum import countable
from ltx.collectives.scale import GradScale, scale_gradient
from ltx.typing import Tree

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
        stacked=lambda xs, n, static: only_at(xs.sum(0, dtype=xs.dtype), n, static[0]),
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
        src: an index on the axis (not a rank of the world), 0 to n - 1.
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
        check_index("broadcast", "src", src, n)
        return (src,)

    return collective("broadcast", scale_gradient(value, axis, grad_scale, lambda n: 1 / n), axis, static)


@checked("dst")
def psum_to(value: Tree, dst: int = 0, axis: Any = None) -> Tree:
    """The sum over ranks of every tensor of a tree, on rank `dst` alone.

    Args:
        value: as in :func:`ltx.psum`, but for sparse tensors.
        dst: an index on the axis (not a rank of the world), 0 to n - 1.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: on `dst` the same tree of new tensors with the sums; on the other ranks zeros of the same
        shapes and dtypes, so that all ranks can go on alike, under transforms and simulated.

    Gradient:
        broadcast(ȳ): the cotangent on `dst`, on every rank.

    Raises:
        AxisError: `axis` isn't in scope, or `dst` isn't on it.
        TreeError, UnsupportedError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(lambda x: ltx.psum_to(x, dst=1))(torch.tensor([1.0, 2.0]))
        tensor([0., 3.])

    Source: ``torch.distributed.reduce``, which leaves something unspecified on the other ranks.
    """

    def static(x: torch.Tensor, n: int) -> Static:
        check_index("psum_to", "dst", dst, n)
        return (dst,)

    return collective("psum_to", countable(tensors_of(value, axis)), axis, static)
