"""Schedules: how the buckets of one backward pass are reduced.

The backward pass calls ``start(index, dims, tensors)`` as soon as a bucket's gradients are ready, and ``wait(tensors)``
at the fence, after the last bucket.

Tensors come as ``[*gradients, *state tensors]`` of the bucket. While they pass through vmap levels they gain leading
dimensions; `dims` lists them, outermost first, True for the simulated axis itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import private
from ltx.core.base.errors import UnsupportedError
from ltx.core.comm.operations import OPERATIONS
from ltx.core.gradients.comm_hook import CommHook, ExactSum, program_of, reduce_at_once
from ltx.core.gradients.packing import pack, unpack
from ltx.core.gradients.pending import Pending
from ltx.core.gradients.planning import Plan
from ltx.core.gradients.reduction import (
    Bucket,
    CollectiveRequest,
    LeafState,
    Program,
    ProgramOf,
    Reduced,
    Reduction,
    advance,
    collective_alone,
)
from ltx.core.ranks.axis import Axis

Dims = tuple[bool, ...]


class Schedule(ABC):
    """How one backward pass is reduced."""

    threaded = True  # whether :meth:`wait` reads its tensors; if not, the schedule holds the results
    compiled = False  # the schedule is part of a compiled graph
    fenced = True  # the backward pass has a fence, which waits for the reductions

    def __init__(self, plan: Plan):
        self.plan = plan
        #: This backward pass goes through an earlier backward pass. Gradients of gradients are reduced exactly: by the
        #: sum that the hook counts as, not by the hook.
        self.again = False
        #: Called when a backward pass has begun: a digest of the unreduced gradients in ``.grad``, which ranks compare.
        self.unreduced: Callable[[], str] = lambda: ""

    def hook_of(self, bucket: Bucket | None = None) -> CommHook:
        """The hook that this pass applies to a bucket, or to all buckets."""
        hook = self.plan.hook if bucket is None else self.plan.hook_of(bucket)
        return ExactSum(hook.derivative_scale(self.plan.axis.size)) if self.again else hook

    @property
    def hook(self) -> CommHook:
        """The hook that this pass applies to its buckets."""
        return self.hook_of()

    def in_forward(self) -> AbstractContextManager[None]:
        """A context around the forward pass of a plain step."""
        return self.plan.axis.ranks.in_forward()

    @abstractmethod
    def begin(self) -> None:
        """The backward pass begins."""

    @abstractmethod
    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Bucket `index` is ready. Returns tensors of the same shapes, which :meth:`wait` takes and may replace."""

    @abstractmethod
    def wait(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All buckets were started: return the reduced gradients and next states, bucket after bucket."""

    def _check_batchable(self, dims: Dims, states: Sequence[torch.Tensor]) -> None:
        if dims and not (self.hook.elementwise and (self.again or not states)):
            raise UnsupportedError(
                f"{self.hook!r} can't reduce gradients of several samples at once between processes. For per-sample "
                "gradients use ltx.block_backward_sync(step) under vmap, then ltx.sync_gradients on their mean; for "
                "several cotangents call the step once for each."
            )


class ImmediateSchedule(Schedule):
    """The schedule on simulated ranks and in a world of one: each bucket is reduced completely when it is ready."""

    def begin(self) -> None:
        self.plan.axis.ranks.begin_pass(self.plan.agreement, self.unreduced())

    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        plan, bucket = self.plan, self.plan.buckets[index]
        hook = self.hook_of(bucket)

        def one_rank(axis: Axis, *mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
            flat, following = reduce_at_once(hook, axis, replace(plan, axis=axis).packed(hook, bucket, mine))
            return (*unpack(flat, bucket), *plan.flatten_states(bucket, following))

        with plan.axis.ranks.in_pass(ends=bucket is plan.buckets[-1]):
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
    """Run `body` for every entry of the leading dimensions in `dims`; dimensions of the axis become its `levels`."""
    if not dims:
        return body(replace(axis, ranks=axis.ranks.at(levels)) if levels else axis, *tensors)

    def inner(*entries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = (*levels, private.current_level()) if dims[0] else levels
        return _under_vmaps(body, dims[1:], axis, entries, here)

    # Contiguous: a value that all ranks share comes back expanded, and forward mode can't attach tangents to that.
    results: tuple[torch.Tensor, ...] = torch.vmap(inner, randomness="different")(*tensors)
    return tuple(result.contiguous() for result in results)


class GraphSchedule(Schedule):
    """Functional collectives as nodes of a compiled graph: started at the marker, waited for at the fence.

    Inductor may move either.
    """

    compiled = True

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self._started: dict[int, tuple[Reduction, Bucket, Any]] = {}

    def begin(self) -> None:
        self._started = {}

    def _go_on(self, reduction: Reduction, result: torch.Tensor | None) -> Any:
        """Run a reduction up to its next collective; return a function that waits for it, or the final result."""
        request = advance(reduction, result)
        if not isinstance(request, CollectiveRequest):
            return request
        axis = request.axis or self.plan.axis
        buffer, size = request.buffer, axis.size
        if not axis.ranks.overlaps:
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
        # Samples lie side by side in the buffer, so a leaf is unpacked like a larger leaf.
        leaves = tuple(replace(leaf, shape=grad.shape) for leaf, grad in zip(bucket.leaves, grads, strict=True))
        hook = self.hook_of(bucket)
        reduction = hook.reduce(self.plan.packed(hook, bucket, tensors))
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


class ProcessSchedule(Schedule):
    """Asynchronous reductions on the bucket channels of an axis, launched in bucket order (:class:`Pending`).

    With `deferred` there is no fence: the caller of the step begins the pass and waits for its buckets one by one.

    If the hook stays within a part of the axis, the step summary does too: other ranks needn't be in this pass.

    On a stream-ordered backend buckets share a communicator with the user's collectives. If the graph has such
    collectives, their backward passes come before or after a bucket, not always the same on all ranks. So buckets then
    wait until the backward pass is over.
    """

    threaded = False

    def __init__(self, plan: Plan, deferred: bool = False):
        super().__init__(plan)
        assert plan.axis.comm
        self.fenced = not deferred
        self.comm: comm.AxisComm = plan.axis.comm
        #: Called when the backward pass is over.
        self.on_end: Callable[[], None] = lambda: None
        #: Makes the program of a bucket whose gradients are ready; :meth:`program` if None.
        self.program_of: ProgramOf | None = None
        part = plan.hook.within(plan.axis)
        self._part = None if part is None or part.comm is None else part.comm
        self._shared = any(self.comm.stream_of(bucket.device) for bucket in plan.buckets)
        self._in_graphs, self._held = _issued_in_graphs() if self._shared else 0, False
        self._reset()

    @property
    def among(self) -> comm.AxisComm:
        """The communicator of the ranks that are in this pass together."""
        return self.comm if self._part is None or self.again else self._part

    def send_summary(
        self,
        name: str = "a backward pass",
        total: torch.Tensor | float = 0.0,
        weight: torch.Tensor | float = 0.0,
        sums: bool = False,
    ) -> None:
        """Begin a deferred pass, `name` in errors, with its step summary. `sums`: :meth:`total` will be called."""
        self.pending.summed = sums
        self.pending.send_summary(name, self.plan.agreement, total, weight, self.unreduced())

    def in_forward(self) -> AbstractContextManager[None]:
        return self.among.recovery.forward.entered(
            lambda: sum(axis.comm.user.issued for axis in comm.open_axes() if axis.comm is not None)
        )

    def begin(self) -> None:
        if self.fenced:  # the caller, which waits for the buckets, has begun the pass and watches it
            self._reset()
            self.pending.enter(self.has_later_phases)
            self.pending.send_summary("a backward pass", self.plan.agreement, unreduced=self.unreduced())
        self._held = self._shared and _issued_in_graphs() != self._in_graphs

    def abandon(self, reason: BaseException) -> None:
        """Tell the peers that this pass won't continue, if it has begun."""
        self.program_of = None
        self.pending.abandon(reason)

    def _reset(self) -> None:
        self.pending = Pending(self.comm, self.among)
        self._batches: dict[int, torch.Size] = {}
        self._ready: dict[int, Program] = {}

    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Make the program of a bucket whose gradients are ready, and launch the buckets whose turn it is."""
        bucket = self.plan.buckets[index]
        grads, states = tensors[: len(bucket.members)], tensors[len(bucket.members) :]
        try:
            self._check_batchable(dims, states)
            self._batches[index] = tensors[0].shape[: len(dims)]
            program = self.program_of or self.program
            self._ready[index] = program(bucket, grads, self.plan.states_of(bucket, states))
            if self.fenced and self.has_later_phases:
                self.pending.flush_others()
            if not self._held:
                self.pending.launch(self._due(), self.hook)
            self.pending.poll()
        except BaseException as error:
            self._failed(error)
            raise
        return tuple(tensors)

    def _failed(self, error: BaseException) -> None:
        """An exception of a hook or of the network aborts this pass, and the peers are told."""
        if isinstance(error, UnsupportedError) and not len(self.pending):
            self.pending.forget()  # the user's mistake, which all ranks find before the first bucket
        else:
            self.abandon(error)

    def backward(self, objective: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> None:
        """Run a deferred pass from `objective`; None if no parameter is reached."""
        if objective is not None:
            with comm.span("backward"):
                torch.autograd.backward(objective, inputs=inputs)
        self.launch()

    def launch(self) -> None:
        """The backward pass is over: launch the buckets that weren't launched."""
        on_end, self.on_end = self.on_end, lambda: None
        on_end()
        self.pending.launch(self._due(), self.hook)
        self.program_of = None  # it holds the step

    def _due(self) -> Iterator[Program]:
        """The programs whose turn it is, each after the programs before it were launched."""
        while (program := self._ready.pop(len(self.pending), None)) is not None:
            yield program

    def program(
        self,
        bucket: Bucket,
        tensors: Sequence[torch.Tensor],
        states: Sequence[LeafState],
        update: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None,
    ) -> Program:
        """The program that reduces `tensors`, which are packed now; `update` as in :class:`BucketInput`."""
        hook, plan, batch = self.hook_of(bucket), self.plan, self._batches[bucket.index]
        room = partial(self.comm.buffer_pool.take, plan.buckets, bucket.index, hook.exact)
        flat = pack(tensors, bucket, hook, plan.axis.size, states, batch, room)
        return program_of(hook, plan.bucket_input(bucket, flat.view(-1), states, update))

    def wait_buckets(self) -> Iterator[tuple[Bucket, Reduced]]:
        """The buckets in order, each as soon as it is complete, with what its program returned."""
        return zip(self.plan.buckets, self.pending.wait_each(), strict=False)

    def unpack(self, bucket: Bucket, reduced: Reduced) -> list[torch.Tensor]:
        return unpack(reduced[0].view(*self._batches[bucket.index], bucket.numel), bucket)

    def total(self, bucket: Bucket) -> float | None:
        """The sum of all gradients of a complete bucket, or NaN; None if no sum was taken."""
        same = self.hook_of(bucket).wire_dtype(bucket.dtype) == bucket.dtype
        return self.pending.total(bucket.index) if same else None

    @property
    def has_later_phases(self) -> bool:
        """Whether a bucket may issue more than one collective."""
        return bool(self.hook.phases_on(self.plan.axis.size) > 1)

    def wait(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        try:
            self.launch()
            outs = [
                t
                for bucket, reduced in self.wait_buckets()
                for t in (*self.unpack(bucket, reduced), *self.plan.flatten_states(bucket, reduced[1]))
            ]
        except BaseException as error:
            self._failed(error)
            raise
        self.finish()
        return tuple(outs)

    def finish(self) -> comm.StepSummary | None:
        """After the last bucket: finish the step summary, and release the reduced buckets."""
        pending = self.pending
        self._reset()
        return pending.finish()


def _issued_in_graphs() -> int:
    return sum(axis.comm.issued_in_graphs for axis in comm.open_axes() if axis.comm is not None)


def schedule_for(plan: Plan, deferred: bool = False, compiled: bool = False) -> Schedule:
    """The schedule of `plan`, eager or in a compiled graph; `deferred` is that of :class:`ProcessSchedule`."""
    if not plan.axis.ranks.overlaps:
        return ImmediateSchedule(plan)
    return GraphSchedule(plan) if compiled else ProcessSchedule(plan, deferred)
