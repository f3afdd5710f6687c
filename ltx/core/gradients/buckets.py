"""Buckets: which gradients travel together, and in which order.

The plan is a pure function of shapes, dtypes and sizes, so every rank makes the same one. Buckets are launched in the
order of the plan, whatever the order in which they become ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch

#: Of so many elements the call costs more than the copy.
_SMALL = 1 << 13


@dataclass(frozen=True)
class Leaf:
    """A gradient, as the plan sees it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Gradients of one dtype on one device that are reduced as one flat buffer.

    Attributes:
        index: its place in the order of launches.
        members: positions of its leaves among all that are reduced.
        leaves: their shapes, in the order in which they lie in the flat buffer.
    """

    index: int
    members: tuple[int, ...]
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, index: int, tensors: Sequence[torch.Tensor]) -> Bucket:
        """That of all `tensors`."""
        return cls(index, tuple(range(len(tensors))), tuple(Leaf(t.shape, t.dtype, t.device) for t in tensors))

    @property
    def dtype(self) -> torch.dtype:
        return self.leaves[0].dtype

    @property
    def device(self) -> torch.device:
        return self.leaves[0].device

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each leaf."""
        return [leaf.numel for leaf in self.leaves]

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(first leaf, end) of runs of leaves that are best copied together: several small ones, or one large one."""
        runs: list[tuple[int, int]] = []
        for place, size in enumerate(self.sizes):
            if size <= _SMALL and runs and self.sizes[runs[-1][0]] <= _SMALL:
                runs[-1] = (runs[-1][0], place + 1)
            else:
                runs.append((place, place + 1))
        return runs


@lru_cache(maxsize=256)
def plan_buckets(
    leaves: tuple[Leaf, ...],
    arrival: tuple[int, ...],
    bucket_bytes: int,
    first_bucket_bytes: int,
    groups: tuple[int, ...] = (),
) -> tuple[Bucket, ...]:
    """Fill buckets with `leaves` in the order `arrival` in which their gradients are expected.

    A bucket is closed before it would exceed its size; a larger leaf has a bucket of its own. The first bucket is
    small, so that communication starts early. A bucket holds one dtype on one device. The leaves of a group have a
    bucket of their own, whatever their sizes.

    Args:
        leaves: the gradients.
        arrival: positions into `leaves`.
        bucket_bytes, first_bucket_bytes: sizes in bytes of the gradients.
        groups: for each leaf the number of its group, -1 for none; empty if there are no groups.

    Returns:
        Buckets in the order of launches, which is the order in which their last gradients are expected.
    """
    open_members: dict[tuple[torch.dtype, torch.device, int], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device, int], int] = {}
    closed: list[list[int]] = []
    for position in arrival:
        leaf = leaves[position]
        group = groups[position] if groups else -1
        kind = (leaf.dtype, leaf.device, group)
        limit = bucket_bytes if closed else first_bucket_bytes
        if group < 0 and open_members.get(kind) and filled[kind] + leaf.nbytes > limit:
            closed.append(open_members.pop(kind))
        if kind not in open_members:
            open_members[kind], filled[kind] = [], 0
        open_members[kind].append(position)
        filled[kind] += leaf.nbytes
    closed.extend(open_members.values())
    due = {position: place for place, position in enumerate(arrival)}
    closed.sort(key=lambda members: max(due[position] for position in members))
    return tuple(
        Bucket(index, tuple(members), tuple(leaves[position] for position in members))
        for index, members in enumerate(closed)
    )
