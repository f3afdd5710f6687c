"""Between one rank and all: broadcast and psum_to, gather and scatter, in each pair one is the other's transpose.

broadcast:  y_r = x_src                                            transpose:  x̄_src = sum_s ȳ_s, 0 elsewhere
psum_to:    y_dst = sum_s x_s, 0 elsewhere                         transpose:  x̄_r = ȳ_dst
gather:     y_dst = [x_0, ..., x_{n-1}] along dim, 0 elsewhere     transpose:  x̄_r = (ȳ_dst)[r]
scatter:    y_r = (x_src)[r] along dim                             transpose:  x̄_src = [ȳ_0, ..., ȳ_{n-1}], 0 elsewhere
"""

from __future__ import annotations

from typing import Any

import torch

from ltx.core.base.arguments import checked
from ltx.core.collectives.calls import GradScale, check_index, collective, scale_gradient, tensors_of
from ltx.core.collectives.futures import one_message
from ltx.core.collectives.gather import one_more_dim, place_of, split, spread
from ltx.core.collectives.in_step import in_step
from ltx.core.collectives.linear import Rule, Static, add_rule, only_at
from ltx.core.collectives.psum import countable
from ltx.typing import Tree

add_rule(
    Rule(
        name="broadcast",
        operation="broadcast",
        before=lambda x, n, static: x.clone(memory_format=torch.contiguous_format),
        stacked=lambda xs, n, static: (xs[static[0]].clone(), False),
        transpose=lambda shape, static: ("psum_to", static),
        arguments=lambda static: static,
        keeps_strides=True,
    )
)

add_rule(
    Rule(
        name="psum_to",
        operation="psum",
        before=lambda x, n, static: x.clone(memory_format=torch.contiguous_format),
        after=lambda result, x, rank, n, static: result if rank == static[0] else torch.zeros_like(result),
        stacked=lambda xs, n, static: only_at(xs.sum(0, dtype=xs.dtype), n, static[0]),
        transpose=lambda shape, static: ("broadcast", static),
    )
)


@one_message
@in_step
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


@one_message
@in_step
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


add_rule(
    Rule(
        name="gather",
        operation="gather",
        after=lambda result, x, rank, n, static: spread(result, static[1:]),
        stacked=lambda xs, n, static: only_at(spread(xs, static[1:]), n, static[0]),
        alone=lambda x, static: spread(x.unsqueeze(0), static[1:]),
        transpose=lambda shape, static: ("scatter", static),
        batched=lambda static: (static[0], *one_more_dim(static[1:])),
        arguments=lambda static: static[:1],
    )
)

add_rule(
    Rule(
        name="scatter",
        operation="scatter",
        before=lambda x, n, static: split(x, n, static[1:]).contiguous(),
        stacked=lambda xs, n, static: (split(xs[static[0]], n, static[1:]).clone(), True),
        alone=lambda x, static: split(x, 1, static[1:]).squeeze(0),
        transpose=lambda shape, static: ("gather", static),
        batched=lambda static: (static[0], *one_more_dim(static[1:])),
        arguments=lambda static: static[:1],
    )
)


@one_message
@in_step
@checked("dst", "dim", "tiled")
def gather(value: Tree, dst: int = 0, axis: Any = None, *, dim: int = 0, tiled: bool = False) -> Tree:
    """Every rank's tensor, on rank `dst` alone. It sends an n-th of what :func:`all_gather` does.

    Args:
        value: tree of tensors, the same structure, shapes and dtypes on every rank.
        dst: an index on the axis (not a rank of the world), 0 to n - 1.
        axis: as in :func:`ltx.psum`.
        dim, tiled: as in :func:`all_gather`.

    Returns:
        What each rank sees: on `dst` the same tree of new tensors, of shape ``(n, *shape)`` for ``dim=0``. On the other
        ranks tensors of that shape full of zeros, so that all ranks can go on alike, under transforms and simulated.

    Gradient:
        scatter(ȳ): each rank gets its own part of the cotangent on `dst`.

    Raises:
        AxisError: `axis` isn't in scope, `dst` isn't on it, or `dim` is out of range.
        TreeError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(lambda x: ltx.gather(x, dst=1))(torch.tensor([3.0, 4.0]))
        tensor([[0., 0.],
                [3., 4.]])

    Source: ``torch.distributed.gather``, whose other ranks get None.
    """

    def static(x: torch.Tensor, n: int) -> Static:
        check_index("gather", "dst", dst, n)
        return (dst, *place_of("gather", x, dim, tiled, new_dim=not tiled))

    return collective("gather", value, axis, static)


@one_message
@in_step
@checked("src", "dim", "tiled")
def scatter(value: Tree, src: int = 0, axis: Any = None, *, dim: int = 0, tiled: bool = False) -> Tree:
    """This rank's part of rank `src`'s tensor.

    Args:
        value: tree of tensors, the same structure, shapes and dtypes on every rank; only `src`'s values matter, and the
            others may give ``torch.empty``. Without `tiled`, ``shape[dim]`` must be the axis' size n, and part r is
            entry r; with it, ``shape[dim]`` must be a multiple of n, and part r is the r-th of n equal chunks.
        src: an index on the axis (not a rank of the world), 0 to n - 1.
        axis: as in :func:`ltx.psum`.
        dim: the dimension that is split.
        tiled: split a dimension into chunks instead of taking it away.

    Returns:
        What each rank sees: its own part, without dimension `dim` or with it n times smaller.

    Gradient:
        gather(ȳ): the cotangents of all ranks' parts on `src`, 0 elsewhere.

    Raises:
        AxisError: `axis` isn't in scope, `src` isn't on it, or the dimension can't be split among its ranks.
        TreeError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(lambda x: ltx.scatter(x, src=1))(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([3., 4.])

    Source: ``torch.distributed.scatter``.
    """

    def static(x: torch.Tensor, n: int) -> Static:
        check_index("scatter", "src", src, n)
        return (src, *place_of("scatter", x, dim, tiled, new_dim=False, parts=n))

    return collective("scatter", value, axis, static)
