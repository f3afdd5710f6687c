"""Schedules: how the buckets of one backward pass are reduced.

The backward pass calls ``start(index, dims, tensors)`` as soon as a bucket's gradients are there, and ``wait(tensors)``
at the fence, after the last bucket. There are three schedules:

* :class:`~ltx.core.gradients.process_schedule.ProcessSchedule`: process groups, eagerly. Starts asynchronously and in
  the order of launches, waits at the fence.
* :class:`GraphSchedule`: process groups, inside a compiled graph. Starts functional collectives, waits for them at the
  fence; Inductor may move either.
* :class:`ImmediateSchedule`: simulated ranks and worlds of one. Does everything at once.

Tensors come as ``[*gradients, *state tensors]`` of the bucket. While they pass through vmap levels they gain leading
dimensions; `dims` lists them, outermost first, True for the simulated axis itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch._C import _functorch

from ltx.core import comm
from ltx.core.base.errors import StrategyError, UnsupportedError
from ltx.core.comm.operations import OPERATIONS
from ltx.core.gradients.buckets import Bucket
from ltx.core.gradients.comm_hook import CommHook, ExactSum, reduce_at_once
from ltx.core.gradients.packing import pack_pure, unpack
from ltx.core.gradients.reduction import (
    BucketInput,
    CollectiveRequest,
    LeafState,
    Reduction,
    advance,
    collective_alone,
)
from ltx.core.ranks.axis import Axis

Dims = tuple[bool, ...]


@dataclass(frozen=True)
class Plan:
    """What one synchronised step does: constant from step to step.

    Attributes:
        axis: the ranks.
        hook: what is done to each bucket.
        buckets: in the order of launches.
        state_names: for each leaf, the names of its communication state's tensors.
        step: the number of synchronised steps before this one; None if the hook doesn't read it.
        clock: what a compiled graph, for which `step` is a constant, adds to it; None elsewhere.
        agreement: what the ranks compared when this plan was new to them; None where there is nothing to compare.
    """

    axis: Axis
    hook: CommHook
    buckets: tuple[Bucket, ...]
    state_names: tuple[tuple[str, ...], ...]
    step: int | None = None
    clock: torch.Tensor | None = None
    agreement: comm.Agreement | None = None

    @staticmethod
    def tensors_of(
        bucket: Bucket, leaves: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """``[*leaves, *state tensors]`` of a bucket."""
        return [*(leaves[m] for m in bucket.members), *(x for m in bucket.members for x in states[m])]

    def states_of(self, bucket: Bucket, flat_states: Sequence[torch.Tensor]) -> list[LeafState]:
        """State tensors of a bucket, by leaf and name; without tensors each leaf has none."""
        if not flat_states:
            return [{} for _ in bucket.members]
        tensors = iter(flat_states)
        return [{name: next(tensors) for name in self.state_names[member]} for member in bucket.members]

    def flatten_states(self, bucket: Bucket, states: Sequence[LeafState]) -> list[torch.Tensor]:
        """Inverse of :meth:`states_of`."""
        return [x for state in self.states_by_leaf(bucket, states).values() for x in state.values()]

    def states_by_leaf(self, bucket: Bucket, states: Sequence[LeafState]) -> dict[int, LeafState]:
        """The states of a bucket by leaf, each with the names that the plan knows; empty for a hook without states."""
        names = [self.state_names[member] for member in bucket.members]
        if not any(names):
            return {}
        if len(states) != len(names) or not all(map(set.issuperset, map(set, states), names)):
            raise StrategyError(
                f"{self.hook!r} returned states {[sorted(state) for state in states]} for a bucket of {len(names)} "
                f"parameters: expected {[sorted(own) for own in names]}, in the order of inputs.states."
            )
        own = [{name: state[name] for name in given} for given, state in zip(names, states, strict=True)]
        return dict(zip(bucket.members, own, strict=True))

    @cached_property
    def is_state(self) -> tuple[bool, ...]:
        """For each tensor in the order of :meth:`Schedule.wait`: is it a state's?"""
        flags: list[bool] = []
        for bucket in self.buckets:
            flags += [False] * len(bucket.members)
            flags += [True for member in bucket.members for _ in self.state_names[member]]
        return tuple(flags)

    def packed(self, hook: CommHook, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> BucketInput:
        """What `hook` reduces: a bucket's ``[*gradients, *state tensors]``, packed without writing into anything."""
        count = len(bucket.members)
        states = self.states_of(bucket, tensors[count:])
        flat = pack_pure(tensors[:count], bucket, hook, self.axis.size, states)
        return self.bucket_input(bucket, flat, states)

    def bucket_input(
        self,
        bucket: Bucket,
        flat: torch.Tensor,
        states: Sequence[LeafState],
        update: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None,
    ) -> BucketInput:
        """The hook's view of a bucket."""
        # Simulated ranks have a clock each, all alike.
        step = self.step if self.step is None or self.clock is None else self.step + self.clock.max().long()
        last = bucket.index == len(self.buckets) - 1
        return BucketInput(flat, bucket, self.axis.size, self.axis.rank, states, step, last, self.axis, update)


class Schedule(ABC):
    """How one backward pass is reduced.

    Attributes:
        threaded: whether :meth:`wait` reads the tensors it is given, or knows its results itself.
        compiled: whether it is part of a compiled graph.
        fenced: whether the backward pass has a fence, which waits for it.
        again: whether this backward pass is one through an earlier backward pass. Gradients of gradients are reduced
            exactly, whatever the hook does to gradients: as what it counts as.
        unreduced: called when a backward pass has begun: what ``.grad`` holds of this rank alone, which ranks compare.
    """

    threaded = True
    compiled = False
    fenced = True

    def __init__(self, plan: Plan):
        self.plan = plan
        self.again = False
        self.unreduced: Callable[[], str] = lambda: ""

    @property
    def hook(self) -> CommHook:
        """What this pass does to its buckets."""
        return ExactSum(self.plan.hook.derivative_scale(self.plan.axis.size)) if self.again else self.plan.hook

    def in_forward(self) -> AbstractContextManager[None]:
        """Surrounds the forward pass of a plain step."""
        return nullcontext()

    @abstractmethod
    def begin(self) -> None:
        """The backward pass begins."""

    @abstractmethod
    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Bucket `index` is ready. Gives tensors of the same shapes, which :meth:`wait` is given and may replace."""

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


class ImmediateSchedule(Schedule):
    """Reductions on simulated ranks and in a world of one, each done completely when its bucket is ready."""

    def begin(self) -> None:
        unreduced, threads = self.unreduced(), self.plan.axis.threads
        if threads and self.plan.agreement is not None:
            threads.announce(self.plan.agreement.signature)
        if threads and unreduced:
            threads.announce(comm.Signature(f"a backward pass that adds to {unreduced}: {comm.UNREDUCED}", ()))

    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        plan, bucket, hook = self.plan, self.plan.buckets[index], self.hook

        def one_rank(axis: Axis, *mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
            flat, following = reduce_at_once(hook, axis, replace(plan, axis=axis).packed(hook, bucket, mine))
            return (*unpack(flat, bucket), *plan.flatten_states(bucket, following))

        return _under_vmaps(one_rank, dims, plan.axis, tensors)

    def wait(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)


def _under_vmaps(
    body: Callable[..., tuple[torch.Tensor, ...]],
    dims: Dims,
    axis: Axis,
    tensors: Sequence[torch.Tensor],
    levels: tuple[int, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Run `body` for every entry of the leading dimensions that `dims` lists; the axis' own become its `levels`."""
    if not dims:
        if axis.simulated and levels:
            axis = replace(axis, backing=axis.simulated.at(levels))
        return body(axis, *tensors)

    def inner(*entries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = (*levels, _functorch.current_level()) if dims[0] else levels
        return _under_vmaps(body, dims[1:], axis, entries, here)

    # Contiguous: what all ranks share comes back expanded, which forward mode can't attach tangents to.
    results: tuple[torch.Tensor, ...] = torch.vmap(inner, randomness="different")(*tensors)
    return tuple(result.contiguous() for result in results)


class GraphSchedule(Schedule):
    """Functional collectives as nodes of a compiled graph: started at the marker, waited for at the fence."""

    compiled = True

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self._started: dict[int, tuple[Reduction, Bucket, Any]] = {}

    def begin(self) -> None:
        self._started = {}

    def _go_on(self, reduction: Reduction, result: torch.Tensor | None) -> Any:
        """Run a reduction up to its next collective; what waits for that, or the final result."""
        request = advance(reduction, result)
        if not isinstance(request, CollectiveRequest):
            return request
        axis = request.axis or self.plan.axis
        buffer, size = request.buffer, axis.size
        if axis.backing is None:
            return lambda: collective_alone(request)
        assert axis.comm
        request.check_rows(size)
        group = axis.comm.bucket_channel(0).group_for(buffer.device).group_name
        if not buffer.numel():  # nothing to send; every rank has the same shapes
            return lambda: buffer
        return OPERATIONS[request.operation].begin_in_graph(buffer, size, group, request.arguments)

    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        bucket = self.plan.buckets[index]
        grads = tensors[: len(bucket.members)]
        self._check_batchable(dims, tensors[len(grads) :])
        # Samples lie side by side in the buffer: as far as unpacking goes, each leaf is a larger one.
        leaves = tuple(replace(leaf, shape=grad.shape) for leaf, grad in zip(bucket.leaves, grads, strict=True))
        reduction = self.hook.reduce(self.plan.packed(self.hook, bucket, tensors))
        self._started[index] = (reduction, replace(bucket, leaves=leaves), self._go_on(reduction, None))
        return tuple(t.view_as(t) for t in tensors)

    def wait(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outs: list[torch.Tensor] = []
        for index in range(len(self.plan.buckets)):
            reduction, bucket, reduced = self._started.pop(index)
            while callable(reduced):
                reduced = self._go_on(reduction, reduced())
            flat, states = reduced
            outs.extend(unpack(flat, bucket))
            outs.extend(self.plan.flatten_states(self.plan.buckets[index], states))
        return tuple(outs)
