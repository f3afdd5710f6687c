"""What the ranks of an axis are: processes, threads that take turns, entries of a vmap level, or shapes alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch._C import _functorch


@dataclass(frozen=True)
class GroupBacking:
    """Ranks are processes: this one's index on the axis, and its communicator (:class:`ltx.core.comm.AxisComm`)."""

    rank: int
    comm: Any = field(repr=False)


@dataclass(frozen=True)
class ThreadBacking:
    """Ranks are threads of this process that take turns: this one's index on the axis, and its communicator
    (:class:`ltx.core.comm.ThreadComm`)."""

    rank: int
    comm: Any = field(repr=False)


@dataclass(frozen=True)
class Part:
    """Which ranks of an axis belong together: each group of them is an axis of its own.

    Attributes:
        groups: the ranks of each group, in the order of its axis. Every rank is in one of them.
    """

    groups: tuple[tuple[int, ...], ...]

    @property
    def world(self) -> int:
        """The number of ranks of all groups."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The number of ranks of each group."""
        return [len(group) for group in self.groups]

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` belongs to, in order."""
        return next(group for group in self.groups if rank in group)

    def place(self, rank: int) -> int:
        """Where among those that it belongs to a rank is."""
        return self.members(rank).index(rank)

    def by_rank(self, entries: Iterable[Iterable[int]]) -> torch.Tensor:
        """A vector with one entry for each rank, from `entries` by group and place."""
        rows = zip(self.groups, entries, strict=True)
        of = {rank: entry for group, row in rows for rank, entry in zip(group, row, strict=True)}
        return torch.tensor([of[rank] for rank in range(self.world)])

    @property
    def order(self) -> torch.Tensor:
        """Where each rank is if the groups lie one after the other."""
        ends = itertools.accumulate(self.sizes)
        return self.by_rank(range(end - size, end) for size, end in zip(self.sizes, ends, strict=True))

    def within(self, outer: Part) -> Part:
        """This part of each group of `outer`, as a part of the axis that `outer` is one of."""
        return Part(tuple(tuple(group[i] for i in mine) for group in outer.groups for mine in self.groups))


@lru_cache(maxsize=64)
def mesh_part(sizes: tuple[int, ...], dims: tuple[int, ...]) -> Part:
    """The ranks of a mesh whose places differ only along `dims`, the first the outermost.

    Args:
        sizes: of the mesh's axes, outermost first.
        dims: the places in `sizes` of the axes that are joined.
    """
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]

    def ranks(along: Iterable[int]) -> list[int]:
        steps = [[i * strides[dim] for i in range(sizes[dim])] for dim in along]
        return [sum(step) for step in itertools.product(*steps)]

    others = [dim for dim in range(len(sizes)) if dim not in dims]
    return Part(tuple(tuple(first + step for step in ranks(dims)) for first in ranks(others)))


@dataclass(frozen=True)
class VmapBacking:
    """Ranks are the entries of the batch dimension that functorch's interpreter at `level` adds.

    With a `part` that dimension holds several axes side by side.

    Several nested levels make one axis if there are `dims`: (level, size) of each, the first the outermost in the
    order of ranks. functorch takes the innermost level off first. Those above `level` are off already; their
    dimensions are in front of the tensors, the outermost level's first.

    Where tensors are made of the ranks' numbers, they are made on `device`: that of what is mapped.
    """

    level: int
    part: Part | None = None
    dims: tuple[tuple[int, int], ...] = ()
    device: torch.device | None = None

    @property
    def levels(self) -> list[int]:
        """All of its levels, the outermost first."""
        return sorted(level for level, _ in self.dims) or [self.level]

    @property
    def below(self) -> VmapBacking | None:
        """What is left once `level` is off; None if it was the last one."""
        levels = [level for level, _ in self.dims if level < self.level]
        return replace(self, level=max(levels)) if levels else None

    def at(self, levels: Sequence[int]) -> VmapBacking:
        """The same with other `levels` for its own, the outermost first; of the whole, if this is a part."""
        dims = tuple((levels[self.levels.index(level)], size) for level, size in self.dims)
        return replace(self, level=max(levels), part=None, dims=dims)

    @property
    def taken(self) -> int:
        """The number of dimensions in front of the tensors: those of levels that are off."""
        return sum(level > self.level for level, _ in self.dims)

    @property
    def order(self) -> list[int]:
        """The order in which the dimensions of all levels, as they lie by level, are the axis' ranks."""
        return [self.levels.index(level) for level, _ in self.dims]

    def stacked(self, xs: torch.Tensor) -> torch.Tensor:
        """`xs`, with a dimension for each level in front, with one for the ranks of all."""
        if not self.dims:
            return xs
        count = len(self.dims)
        return xs.permute(*self.order, *range(count, xs.ndim)).flatten(0, count - 1)

    def unstacked(self, xs: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`stacked`."""
        if not self.dims:
            return xs
        count, order = len(self.dims), self.order
        by_dim: torch.Tensor = xs.unflatten(0, [size for _, size in self.dims])
        return by_dim.permute(*(order.index(i) for i in range(count)), *range(count, by_dim.ndim))

    def batched(self, xs: torch.Tensor) -> torch.Tensor:
        """A vector with one entry for each rank, as what each has: 0-dim, and batched at each level that isn't off."""
        by_level = self.unstacked(xs)
        for _ in range(self.taken):  # those levels' ranks don't matter to what is left
            by_level = by_level[..., 0]
        by_level = unwrapped(by_level)  # what factories make is wrapped for the innermost level, which may not be ours
        for level in self.levels:
            if level <= self.level:
                by_level = _functorch._add_batch_dim(by_level, 0, level)
        return by_level


@dataclass(frozen=True, eq=False)
class MetaBacking:
    """There are no ranks, and tensors have no values (the meta device): what would be sent is asked of `answer`.

    Attributes:
        rank: the one that is looked at.
        answer: ``(operation, buffer, arguments, axis)`` -> what that collective would give.
        exchange: makes a strategy's exchanges in place of :class:`ltx.core.gradients.pending.Exchange`, if given:
            ``(plan, tensors, states, background, paths)``.
        part: for a part of an axis, the ranks of the whole that it has.
    """

    rank: int
    answer: Callable[[str, torch.Tensor, tuple[int, ...], Any], torch.Tensor] = field(repr=False)
    exchange: Callable[..., Any] | None = field(default=None, repr=False)
    part: tuple[int, ...] = ()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without the wrappers of torch.func's levels."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
