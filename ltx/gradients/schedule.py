"""Schedules: how the buckets of one backward pass are reduced.

A schedule is told ``start(bucket, tensors)`` as soon as a bucket's gradients are there, and ``land(...)`` at the
fence, after the last bucket. There are three:

* :class:`~ltx.gradients.process_schedule.ProcessSchedule`: process groups, eagerly. Starts asynchronously and in the
  order of launches, lands at the fence.
* :class:`~ltx.gradients.graph_schedule.GraphSchedule`: process groups, inside a compiled graph. Starts with functional
  collectives, lands at the fence; Inductor may move either.
* :class:`~ltx.gradients.immediate_schedule.ImmediateSchedule`: simulated ranks and worlds of one. Does everything at
  once.

Tensors come as ``[*gradients, *state tensors]`` of the bucket. While they pass through vmap levels they gain leading
dimensions; `dims` lists them, outermost first, True for the simulated axis itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ltx import comm
from ltx.axis import Axis
from ltx.errors import UnsupportedError
from ltx.gradients.buckets import Bucket
from ltx.gradients.comm_hook import CommHook, ExactSum
from ltx.gradients.reduction import BucketInput, LeafState

Dims = tuple[bool, ...]


@dataclass(frozen=True)
class Plan:
    """What one synchronised step does: constant from step to step.

    Attributes:
        axis: the ranks.
        hook: what is done to each bucket.
        buckets: in the order of launches.
        state_names: for each leaf, the names of its communication state's tensors.
        step: the number of synchronised steps before this one.
        clock: what a compiled graph, for which `step` is a constant, adds to it; None elsewhere.
        agreement: what the ranks compared when they met this plan; None where there is nothing to compare.
    """

    axis: Axis
    hook: CommHook
    buckets: tuple[Bucket, ...]
    state_names: tuple[tuple[str, ...], ...]
    step: int = 0
    clock: torch.Tensor | None = None
    agreement: comm.Agreement | None = None

    def states_of(self, bucket: Bucket, flat_states: Sequence[torch.Tensor]) -> list[LeafState]:
        """State tensors of a bucket, by leaf and name."""
        if not flat_states:
            return [{} for _ in bucket.members]
        tensors = iter(flat_states)
        return [{name: next(tensors) for name in self.state_names[member]} for member in bucket.members]

    def flatten_states(self, bucket: Bucket, states: Sequence[LeafState]) -> list[torch.Tensor]:
        """Inverse of :meth:`states_of`."""
        return [
            state[name]
            for member, state in zip(bucket.members, states, strict=True)
            for name in self.state_names[member]
        ]

    def states_by_leaf(self, bucket: Bucket, states: Sequence[LeafState]) -> dict[int, LeafState]:
        """The states of a bucket by leaf, each with the names that the plan knows; empty for a hook without states."""
        names = {member: self.state_names[member] for member in bucket.members}
        if not any(names.values()):
            return {}
        return {m: {name: state[name] for name in names[m]} for m, state in zip(bucket.members, states, strict=True)}

    @cached_property
    def is_state(self) -> tuple[bool, ...]:
        """For each tensor in the order of :meth:`Schedule.land`: is it a state's?"""
        return tuple(
            state
            for bucket in self.buckets
            for state in (
                *(False for _ in bucket.members),
                *(True for member in bucket.members for _ in self.state_names[member]),
            )
        )

    def bucket_input(
        self,
        bucket: Bucket,
        flat: torch.Tensor,
        states: Sequence[LeafState],
        update: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None,
    ) -> BucketInput:
        """The hook's view of a bucket."""
        # Simulated ranks have a clock each, all alike.
        step = self.step if self.clock is None else self.step + self.clock.max().long()
        last = bucket.index == len(self.buckets) - 1
        return BucketInput(flat, bucket, self.axis.size, self.axis.rank, states, step, last, self.axis, update)


class Schedule(ABC):
    """How one backward pass is reduced.

    Attributes:
        threaded: whether :meth:`land` reads the tensors it is given, or knows its results itself.
        compiled: whether it is part of a compiled graph.
        fenced: whether the backward pass is to land it.
        again: whether this backward pass is one through an earlier backward pass. Gradients of gradients are reduced
            exactly, whatever the hook does to gradients: as what it counts as.
    """

    threaded = True
    compiled = False
    fenced = True

    def __init__(self, plan: Plan):
        self.plan = plan
        self.again = False

    @property
    def hook(self) -> CommHook:
        """What this pass does to its buckets."""
        return ExactSum(self.plan.hook.derivative_scale(self.plan.axis.size)) if self.again else self.plan.hook

    @abstractmethod
    def begin(self) -> None:
        """The backward pass begins."""

    @abstractmethod
    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Bucket `index` is ready. Gives tensors of the same shapes, which :meth:`land` is given and may replace."""

    @abstractmethod
    def wait(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All buckets were started: the reduced gradients and next states, bucket after bucket."""

    def _check_batchable(self, dims: Dims, states: Sequence[torch.Tensor]) -> None:
        if dims and not (self.hook.elementwise and (self.again or not states)):
            raise UnsupportedError(
                f"{self.hook!r} can't reduce gradients of several samples at once between processes. For per-sample "
                "gradients use ltx.block_backward_sync(step) under vmap, then ltx.sync_gradients on their mean; for "
                "several cotangents call the step once for each."
            )
