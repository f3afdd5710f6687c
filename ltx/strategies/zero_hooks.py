"""The reductions of ZeRO: each rank gets the mean of its part, and every rank gets all updated parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ltx import tree
from ltx.axis import Axis
from ltx.errors import StrategyError
from ltx.gradients.buckets import Bucket
from ltx.gradients.reduction import BucketInput, CollectiveRequest, Reduced, Reduction
from ltx.hooks import CommHook
from ltx.strategies.post_update import Old, PostUpdateHook, PostUpdateResult
from ltx.tree import register_node
from ltx.typing import Tree


@dataclass(frozen=True)
class Shards:
    """One rank's part of an optimizer state; made by :class:`ltx.ZeroStrategy`.

    Paths name the part ("opt_state.shard_0_of_2.per_param.w.exp_avg"), so that parts of different ranks don't collide
    in a checkpoint as if they were one value.

    Attributes:
        state: the optimizer's own state of this rank's parts of the parameters, each a vector.
        ranks: how many parts there are; 1 for a state that is whole.
        rank: which of them this is; None on simulated ranks, where it is all of them.
    """

    state: Tree
    ranks: int
    rank: int | None

    @property
    def name(self) -> str:
        """What paths call it."""
        return f"shard_{'r' if self.rank is None else self.rank}_of_{self.ranks}"


register_node(
    Shards,
    lambda shards: ((shards.state,), (shards.ranks, shards.rank)),
    lambda children, static: Shards(children[0], *static),
    lambda shards: (shards.name,),
)


def width(numel: int, ranks: int) -> int:
    """Elements of each part of a parameter."""
    return -(-numel // ranks)


def part(x: Tensor, rank: int | Tensor, ranks: int) -> Tensor:
    """x[rank], a vector: a view where all of it is there. `rank` is a tensor on simulated ranks."""
    m, flat = width(x.numel(), ranks), x.reshape(-1)
    if isinstance(rank, int):
        mine = flat[rank * m : (rank + 1) * m]
        return mine if mine.numel() == m else pad(mine, (0, m - mine.numel()))
    return _rows(flat, ranks).index_select(0, rank.reshape(1)).squeeze(0)


def _rows(flat: Tensor, ranks: int) -> Tensor:
    """All parts: (ranks, width); a view where nothing is to be padded."""
    missing = width(flat.numel(), ranks) * ranks - flat.numel()
    return (pad(flat, (0, missing)) if missing else flat).view(ranks, -1) if flat.numel() else flat.view(ranks, 0)


@dataclass(frozen=True)
class MeanPart(CommHook):
    """Reduce-scatter: rank r gets the r-th part of every gradient's mean, in its place, and zeros around it.

    Args:
        short: the half precision that gradients travel in; None for their own.
    """

    elementwise: ClassVar[bool] = False
    sums: ClassVar[bool] = False

    short: torch.dtype | None = None

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.short is None

    def cast(self, dtype: torch.dtype) -> Self:
        return replace(self, short=dtype)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.short is None or dtype.itemsize < 4 or dtype.is_complex else self.short

    def reduce(self, inputs: BucketInput) -> Reduction:
        if not inputs.flat.numel():
            return inputs.flat, inputs.states
        mine = yield CollectiveRequest("psum_scatter", _side_by_side(inputs))
        placed = _placed_eagerly if isinstance(inputs.rank, int) else _placed
        return placed(mine, inputs), inputs.states


def _side_by_side(inputs: BucketInput) -> Tensor:
    """The parts of all parameters of a bucket, a row for each rank: one pass, and none over one large parameter."""
    blocks = [_rows(flat, inputs.axis_size) for flat in inputs.flat.split(inputs.bucket.sizes)]
    return torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]


def _placed_eagerly(mine: Tensor, inputs: BucketInput) -> Tensor:
    """The parts `mine` of this rank in a flat bucket of zeros."""
    n, sizes, flat, rank = inputs.axis_size, inputs.bucket.sizes, mine.new_zeros(inputs.bucket.numel), int(inputs.rank)
    widths = [width(size, n) for size in sizes]
    for whole, own, m in zip(flat.split(sizes), mine.split(widths), widths, strict=True):
        there = whole[rank * m : (rank + 1) * m]
        there.copy_(own[: there.numel()])
    return flat


def _placed(mine: Tensor, inputs: BucketInput) -> Tensor:
    """:func:`_placed_eagerly` for simulated ranks, where nothing is written into."""
    n, sizes = inputs.axis_size, inputs.bucket.sizes
    here = (torch.arange(n, device=mine.device) == inputs.rank)[:, None]
    rows = torch.where(here, mine, torch.zeros_like(mine))
    blocks = rows.split([width(size, n) for size in sizes], 1)
    return torch.cat([block.reshape(-1)[:size] for block, size in zip(blocks, sizes, strict=True)])


@dataclass(frozen=True)
class AllParts(CommHook):
    """All-gather: of vectors of m elements, those of all ranks, as (ranks, m)."""

    elementwise: ClassVar[bool] = False
    sums: ClassVar[bool] = False

    def scale(self, axis_size: int) -> float:
        return 1.0

    def output_bucket(self, bucket: Bucket, axis_size: int) -> Bucket:
        return replace(
            bucket, leaves=tuple(replace(leaf, shape=torch.Size((axis_size, *leaf.shape))) for leaf in bucket.leaves)
        )

    def reduce(self, inputs: BucketInput) -> Reduction:
        if not inputs.flat.numel():
            return inputs.flat, inputs.states
        rows = yield CollectiveRequest("all_gather", inputs.flat)
        sizes = inputs.bucket.sizes
        if len(sizes) == 1:
            return rows.reshape(-1), inputs.states
        if not isinstance(inputs.rank, int):
            return torch.cat([block.reshape(-1) for block in rows.split(sizes, 1)]), inputs.states
        flat = rows.new_empty(rows.numel())  # the same in one pass
        for whole, block in zip(flat.split([len(rows) * m for m in sizes]), rows.split(sizes, 1), strict=True):
            whole.view(block.shape).copy_(block)
        return flat, inputs.states


@dataclass(frozen=True)
class PartUpdated(MeanPart, PostUpdateHook):
    """Reduce-scatter of gradients, the optimizer on this rank's part, all-gather of the new parameters."""

    phases: ClassVar[int] = 2
    shares_gradients: ClassVar[bool] = True

    def part(self, param: Tensor, axis: Axis) -> Tensor:
        return part(param, axis.rank, axis.size)

    def own(self, opt_state: Shards, axis: Axis) -> Tree:
        # Its own, also where it is a part of a whole one.
        return (
            own_state(opt_state, axis)
            if opt_state.ranks == axis.size
            else tree.map(torch.clone, own_state(opt_state, axis))
        )

    def held(self, opt_state: Tree, axis: Axis) -> Shards:
        return as_shards(opt_state, axis)

    def reduce(self, inputs: BucketInput) -> Reduction:
        n, sizes, update = inputs.axis_size, inputs.bucket.sizes, inputs.update
        assert update is not None
        widths = [width(size, n) for size in sizes]
        if not inputs.flat.numel():
            update([inputs.flat.to(inputs.bucket.dtype)] * len(sizes))
            return inputs.flat, ()
        mine = yield CollectiveRequest("psum_scatter", _side_by_side(inputs))
        given = update(mine.to(inputs.bucket.dtype).split(widths))
        rows = yield CollectiveRequest("all_gather", torch.cat(given) if len(given) > 1 else given[0])
        return rows, ()

    def finish_bucket(self, bucket: Bucket, reduced: Reduced, old: Old) -> PostUpdateResult:
        if not bucket.numel:
            return PostUpdateResult(old.params, old.states)
        blocks = reduced[0].split([width(size, old.axis_size) for size in bucket.sizes], 1)
        if old.may_overwrite:
            return PostUpdateResult(old.params, old.states, partial(_joined, blocks, old.params))
        return PostUpdateResult([_whole(block, x) for block, x in zip(blocks, old.params, strict=True)], old.states)


def _whole(parts: Tensor, like: Tensor) -> Tensor:
    """A parameter of the shape of `like` from the parts of all ranks; a view."""
    return parts.reshape(-1)[: like.numel()].view(like.shape)


def _joined(blocks: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """The parts of all ranks, each a row, into the parameters that they are of."""
    for block, param in zip(blocks, params, strict=True):
        flat, m = param.view(-1), block.shape[1]
        whole = flat.numel() // m if m else 0  # rows that have nothing filled up
        flat[: whole * m].view(whole, m).copy_(block[:whole])
        if whole < len(block):
            flat[whole * m :].copy_(block[whole:].reshape(-1)[: flat.numel() - whole * m])


def own_parts(tensors: Tree, axis: Axis) -> Tree:
    """This rank's part of every leaf."""
    rank = axis.rank
    return tree.map(lambda x: part(x, rank, axis.size), tensors)


def as_shards(state: Tree, axis: Axis) -> Shards:
    rank = axis.rank
    return Shards(state, axis.size, rank if isinstance(rank, int) else None)


def own_state(shards: Shards, axis: Axis) -> Tree:
    """This rank's part of an optimizer state: what it holds, or its part of a whole one."""
    if (shards.ranks, shards.rank) == (axis.size, as_shards((), axis).rank):
        return shards.state
    if shards.ranks > 1:
        raise StrategyError(
            f"ZeroStrategy: this optimizer state is {shards.name}, and here is rank {axis.rank} of {axis.size}. For "
            "another number of ranks gather it first, where it was made: state = train.gather(state)."
        )
    rank = axis.rank
    return tree.map(lambda x: part(x, rank, axis.size) if x.ndim == 1 else x, shards.state)
