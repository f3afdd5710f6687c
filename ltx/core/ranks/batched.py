"""Ranks in one process that compute as one: entries of a vmap level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ltx.core.base import private
from ltx.core.base.errors import AxisError, UnsupportedError
from ltx.core.ranks.backings import Levels, OfTensors, Part, Ranks, Rule, Stacked, Static, Tensors


@dataclass(frozen=True)
class VmapRanks(Ranks):
    """Ranks are the entries of the batch dimension that functorch's interpreter at a level adds. With `dims`, several
    nested levels make one axis. functorch takes the innermost off first: dimensions of levels that are off are in front
    of the tensors, the outermost level's first.
    """

    levels: Levels
    part_of: Part | None = None  # the dimension holds several axes side by side, and this is one of them
    dims: tuple[tuple[int, int], ...] = ()  # each level's (place in `levels`, size), outermost first in ranks' order
    device: torch.device | None = None  # the mapped tensors' device, on which rank numbers are made

    def at(self, levels: Levels) -> VmapRanks:
        """The same ranks at other levels, as many."""
        # vmap of a call that vmap has batched leaves two levels for one axis, of which the inner one has the ranks
        return replace(self, levels=levels if self.dims else Levels(levels.numbers[-1:], levels.taken))

    @property
    def order(self) -> list[int]:
        """The permutation that brings dimensions sorted by level into the order of the axis' ranks."""
        return [place for place, _ in self.dims]

    def unstacked(self, xs: torch.Tensor) -> torch.Tensor:
        """`xs`, whose first dimension is that of all ranks, with one for each level in its place."""
        if not self.dims:
            return xs
        count, order = len(self.dims), self.order
        by_dim: torch.Tensor = xs.unflatten(0, [size for _, size in self.dims])
        return by_dim.permute(*(order.index(i) for i in range(count)), *range(count, by_dim.ndim))

    def batched(self, xs: torch.Tensor) -> torch.Tensor:
        """A vector with one entry for each rank as a batched 0-dim value, at each level that isn't taken off."""
        by_level = self.unstacked(xs)
        for _ in range(self.levels.taken):  # the value is the same on the ranks of these levels
            by_level = by_level[..., 0]
        by_level = private.unwrapped(by_level)  # new tensors are wrapped for the innermost level
        for level in self.levels.left:
            by_level = private.add_batch_dim(by_level, 0, level)
        return by_level

    def index(self, size: int) -> torch.Tensor:
        if self.part_of is None:
            return self.batched(torch.arange(size, device=self.device))
        return self.batched(self.part_of.places.to(self.device))

    @property
    def ended(self) -> str:
        here = private.maybe_current_level() or 0
        return "the ltx.vmap that opened it has ended" if self.levels.left[-1] > here else ""

    def least(self, size: int) -> int:
        return size if self.part_of is None else min(self.part_of.sizes)

    def part(self, name: str, part: Part) -> tuple[int, Ranks]:
        return max(part.sizes), replace(self, part_of=part if self.part_of is None else part.within(self.part_of))

    def need(self, what: str, said: str) -> None:
        if what != "whole" or self.part_of is not None:
            raise (AxisError if what == "objects" else UnsupportedError)(said)

    def by_rank(self, signature: Any, f: OfTensors = lambda xs, apart: None, tensors: Tensors = ()) -> list[Any]:
        """If this is a part, `f` runs once for each place in it, on a stack of all parts' values at this place."""
        split = [self._split(x) for x in tensors]
        apart, sizes = [dim is not None for _, dim in split], {x.shape[dim] for x, dim in split if dim is not None}
        if not sizes:
            return [f([x for x, _ in split], apart)]
        groups = [range(*sizes)] if self.part_of is None else self.part_of.groups
        rows = []
        for place in range(max(map(len, groups))):
            here = [group[min(place, len(group) - 1)] for group in groups]
            at: Any = here[0] if self.part_of is None else torch.tensor(here, device="cpu")
            rows.append(f([x if dim is None else x.movedim(dim, 0)[at] for x, dim in split], apart))
        return rows

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """The unwrapped tensor of `x`, and its dimension for the ranks; None if the ranks share one value."""
        if not self.dims:
            return below_wrappers(x, self.levels.numbers[0])
        found = [below_wrappers(x, self.levels.numbers[place]) for place in self.order]
        value, dims = found[0][0], [dim for _, dim in found]
        here = [dim for dim in dims if dim is not None]
        if not here:
            return value, None
        value = value.movedim(here, list(range(len(here))))
        for place, (dim, (_, size)) in enumerate(zip(dims, self.dims, strict=True)):
            if dim is None:
                value = value.unsqueeze(place).expand(*value.shape[:place], size, *value.shape[place:])
        return value.flatten(0, len(dims) - 1), 0

    def collective(self, rule: Rule, static: Static, xs: Tensors, compiled: bool) -> tuple[torch.Tensor, ...]:
        raise AssertionError("the vmap rule of a collective takes their level off before")

    def on_stack(self, rule: Rule, static: Static, n: int, xs: torch.Tensor) -> Stacked:
        """Once all levels are taken off: the rule's `stacked` on all `n` ranks' values."""
        part = self.part_of
        if self.dims:
            count = len(self.dims)
            of_ranks = xs.permute(*self.order, *range(count, xs.ndim)).flatten(0, count - 1)
            y, per_rank = replace(self, dims=()).on_stack(rule, static, n, of_ranks)
            # Every level gave a dimension, so every level gets one back.
            return self.unstacked(y if per_rank else y.expand(n if part is None else sum(part.sizes), *y.shape)), True
        if part is None:
            return rule.stacked(xs, n, static)
        by_group = torch.cat(
            [
                y if per_rank else y.expand(len(group), *y.shape)
                for group in part.groups
                for y, per_rank in [rule.stacked(xs[torch.tensor(group, device=xs.device)], len(group), static)]
            ]
        )
        return by_group[part.order.to(xs.device)], True


def below_wrappers(x: torch.Tensor, level: int) -> tuple[torch.Tensor, int | None]:
    """The unwrapped tensor of `x`, and its dimension that vmap maps at `level`."""
    dim: int | None = None
    while private.is_wrapped(x):
        if private.is_batched(x):
            here = private.batch_dim_of(x)
            if private.level_of(x) == level:
                dim = here
            elif dim is not None and here <= dim:
                dim += 1
        x = private.unwrapped_once(x)
    return x.detach(), dim


def in_front(size: int, xs: Tensors, dims: Sequence[int | None]) -> list[torch.Tensor]:
    """`xs` with the dimension of a vmap level in front; tensors without it are expanded to all `size` entries."""
    return [x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in zip(xs, dims, strict=True)]
