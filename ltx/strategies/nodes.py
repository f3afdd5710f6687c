"""Nodes: strategies and hooks that communicate within nodes and between nodes (Bagua's "hierarchical").

    1. Each rank of a node gets its part of the sum, or mean, over the node.        (psum_scatter within the node)
    2. Ranks with the same part apply the algorithm to it.        (among nodes)
    3. Every rank of a node gets all parts.                                         (all_gather within the node)

Bagua instead has one leader per node. With parts, a node sends as much, and all of its ranks share the work.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch

from ltx.errors import StrategyError
from ltx.extend import Axis, Bucket, Packing, Strategy, arguments, around, drive_within, inner, needs, outer, tree
from ltx.hooks import BucketInput, CollectiveRequest, CommHook, Reduction
from ltx.hooks.combined import in_half
from ltx.hooks.plain import EXACT
from ltx.optim import Optimizer
from ltx.typing import Tree

Steps = Generator[CollectiveRequest, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class NodeStrategy(Strategy):
    """The base of strategies in which the `node_size` consecutive ranks of a node may act as one (`hierarchical`)."""

    hierarchical: bool = False
    node_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_fields(self, StrategyError, "hierarchical")
        if self.node_size is not None:
            arguments.check_whole(self, 1, "node_size")
        if self.hierarchical != (self.node_size is not None):
            raise StrategyError(
                f"{type(self).__name__}: hierarchical=True and node_size=(the number of ranks of a node) belong "
                f"together, got hierarchical={self.hierarchical!r}, node_size={self.node_size!r}."
            )

    @property
    def together(self) -> int:
        """The number of ranks that act as one: those of a node, or 1."""
        return self.node_size or 1

    def check(self, optimizer: Optimizer, axis: Axis | None = None) -> None:
        super().check(optimizer, axis)
        if axis is not None and axis.size > 1 and axis.size % self.together:
            raise StrategyError(
                f"{type(self).__name__}.node_size must divide the number of ranks: axis {axis.name!r} has {axis.size}, "
                f"which aren't nodes of {self.together}."
            )


def refuse_complex(strategy: Strategy, params: Tree) -> None:
    """Raise if a strategy that works on real numbers gets a complex parameter."""
    for path, leaf in zip(tree.leaf_paths(params), tree.flatten(params)[0], strict=True):
        if leaf.is_complex():
            needs.require("complex, strategy", strategy, f"train.init: parameter {path!r}, {tree.describe(leaf)},")


def node(axis: Axis, size: int) -> Axis:
    """The axis of this rank's node; an axis of one rank is a node."""
    return inner(axis, min(size, axis.size))


@dataclass(frozen=True)
class NodeHook(CommHook):
    """A hook with collectives within nodes of `node_size` ranks, and among nodes."""

    sums: ClassVar[bool] = False

    node_size: int

    def axes(self, axis: Axis | None) -> tuple[Axis, Axis]:
        """This rank's node, and the ranks that have the same place in their nodes."""
        assert axis is not None
        return node(axis, self.node_size), outer(axis, min(self.node_size, axis.size))

    def scattered(self, inputs: BucketInput) -> Steps:
        """This rank's part of the sum over its node."""
        mates, _ = self.axes(inputs.axis)
        if mates.size == 1:
            return inputs.flat
        return (yield CollectiveRequest("psum_scatter", _parts(inputs.flat, mates.size), axis=mates))

    def gathered(self, mine: torch.Tensor, inputs: BucketInput) -> Steps:
        """The tensors `mine` of all ranks of the node, stacked along a new first dimension."""
        mates, _ = self.axes(inputs.axis)
        if mates.size == 1:
            return mine[None]
        return (yield CollectiveRequest("all_gather", mine, axis=mates))


@around("hook")
@dataclass(frozen=True)
class ByNode(NodeHook):
    """`hook`, which has no state, applied to the nodes' sums; or some of the three steps. Without step 1 the ranks of a
    node have the same values, without step 3 a rank gets zeros except in its part.
    """

    hook: CommHook = EXACT
    steps: tuple[int, ...] = (1, 2, 3)

    @property
    def exact(self) -> bool:
        return len(self.steps) == 3 and self.hook.exact

    def phases(self, axis_size: int) -> int:
        among = needs.phases_on(self.hook, axis_size // min(self.node_size, axis_size)) if 2 in self.steps else 0
        return (1 in self.steps) + (3 in self.steps) + among

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        m = min(self.node_size, axis_size)
        summed = self.hook.packing(dtype, (m if 1 in self.steps else 1) * (axis_size // m if 2 in self.steps else 1))
        return summed._replace(counts_as=self.hook.packing(dtype, axis_size).counts_as)

    def reduce(self, inputs: BucketInput) -> Reduction:
        mates, nodes = self.axes(inputs.axis)
        numel, place = inputs.flat.numel(), inputs.rank % mates.size
        part = (yield from self.scattered(inputs)) if 1 in self.steps else _part(inputs.flat, mates.size, place)
        if 2 in self.steps:
            part = yield from self._among(nodes, part, inputs, inputs.rank // mates.size)
        if 3 in self.steps:
            parts = yield from self.gathered(part, inputs)
        else:
            parts = torch.where(torch.arange(mates.size, device=part.device)[:, None] == place, part, 0.0)
        return parts.reshape(-1)[:numel], inputs.states

    def _among(self, nodes: Axis, part: torch.Tensor, inputs: BucketInput, rank: Any) -> Steps:
        """`hook` applied to a part, among the ranks that have the same part in their nodes."""
        bucket = Bucket.of(inputs.bucket.index, [part])
        there = replace(inputs, flat=part, bucket=bucket, axis_size=nodes.size, rank=rank, states=({},), axis=nodes)

        def on_nodes(request: CollectiveRequest) -> Steps:
            request.axis = nodes
            return (yield request)

        result, _ = yield from drive_within(self.hook.reduce(there), on_nodes)
        return cast(torch.Tensor, result)


def _part(flat: torch.Tensor, m: int, place: Any) -> torch.Tensor:
    """The part at `place` of `flat`, which all m ranks of the node have."""
    parts = _parts(flat, m)
    if isinstance(place, int):
        return parts[place]
    return parts.gather(0, place.reshape(1, 1).expand(1, parts.shape[1]))[0]


def _parts(flat: torch.Tensor, m: int) -> torch.Tensor:
    """m equal rows. The padding repeats the last number, since zeros would widen the range of a codec's grid."""
    missing = -flat.numel() % m
    return (torch.cat([flat, flat[-1:].expand(missing)]) if missing else flat).view(m, -1 if flat.numel() else 0)


@dataclass(frozen=True)
class WithinNode(CommHook):
    """The mean over the `ranks` of a node, which are contiguous on the axis; sent in `dtype` if that is narrower."""

    exact: ClassVar[bool] = False  # it isn't the mean over all ranks
    reach: ClassVar[str] = "element"
    sums: ClassVar[bool] = False  # it sums over a node, not over all ranks

    ranks: int
    dtype: torch.dtype | None = None

    def axes(self, axis: Axis) -> tuple[Axis, ...]:
        return (axis if axis.size == 1 else inner(axis, self.ranks),)

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        narrow = self.dtype if self.dtype is not None and dtype in (torch.float32, torch.float64) else dtype
        scale = 1.0 if axis_size == 1 else 1.0 / self.ranks
        return Packing(narrow, scale, scale if axis_size <= self.ranks else None)  # not the mean over all ranks

    def reduce(self, inputs: BucketInput) -> Reduction:
        assert inputs.axis is not None
        (mates,) = self.axes(inputs.axis)
        return (yield CollectiveRequest("psum", inputs.flat, axis=mates)), inputs.states


in_half.register(WithinNode, lambda hook, dtype: replace(hook, dtype=dtype))
