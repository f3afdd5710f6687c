"""The schedule for process groups inside a compiled graph. The compiler may move what it issues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ltx.comm.operations import OPERATIONS
from ltx.gradients.buckets import Bucket
from ltx.gradients.packing import pack_pure, unpack
from ltx.gradients.reduction import CollectiveRequest, Reduced, Reduction, advance, collective_alone
from ltx.gradients.schedule import Dims, Plan, Schedule


class GraphSchedule(Schedule):
    """Functional collectives as nodes of a compiled graph: started at the marker, waited for at the fence."""

    compiled = True

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self._started: dict[int, tuple[Reduction, Bucket, Callable[[], torch.Tensor] | Reduced]] = {}

    def begin(self) -> None:
        self._started = {}

    def _go_on(self, reduction: Reduction, result: torch.Tensor | None) -> Callable[[], torch.Tensor] | Reduced:
        """Run a reduction up to its next collective; return a function that waits for that, or the final result."""
        request = advance(reduction, result)
        if isinstance(request, CollectiveRequest):
            return self._issue(request)
        reduced: Reduced = request
        return reduced

    def _issue(self, request: CollectiveRequest) -> Callable[[], torch.Tensor]:
        """Start a collective; return a function that waits for it."""
        axis = request.axis or self.plan.axis
        buffer, size = request.buffer, axis.size
        if axis.backing is None:
            return lambda: collective_alone(request)
        assert axis.comm
        group = axis.comm.bucket_channel(0).group_for(buffer.device).group_name
        if not buffer.numel():  # nothing to send; every rank has the same shapes
            return lambda: buffer
        return OPERATIONS[request.operation].begin_in_graph(buffer, size, group, request.arguments)

    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        bucket, hook = self.plan.buckets[index], self.hook
        count = len(bucket.members)
        grads = tensors[:count]
        self._check_batchable(dims, tensors[count:])
        states = self.plan.states_of(bucket, tensors[count:])
        flat = pack_pure(grads, bucket, hook, self.plan.axis.size, states)
        # Samples lie side by side in the buffer: as far as unpacking goes, each leaf is a larger one.
        leaves = tuple(replace(leaf, shape=grad.shape) for leaf, grad in zip(bucket.leaves, grads, strict=True))
        reduction = hook.reduce(self.plan.bucket_input(bucket, flat, states))
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
