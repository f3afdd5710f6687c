"""The parts of ZeRO: how tensors are cut among ranks, a rank's part of a state, and the hooks that move parts.

x[r], the r-th part of a tensor: flattened and padded with zeros, it has n parts of ceil(size / n) elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ltx.errors import StrategyError
from ltx.extend import (
    Axis,
    Bucket,
    BucketInput,
    CollectiveRequest,
    Old,
    Packing,
    PostUpdateHook,
    PostUpdateResult,
    Reduced,
    Reduction,
    buffers,
    tree,
)
from ltx.hooks import AllReduce, CommHook
from ltx.hooks.combined import After, in_half
from ltx.hooks.lossy import CompressedAllReduce, finite, with_residuals
from ltx.typing import Tree


@dataclass(frozen=True)
class Shards:
    """One rank's part of an optimizer state; made by :class:`ltx.ZeroStrategy`.

    Paths name the part ("opt_state.shard_0_of_2.per_param.w.exp_avg"), so parts don't collide in a checkpoint.
    """

    state: Tree  # the optimizer's state for this rank's parts of the parameters, which are vectors
    ranks: int  # the number of parts; 1 for a whole state
    rank: int | None  # the rank whose part this is; None on simulated ranks, which hold all parts together

    @property
    def name(self) -> str:
        return f"shard_{'r' if self.rank is None else self.rank}_of_{self.ranks}"


@dataclass(frozen=True)
class CodedShards(Shards):
    """:class:`Shards` of a strategy with a lossy hook, with what this rank hasn't sent yet of its part."""

    unsent: Tree  # vectors as the parameters' parts


tree.register_node(
    Shards,
    lambda shards: ((shards.state,), (shards.ranks, shards.rank)),
    lambda children, static: Shards(children[0], *static),
    lambda shards: (shards.name,),
)
tree.register_node(
    CodedShards,
    lambda shards: ((shards.state, shards.unsent), (shards.ranks, shards.rank)),
    lambda children, static: CodedShards(children[0], static[0], static[1], children[1]),
    lambda shards: (shards.name, f"{shards.name}.unsent"),
)


def width(numel: int, ranks: int) -> int:
    """The number of elements of each part of a parameter."""
    return -(-numel // ranks)


def part(x: Tensor, rank: int | Tensor, ranks: int) -> Tensor:
    """x[rank], a vector; a view unless it needs padding. `rank` is a tensor on simulated ranks."""
    m, flat = width(x.numel(), ranks), x.reshape(-1)
    if isinstance(rank, int):
        mine = flat[rank * m : (rank + 1) * m]
        return mine if mine.numel() == m else pad(mine, (0, m - mine.numel()))
    return _rows(flat, ranks).index_select(0, rank.reshape(1)).squeeze(0)


def _rows(flat: Tensor, ranks: int) -> Tensor:
    """All parts, of shape (ranks, width); a view unless they need padding."""
    missing = width(flat.numel(), ranks) * ranks - flat.numel()
    return (pad(flat, (0, missing)) if missing else flat).view(ranks, -1) if flat.numel() else flat.view(ranks, 0)


@dataclass(frozen=True)
class MeanPart(CommHook):
    """Reduce-scatter: rank r gets the r-th part of every mean gradient, in its place, and zeros elsewhere."""

    alike: ClassVar[bool] = False
    sums: ClassVar[bool] = False

    short: torch.dtype | None = None  # the half-precision dtype in which gradients are sent; None for their own dtype

    @property
    def exact(self) -> bool:
        return self.short is None

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        narrow = dtype if self.short is None or dtype.itemsize < 4 or dtype.is_complex else self.short
        return Packing(narrow, 1.0 / axis_size, 1.0 / axis_size)

    def reduce(self, inputs: BucketInput) -> Reduction:
        if not inputs.flat.numel():
            return inputs.flat, inputs.states
        return _placed((yield CollectiveRequest("psum_scatter", _side_by_side(inputs))), inputs), inputs.states


in_half.register(MeanPart, lambda hook, dtype: replace(hook, short=dtype))


@dataclass(frozen=True)
class Coded(CommHook):
    """The base of hooks that send messages of `codec`."""

    exact: ClassVar[bool] = False
    sums: ClassVar[bool] = False

    codec: CompressedAllReduce

    @property
    def reads_step(self) -> bool:
        return bool(self.codec.reads_step)


@dataclass(frozen=True)
class CodedPart(Coded):
    """As :class:`MeanPart`, in messages: rank r gets the r-th part of the sum of what ranks sent."""

    alike: ClassVar[bool] = False

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.codec.state_names

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return self.codec.packing(dtype, axis_size)

    def reduce(self, inputs: BucketInput) -> Reduction:
        if not inputs.flat.numel():
            return inputs.flat, inputs.states
        codec, rows = self.codec, _side_by_side(inputs)
        m, keep = rows.shape[1], codec.error_feedback
        rows = torch.stack([_in_blocks(codec, row) for row in rows])
        in_place = keep and buffers.is_plain(rows)
        mine, sent = yield from codec.sum_of_rows(rows, codec.keys(inputs)[0], keep, in_place)
        flat, states = _placed(mine[:m], inputs), inputs.states
        if keep:
            left = _in_order(rows if sent is None else rows - sent, inputs)
            states = with_residuals(states, finite(left), inputs.bucket)
        return flat, states


in_half.register(CodedPart, lambda hook, dtype: in_half(hook.codec, dtype))


def in_messages(hook: CommHook) -> bool:
    """Whether ZeRO can send what `hook` sends."""
    return isinstance(hook, AllReduce | CompressedAllReduce) or (
        isinstance(hook, After) and all(map(in_messages, hook.members))
    )


def _in_blocks(codec: CompressedAllReduce, row: Tensor) -> Tensor:
    """A row with the padding of a last block."""
    length = -(-len(row) // codec.multiple()) * codec.multiple()
    return codec.filled(row, length, length)


def _side_by_side(inputs: BucketInput) -> Tensor:
    """The parts of all parameters of a bucket, a row for each rank. One copy; none for a single large parameter."""
    blocks = [_rows(flat, inputs.axis_size) for flat in inputs.flat.split(inputs.bucket.sizes)]
    return torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]


def _placed(mine: Tensor, inputs: BucketInput) -> Tensor:
    """A flat bucket of zeros with this rank's parts, `mine`, in their places."""
    n, sizes, rank = inputs.axis_size, inputs.bucket.sizes, inputs.rank
    widths = [width(size, n) for size in sizes]
    if not isinstance(rank, int):  # simulated ranks can't write in place
        rows = torch.where((torch.arange(n, device=mine.device) == rank)[:, None], mine, torch.zeros_like(mine))
        return _in_order(rows, inputs)
    flat = mine.new_zeros(inputs.bucket.numel)
    for whole, own, m in zip(flat.split(sizes), mine.split(widths), widths, strict=True):
        there = whole[rank * m : (rank + 1) * m]
        there.copy_(own[: there.numel()])
    return flat


def _in_order(rows: Tensor, inputs: BucketInput) -> Tensor:
    """A flat bucket from the parts of all ranks, as :func:`_side_by_side` lays them out."""
    widths = [width(size, inputs.axis_size) for size in inputs.bucket.sizes]
    blocks = zip(rows[:, : sum(widths)].split(widths, 1), inputs.bucket.sizes, strict=True)
    return torch.cat([block.reshape(-1)[:size] for block, size in blocks])


@dataclass(frozen=True)
class PartUpdated(MeanPart, PostUpdateHook):
    """Reduce-scatters gradients, updates this rank's part, and all-gathers the new parameters."""

    phases: ClassVar[int] = 2
    shares_gradients: ClassVar[bool] = True

    def part(self, param: Tensor, axis: Axis) -> Tensor:
        return part(param, axis.rank, axis.size)

    def own(self, opt_state: Shards, axis: Axis) -> Tree:
        mine = own_shards(opt_state, axis).state
        # A part of a whole state is a view: this rank needs a copy of its own.
        return mine if opt_state.ranks == axis.size else tree.map(torch.clone, mine)

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
        blocks = reduced[0].split([width(x.numel(), old.axis_size) for x in old.params], 1)
        if old.may_overwrite:
            return PostUpdateResult(old.params, old.states, partial(_joined, blocks, old.params))
        return PostUpdateResult([whole(block, x) for block, x in zip(blocks, old.params, strict=True)], old.states)


@dataclass(frozen=True)
class AllParts(PartUpdated):
    """Only all-gathers the new parameters: gradients were reduced before, and the optimizer has run."""

    phases: ClassVar[int] = 1
    shares_gradients: ClassVar[bool] = False

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return super().packing(dtype, axis_size)._replace(scale=1.0)

    def reduce(self, inputs: BucketInput) -> Reduction:
        return (yield CollectiveRequest("all_gather", inputs.flat)), ()


@dataclass(frozen=True)
class CodedParts(Coded):
    """Gathers the messages of all ranks; the result is what they hold, a row for each rank."""

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return Packing(self.codec.packing(dtype, axis_size).dtype, 1.0, None)

    def reduce(self, inputs: BucketInput) -> Reduction:
        codec, flat = self.codec, inputs.flat
        if not flat.numel():
            return flat.new_zeros((inputs.axis_size, 0)), ()
        row = _in_blocks(codec, flat)
        messages = yield CollectiveRequest("all_gather", codec.encode(row[None], codec.keys(inputs)[1])[0])
        return codec.decode(messages, len(row), row.dtype)[:, : len(flat)], ()


def whole(parts: Tensor, like: Tensor) -> Tensor:
    """A tensor of the shape of `like` from all ranks' parts, which may be columns of a bucket."""
    return parts.contiguous().view(-1)[: like.numel()].view(like.shape)  # contiguous: a column of a bucket has strides


def _joined(blocks: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Copy the parts of all ranks, one row each, into their parameters."""
    for block, param in zip(blocks, params, strict=True):
        flat, m = param.view(-1), block.shape[1]
        full = flat.numel() // m if m else 0  # the number of rows without padding
        flat[: full * m].view(full, m).copy_(block[:full])
        if full < len(block):
            flat[full * m :].copy_(block[full:].reshape(-1)[: flat.numel() - full * m])


def own_parts(tensors: Tree, axis: Axis, split: Callable[[Tensor], bool] = lambda x: True) -> Tree:
    """This rank's part of every leaf for which `split` is true; other leaves stay."""
    return tree.map(lambda x, rank=axis.rank: part(x, rank, axis.size) if split(x) else x, tensors)


def as_shards(state: Tree, axis: Axis) -> Shards:
    return Shards(state, axis.size, axis.rank if isinstance(axis.rank, int) else None)


def own_shards(shards: Shards, axis: Axis) -> Shards:
    """This rank's part of an optimizer state, which may be this part already, or a whole state."""
    here = as_shards((), axis)
    if (shards.ranks, shards.rank) == (here.ranks, here.rank):
        return shards
    if shards.ranks > 1:
        raise StrategyError(
            f"ZeroStrategy: this optimizer state is {shards.name}, and this rank's is {here.name}. For other "
            "ranks, or another number of them, gather it first, where it was made: state = train.gather(state)."
        )
    mine: Shards = own_parts(shards, axis, lambda x: x.ndim == 1)
    return replace(mine, ranks=here.ranks, rank=here.rank)
