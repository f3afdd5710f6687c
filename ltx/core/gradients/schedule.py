"""Schedules: how the buckets of one backward pass are reduced. It calls ``start(index, dims, tensors)`` as soon as a
bucket's ``[*gradients, *state tensors]`` are ready, and ``wait(tensors)`` at the fence, after the last bucket. `dims`:
their leading dimensions, from vmap levels, outermost first, True for the simulated axis itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ltx.core.base import private
from ltx.core.base.errors import UnsupportedError
from ltx.core.base.private import Tensors
from ltx.core.comm.operations import OPERATIONS, mark_started
from ltx.core.gradients.buffers import unpack
from ltx.core.gradients.comm_hook import CommHook, ExactSum, counts_as, reduce_at_once
from ltx.core.gradients.planning import Plan
from ltx.core.gradients.reduction import Bucket, CollectiveRequest, Reduction, StartedWork, advance, answer_at_once
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import Levels

Dims = tuple[bool, ...]


class Schedule(ABC):
    """How one backward pass is reduced."""

    threaded = True  # whether :meth:`wait` reads its tensors; if not, the schedule holds the results
    compiled = False  # the schedule is part of a compiled graph
    fenced = True  # the backward pass has a fence, which waits for the reductions

    #: This backward pass goes through another derivative: an earlier backward pass, or one of a transform inside of
    #: its own. Derivatives of derivatives are reduced exactly: by the sum that the hook counts as, not by the hook.
    again = False
    task = -1  # the id of autograd's run of the last backward pass
    innermost = 0.0  # the innermost level of transforms that differentiates the step; 0 is plain autograd
    #: Called when a backward pass has begun: a digest of the unreduced gradients in ``.grad``, which ranks compare.
    unreduced: Callable[[], str] = str

    def __init__(self, plan: Plan):
        self.plan = plan

    def hook_of(self, bucket: Bucket | None = None) -> CommHook:
        """The hook that this pass applies to a bucket, or to all buckets."""
        hook = self.plan.hook if bucket is None else self.plan.hook_of(bucket)
        return ExactSum(counts_as(hook, self.plan.axis.size)) if self.again else hook

    def enter(self) -> None:
        """A backward pass has come to a tie. It begins at the first one: outputs have one, and their tangents too."""
        task = private.graph_task()
        if task < 0 or task != self.task:
            self.task = task
            self.begin()

    @abstractmethod
    def begin(self) -> None:
        """The backward pass begins."""

    @abstractmethod
    def start(self, index: int, dims: Dims, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Bucket `index` is ready. Returns tensors of the same shapes, which :meth:`wait` takes and may replace."""

    @abstractmethod
    def wait(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """All buckets were started: return the reduced gradients and next states, bucket after bucket."""

    def _check_batchable(self, dims: Dims, states: Tensors) -> None:
        if dims and not ((hook := self.hook_of()).reach == "element" and (self.again or not states)):
            raise UnsupportedError(
                f"{hook!r} can't reduce gradients of several samples at once between processes. For per-sample "
                "gradients use ltx.block_backward_sync(step) under vmap, then ltx.sync_gradients on their mean; for "
                "several cotangents call the step once for each."
            )


class _FencedSchedule(Schedule):
    """Reductions that begin when their buckets are ready, and are waited for at the fence."""

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self._ready: dict[int, Tensors] = {}
        #: By buckets' places: each bucket, its reduction, and a function that waits for that, or its result.
        self._begun: dict[int, tuple[Bucket, Reduction, Any]] = {}

    def begin(self) -> None:
        self.unreduced()  # compares them, where ranks are simulated
        self._ready, self._begun = {}, {}

    def _begin(self, bucket: Bucket, tensors: Tensors, like: Bucket | None = None) -> None:
        hook = self.hook_of(bucket)
        reduction = hook.reduce(self.plan.packed(hook, bucket, tensors))
        self._begun[bucket.index] = like or bucket, reduction, self._go_on(reduction, None)

    @abstractmethod
    def _go_on(self, reduction: Reduction, result: torch.Tensor | None) -> Any:
        """Run a reduction up to what it has to wait for: a function that waits, and returns that; or the result."""

    def wait(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        outs: list[torch.Tensor] = []
        for index in range(len(self._begun)):
            bucket, reduction, reduced = self._begun.pop(index)
            while callable(reduced):
                reduced = self._go_on(reduction, reduced())
            outs += [*unpack(reduced[0], bucket), *self.plan.flatten_states(bucket, reduced[1])]
        return tuple(outs)


class ImmediateSchedule(_FencedSchedule):
    """The schedule on simulated ranks and in a world of one: each bucket is reduced completely when it is ready. In a
    world of one they begin in bucket order, and what a :class:`StartedWork` gives is waited for at the fence.
    """

    def _go_on(self, reduction: Reduction, result: torch.Tensor | None) -> Any:
        request = advance(reduction, result)
        while isinstance(request, CollectiveRequest):
            request = advance(reduction, answer_at_once(request, self.plan.axis))
        return request.wait if isinstance(request, StartedWork) else request

    def start(self, index: int, dims: Dims, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        plan, bucket = self.plan, self.plan.buckets[index]
        if not dims and plan.axis.size == 1:
            self._ready[index] = tensors
            while (given := self._ready.pop(place := len(self._begun), None)) is not None:
                self._begin(plan.buckets[place], given)
            return tuple(t.view_as(t) for t in tensors)
        hook = self.hook_of(bucket)

        def one_rank(axis: Axis, *mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
            flat, following = reduce_at_once(hook, axis, replace(plan, axis=axis).packed(hook, bucket, mine))
            return (*unpack(flat, bucket), *plan.flatten_states(bucket, following))

        return _under_vmaps(one_rank, dims, plan.axis, tensors, ())

    def wait(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        return super().wait(tensors) if self._begun else tuple(t.view_as(t) for t in tensors)


def _under_vmaps(
    body: Callable[..., tuple[torch.Tensor, ...]], dims: Dims, axis: Axis, tensors: Tensors, levels: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """Run `body` for every entry of the leading dimensions in `dims`; dimensions of the axis become its `levels`."""
    if not dims:
        return body(axis.at(Levels(levels)), *tensors)

    def inner(*entries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = (*levels, private.current_level()) if dims[0] else levels
        return _under_vmaps(body, dims[1:], axis, entries, here)

    # Contiguous: a value that all ranks share comes back expanded, and forward mode can't attach tangents to that.
    results: tuple[torch.Tensor, ...] = torch.vmap(inner, randomness="different")(*tensors)
    return tuple(result.contiguous() for result in results)


class GraphSchedule(_FencedSchedule):
    """Functional collectives of a graph, from marker to fence; Inductor never moves a wait before the last start."""

    compiled = True

    def _go_on(self, reduction: Reduction, result: torch.Tensor | None) -> Any:
        request = advance(reduction, result)
        if isinstance(request, StartedWork):
            raise UnsupportedError(
                f"{self.plan.hook!r} starts work of its own, which a compiled graph has no node for. Call the step "
                "without torch.compile, or let the hook ask for collectives by CollectiveRequest alone."
            )
        if not isinstance(request, CollectiveRequest):
            return request
        axis = request.axis or self.plan.axis
        buffer, size = request.buffer, axis.size
        if not axis.ranks.overlaps:  # this rank alone
            return lambda: answer_at_once(request, axis)
        assert axis.comm
        request.check(size)
        group = axis.comm.first_phase.group_for(buffer.device).group_name
        if not buffer.numel():  # nothing to send; every rank has the same shapes
            return lambda: OPERATIONS[request.operation].new_result(buffer, size)
        started, wait = OPERATIONS[request.operation].begin_in_graph(buffer, size, group, request.arguments)
        mark_started([started])
        return partial(wait, started)

    def start(self, index: int, dims: Dims, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        bucket = self.plan.buckets[index]
        grads = tensors[: len(bucket.members)]
        self._check_batchable(dims, tensors[len(grads) :])
        # Samples lie side by side in the buffer, so a leaf is unpacked like a larger leaf.
        leaves = tuple(leaf._replace(shape=grad.shape) for leaf, grad in zip(bucket.leaves, grads, strict=True))
        self._begin(bucket, tensors, replace(bucket, leaves=leaves))
        return tuple(t.view_as(t) for t in tensors)

    def wait(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        mark_started([end.args[0] for _, _, end in self._begun.values() if isinstance(end, partial)])
        return super().wait(tensors)
