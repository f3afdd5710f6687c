"""all_to_all and ppermute: ranks send their tensors, or parts of them, to other ranks.

all_to_all:  y_r = [(x_0)_r, ..., (x_{n-1})_r]    transpose:  all_to_all with the two dimensions exchanged
ppermute:    y_dst = x_src, 0 without a source    transpose:  ppermute with reversed pairs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from ltx.core.base import tree
from ltx.core.base.arguments import brief, is_whole, shown
from ltx.core.base.errors import AxisError
from ltx.core.collectives.calls import collective, grouped, public
from ltx.core.collectives.gather import split, spread
from ltx.core.collectives.linear import Static, add_rule
from ltx.core.collectives.psum import axis_size
from ltx.core.collectives.uneven import all_to_all_uneven, check_parts, dim_of, is_uneven
from ltx.core.comm.operations import view_as
from ltx.typing import Tree

_NO_PAIRS = (str, bytes, Mapping, torch.Tensor)


def _exchanged(xs: torch.Tensor, n: int, static: Static) -> tuple[torch.Tensor, bool]:
    split_dim, concat, tiled = static
    chunks = split(xs, n, (split_dim + 1, tiled))  # (destination, source, *chunk)
    # This makes a single copy, in a layout in which the parts can be joined as a view.
    laid_out = chunks.movedim(1, concat + 1).clone(memory_format=torch.contiguous_format)
    return (laid_out.flatten(concat + 1, concat + 2) if tiled else laid_out), True


add_rule(
    name="all_to_all",
    moves=True,
    before=lambda x, n, static: split(x, n, static[::2]).contiguous(),
    after=lambda result, x, rank, n, static: spread(result, static[1:]),
    stacked=_exchanged,
    alone=lambda x, static: spread(split(x, 1, static[::2]), static[1:]),
    transpose=lambda shape, static: ("all_to_all", (static[1], static[0], static[2])),
    batched=lambda static: (static[0] + 1, static[1] + 1, static[2]),
)


def _moved(xs: torch.Tensor, n: int, static: Static) -> tuple[torch.Tensor, bool]:
    source_of = dict(zip(static[1::2], static[::2], strict=True))
    moved = xs[torch.tensor([source_of.get(r, 0) for r in range(n)], device=xs.device)]
    without = [r for r in range(n) if r not in source_of]
    if not without:
        return moved, True
    # index_fill doesn't support this dtype, whose zeros are zero bytes
    if xs.dtype.itemsize == 1 and xs.is_floating_point():
        return view_as(_moved(view_as(xs, torch.uint8), n, static)[0], xs.dtype), True
    return moved.index_fill(0, torch.tensor(without, device=xs.device), 0), True


add_rule(
    name="ppermute",
    moves=True,
    stacked=_moved,
    alone=lambda x, static: x if static else torch.zeros_like(x),
    transpose=lambda shape, static: ("ppermute", static[::-1]),  # reversed pairs
    arguments=lambda static: static,
)


@public("split_dim", "concat_dim", "tiled", "splits", "axis_index_groups")
def all_to_all(
    value: Tree,
    split_dim: int,
    concat_dim: int,
    axis: Any = None,
    *,
    tiled: bool = True,
    splits: Sequence[int] | Literal["infer"] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> Tree:
    """Exchange parts: each rank's chunk r of dimension `split_dim` goes to rank r.

    Args:
        value: tree of tensors; ``shape[split_dim]`` must be a multiple of the axis' size n.
        split_dim: the dimension that is cut into n equal chunks.
        concat_dim: the dimension along which the n chunks that arrive are concatenated, in the order of their sources.
        axis: as in :func:`ltx.psum`.
        tiled: False, the default of ``jax.lax.all_to_all``: ``shape[split_dim]`` must be n; that dimension is removed,
            and a new one of size n, for the sources, is inserted at `concat_dim` of the rest.
        splits: the lengths of this rank's n chunks, which add up to ``shape[split_dim]``. The ranks send each other
            their splits at every call; not on simulated ranks or in compiled graphs. "infer": chunks are as equal as
            possible, the first ones longer by one, and ``shape[split_dim]`` may differ between ranks; simulated ranks
            need a multiple of n.
        axis_index_groups: as in :func:`ltx.psum`, of equal sizes n: chunk r goes to the r-th rank of the group.

    Returns:
        What each rank sees: a tree of new tensors with ``split_dim`` n times shorter and ``concat_dim`` n times longer.
        With `splits`: that tree, and a tuple of ints: the lengths of the parts that came from each rank.

    Gradient:
        all_to_all(ȳ, concat_dim, split_dim); with `splits` each part goes back to its source.

    Raises:
        AxisError: `axis` isn't in scope, or a dimension is out of range or has the wrong size.
        TreeError, RankMismatchError: as in :func:`ltx.psum`; and on every rank if a tensor doesn't fit its `splits`.

    Example:
        >>> import torch, ltx
        >>> x = torch.tensor([[1, 2], [3, 4]])  # row r is rank r's
        >>> ltx.vmap(lambda x: ltx.all_to_all(x, 0, 0))(x)
        tensor([[1, 3],
                [2, 4]])

    Source: ``jax.lax.all_to_all``, whose `tiled` is False by default; Horovod's ``alltoall`` for `splits`.
    """
    axis = grouped(axis, axis_index_groups, equal="all_to_all")
    if is_uneven(splits, "all_to_all", axis, tiled):
        return all_to_all_uneven(value, split_dim, concat_dim, axis, splits)

    def static(x: torch.Tensor, n: int) -> Static:
        dims = dim_of("all_to_all", x, split_dim, "split_dim"), dim_of("all_to_all", x, concat_dim, "concat_dim")
        fix = 'Pad it, or give splits= or splits="infer".' if tiled else f"tiled=True takes multiples of {n}."
        what = f"all_to_all over {n} ranks{'' if tiled else ' with tiled=False'}"
        check_parts(what, x, split_dim, n, tiled, fix)
        return *dims, int(tiled)

    exchanged = collective("all_to_all", value, axis, static)
    if splits is None:
        return exchanged
    n = axis_size(axis)
    lengths = [x.shape[split_dim] // n for x in tree.flatten(value)[0]]
    if len(set(lengths)) > 1:
        raise AxisError(f"all_to_all: the leaves' chunks have lengths {lengths}, and splits= are those of all of them.")
    return exchanged, (*lengths[:1],) * n


@public()
def ppermute(value: Tree, perm: Iterable[tuple[int, int]], axis: Any = None) -> Tree:
    """Send each rank's tensor to at most one rank.

    Args:
        value: tree of tensors, the same structure, shapes and dtypes on every rank.
        perm: pairs (source, destination) of indices on the axis (not ranks of the world), the same on every rank: a
            list, an array of two columns, or another iterable such as ``zip(sources, destinations)``. No rank may
            occur twice as a source, or twice as a destination.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: the tree of its source; zeros if no pair has this rank as its destination.

    Gradient:
        ppermute(ȳ) with reversed pairs.

    Raises:
        AxisError: `axis` isn't in scope, or `perm` isn't a list of such pairs.
        TreeError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(lambda x: ltx.ppermute(x, [(0, 1), (1, 2)]))(torch.tensor([1.0, 2.0, 3.0]))
        tensor([0., 1., 2.])

    Source: ``jax.lax.ppermute``.
    """
    listed: list[Any] = list(perm) if isinstance(perm, Iterable) and not isinstance(perm, _NO_PAIRS) else [None]
    if not all(isinstance(pair, Iterable) and not isinstance(pair, _NO_PAIRS) for pair in listed):
        hint = " Give perm.items()." if isinstance(perm, Mapping) else ""
        hint = " Give perm.tolist()." if isinstance(perm, torch.Tensor) else hint
        hint = " Write ppermute(value, perm, axis)." if isinstance(perm, str) else hint
        raise AxisError(f"ppermute: perm must be a list of pairs (source, destination), got {shown(perm)}.{hint}")
    pairs = [tuple(int(rank) if is_whole(rank) else rank for rank in pair) for pair in listed]

    def static(x: torch.Tensor, n: int) -> Static:
        for pair in pairs:
            if len(pair) != 2 or not all(isinstance(rank, int) and 0 <= rank < n for rank in pair):
                raise AxisError(
                    f"ppermute: perm holds {brief(pair)}, not a (source, destination) of ranks 0 to {n - 1}. They "
                    "count on the axis, not in the world."
                )
        for what, place in (("source", 0), ("destination", 1)):
            ranks = [pair[place] for pair in pairs]
            if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
                raise AxisError(f"ppermute: rank {twice[0]} is the {what} of more than one pair in {pairs}.")
        return tuple(rank for pair in sorted(pairs) for rank in pair)

    return collective("ppermute", value, axis, static)
