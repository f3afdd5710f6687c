"""all_gather and psum_scatter, gather and scatter: two pairs of collectives that are each other's transposes.

    all_gather:    y_r = [x_0, ..., x_{n-1}]                   transpose:  x̄_r = (sum_s ȳ_s)[r]
    psum_scatter:  y_r = (sum_s x_s)[r]                        transpose:  x̄_r = [ȳ_0, ..., ȳ_{n-1}]
    gather:        y_dst = [x_0, ..., x_{n-1}], 0 elsewhere    transpose:  x̄_r = (ȳ_dst)[r]
    scatter:       y_r = (x_src)[r]                            transpose:  x̄_src = [ȳ_0, ..., ȳ_{n-1}], 0 elsewhere

All work along dim. With ``tiled`` the ranks' parts are concatenated along dim, instead of stacked along a new dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch

from ltx.core.base import tree
from ltx.core.collectives.calls import checked_index, collective, grouped, public, tensors_of
from ltx.core.collectives.linear import Static, add_rule, only_at
from ltx.core.collectives.psum import GradScale, countable, scale_gradient
from ltx.core.collectives.uneven import all_gather_uneven, check_parts, dim_of, is_uneven, psum_scatter_uneven
from ltx.core.comm.operations import as_it_is
from ltx.typing import Tree


def spread(gathered: torch.Tensor, static: Static) -> torch.Tensor:
    """Move the first dimension of `gathered` to dim, or merge it with dim if tiled; `static` ends with (dim, tiled)."""
    dim, tiled = static[-2:]
    moved = gathered.movedim(0, dim)
    return moved.flatten(dim, dim + 1) if tiled else moved


def split(x: torch.Tensor, n: int, static: Static) -> torch.Tensor:
    """Inverse of :func:`spread`."""
    dim, tiled = static[-2:]
    return (x.unflatten(dim, (n, x.shape[dim] // n)) if tiled else x).movedim(dim, 0)


def _one_more_dim(static: Static) -> Static:
    return *static[:-2], static[-2] + 1, static[-1]


add_rule(
    name="all_gather",
    moves=True,
    after=lambda result, x, rank, n, static: spread(result, static),
    stacked=lambda xs, n, static: (spread(xs, static).clone(), False),
    alone=lambda x, static: spread(x.unsqueeze(0), static),
    transpose=lambda shape, static: ("psum_scatter", static),
    batched=_one_more_dim,
)

add_rule(
    name="psum_scatter",
    before=lambda x, n, static: split(x, n, static).contiguous(),
    stacked=lambda xs, n, static: (split(xs.sum(0, dtype=xs.dtype), n, static), True),
    alone=lambda x, static: split(x, 1, static).squeeze(0),
    transpose=lambda shape, static: ("all_gather", static),
    batched=_one_more_dim,
)

add_rule(
    name="gather",
    moves=True,
    after=lambda result, x, rank, n, static: spread(result, static),
    stacked=lambda xs, n, static: only_at(spread(xs, static), n, static[0]),
    alone=lambda x, static: spread(x.unsqueeze(0), static),
    transpose=lambda shape, static: ("scatter", static),
    batched=_one_more_dim,
    arguments=lambda static: static[:1],
)

add_rule(
    name="scatter",
    moves=True,
    before=lambda x, n, static: split(x, n, static).contiguous(),
    stacked=lambda xs, n, static: (split(xs[static[0]], n, static).clone(), True),
    alone=lambda x, static: split(x, 1, static).squeeze(0),
    transpose=lambda shape, static: ("gather", static),
    batched=_one_more_dim,
    arguments=lambda static: static[:1],
)


@public("dim", "tiled", "sync_grads", "splits", "axis_index_groups")
def all_gather(
    value: Tree,
    axis: Any = None,
    *,
    dim: int = 0,
    tiled: bool = False,
    sync_grads: bool = True,
    splits: Sequence[int] | Literal["infer"] | None = None,
    grad_scale: GradScale = "sum",
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> Tree:
    """Gather every rank's tensor, on every rank.

    Args:
        value: tree of tensors, the same structure, shapes and dtypes on every rank.
        axis: as in :func:`ltx.psum`.
        dim: the dimension of the result that belongs to the ranks: a new one of size n, or with `tiled` an existing one
            along which the ranks' parts are concatenated.
        tiled: concatenate instead of stack. 0-dim tensors can only be stacked.
        sync_grads: if False, no gradient flows back: the result is a constant (Lightning's ``sync_grads``).
        splits: with `tiled`, the length of each rank's part along `dim`, the same list on every rank; not on simulated
            ranks. "infer" on every rank: ranks send each other their lengths at every call, in one small message for
            all leaves. If other dimensions differ too, use :func:`gather_all_tensors`.
        grad_scale: "mean" divides the gradient by n, as Horovod does.
        axis_index_groups: as in :func:`ltx.psum`, of equal sizes: a rank gathers from its group, in its order.

    Returns:
        What each rank sees: the same tree of new tensors, of shape ``(n, *shape)`` for ``dim=0``, also if n is 1.

    Gradient:
        psum_scatter(ȳ): each rank gets the sum over ranks of its part's cotangents.

    Raises:
        AxisError: `axis` isn't in scope, or `dim` is out of range.
        TreeError, RankMismatchError: as in :func:`ltx.psum`; and on every rank if a tensor doesn't fit its `splits`.

    Example:
        >>> import torch, ltx
        >>> gathered = ltx.vmap(ltx.all_gather)(torch.tensor([1.0, 2.0]))
        >>> gathered[0], gathered[1]
        (tensor([1., 2.]), tensor([1., 2.]))
    """
    axis = grouped(axis, axis_index_groups, equal="all_gather")
    scaled = scale_gradient(tensors_of(value, axis), axis, grad_scale, lambda n: 1 / n)
    if is_uneven(splits, "all_gather", axis, tiled):
        gathered = all_gather_uneven(scaled, axis, dim, splits)
        return gathered if sync_grads else tree.map(torch.Tensor.detach, gathered)
    then = as_it_is if sync_grads else torch.Tensor.detach
    return collective("all_gather", scaled, axis, lambda x, n: _place("all_gather", x, dim, tiled), then)


@public("dim", "tiled", "splits", "axis_index_groups")
def psum_scatter(
    value: Tree,
    axis: Any = None,
    *,
    dim: int = 0,
    tiled: bool = False,
    splits: Sequence[int] | Literal["infer"] | None = None,
    grad_scale: GradScale = "sum",
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> Tree:
    """Sum tensors over ranks, and give each rank its part of the sum.

    Args:
        value: tree of tensors. Without `tiled`, ``shape[dim]`` must be the axis' size n, and part r is entry r. With
            `tiled` it must be a multiple of n, and part r is the r-th of n equal chunks. Booleans count as int64.
        axis: as in :func:`ltx.psum`.
        dim: the dimension that is split.
        tiled: split the dimension into chunks, instead of removing it.
        splits: with `tiled`, the length of each rank's part, the same list on every rank; not on simulated ranks.
            "infer": parts are as equal as possible, the first ones longer by one; simulated ranks need equal parts.
        grad_scale: "mean" multiplies the gradient by n, as Horovod's reducescatter of sums does.
        axis_index_groups: as in :func:`ltx.psum`, of equal sizes n: part r goes to the r-th rank of the group.

    Returns:
        What each rank sees: its own part, without dimension `dim` or with it n times smaller.

    Gradient:
        all_gather(ȳ).

    Raises:
        AxisError: `axis` isn't in scope, or the dimension can't be split among its ranks.
        TreeError, RankMismatchError: as in :func:`ltx.psum`; and on every rank if a tensor doesn't fit its `splits`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.psum_scatter)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([4., 6.])
    """
    axis = grouped(axis, axis_index_groups, equal="psum_scatter")
    scaled = scale_gradient(countable(tensors_of(value, axis)), axis, grad_scale, lambda n: n)
    if is_uneven(splits, "psum_scatter", axis, tiled):
        return psum_scatter_uneven(scaled, axis, dim, splits)
    return collective("psum_scatter", scaled, axis, lambda x, n: _place("psum_scatter", x, dim, tiled, n))


@public("dst", "dim", "tiled")
def gather(value: Tree, dst: int = 0, axis: Any = None, *, dim: int = 0, tiled: bool = False) -> Tree:
    """Gather every rank's tensor on rank `dst` only, which sends 1/n of the bytes of :func:`all_gather`.

    Args:
        value: tree of tensors, the same structure, shapes and dtypes on every rank.
        dst: an index on the axis (not a rank of the world), 0 to n - 1.
        axis: as in :func:`ltx.psum`.
        dim, tiled: as in :func:`all_gather`.

    Returns:
        What each rank sees: on `dst` the same tree of new tensors, of shape ``(n, *shape)`` for ``dim=0``. Other ranks
        get zeros of that shape, so that all ranks can run the same code, also under transforms and simulated.

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

    Source: ``torch.distributed.gather``, which returns None on other ranks.
    """
    return collective(
        "gather", value, axis, lambda x, n: (checked_index("gather", "dst", dst, n), *_place("gather", x, dim, tiled))
    )


@public("src", "dim", "tiled")
def scatter(value: Tree, src: int = 0, axis: Any = None, *, dim: int = 0, tiled: bool = False) -> Tree:
    """Split rank `src`'s tensor into parts, one for each rank.

    Args:
        value: tree of tensors, the same structure, shapes and dtypes on every rank. Only `src`'s values matter: other
            ranks may give ``torch.empty``. Parts are those of :func:`psum_scatter`.
        src: an index on the axis (not a rank of the world), 0 to n - 1.
        axis: as in :func:`ltx.psum`.
        dim: the dimension that is split.
        tiled: split the dimension into chunks, instead of removing it.

    Returns:
        What each rank sees: its own part, without dimension `dim` or with it n times smaller.

    Gradient:
        gather(ȳ): the cotangents of all ranks' parts on `src`, and 0 on other ranks.

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
        return checked_index("scatter", "src", src, n), *_place("scatter", x, dim, tiled, n)

    return collective("scatter", value, axis, static)


def _place(name: str, x: torch.Tensor, dim: int, tiled: bool, parts: int | None = None) -> Static:
    """(dim, tiled) of a collective on `x`, which is split into so many `parts`, or gathered. Raises if it can't be."""
    place = dim_of(name, x, dim, more=int(parts is None and not tiled))
    if parts is not None:
        check_parts(f"{name} over {parts} ranks", x, dim, parts, tiled, "Pad it, or split another dimension.")
    return place, int(tiled)


class AllGatherGrad:
    """``AllGatherGrad.apply(tensor, group=None)``: :func:`all_gather` under Lightning's name.

    The result has shape ``(n, *shape)``; its gradient is the sum over ranks of the cotangents of this rank's part.
    Unlike Lightning's it supports subgroups, any strides and ``torch.func``, and its backward pass sends half as much.

    Example:
        >>> import torch, ltx
        >>> ltx.AllGatherGrad.apply(torch.tensor([1.0, 2.0])).shape  # a world of one
        torch.Size([1, 2])
    """

    @staticmethod
    def apply(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
        """Gather `tensor` from the ranks of `group` (an axis in any form; None as in :func:`ltx.psum`)."""
        return cast(torch.Tensor, all_gather(tensor, group))
