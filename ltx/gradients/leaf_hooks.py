"""Starting buckets from hooks of leaves, where torch can't raise a marker's priority (before 2.13).

The step is given leaves of its own in place of parameters. Autograd accumulates a leaf's gradient as soon as it is
there, whatever else waits, and calls a hook: the last one of a bucket starts it. For passes that a train step or
``ltx.grad`` waits for itself; what the loss doesn't reach is started with zeros when the backward pass is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltx.errors import UnsupportedError
from ltx.gradients.buckets import Bucket
from ltx.gradients.schedule import Plan, Schedule


class LeafHooks:
    """The leaves of one pass.

    Args:
        schedule: what reduces their gradients.
        params: the parameters of the schedule's plan.
        states: each one's state tensors.
    """

    def __init__(self, schedule: Schedule, params: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]]):
        self._schedule, self._states, self._begun = schedule, states, False
        plan: Plan = schedule.plan
        self._missing = {bucket.index: len(bucket.members) for bucket in plan.buckets}
        self.leaves = [param.detach().requires_grad_() for param in params]
        for bucket in plan.buckets:
            for member in bucket.members:
                self.leaves[member].register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))

    def _arrived(self, bucket: Bucket) -> None:
        if not self._missing[bucket.index]:
            raise UnsupportedError(
                "a gradient came twice in one backward pass: a part of the step was differentiated inside of it. Use "
                "torch.utils.checkpoint with use_reentrant=False, or torch 2.13."
            )
        self._missing[bucket.index] -= 1
        if not self._missing[bucket.index]:
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        leaves = [self.leaves[member] for member in bucket.members]
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        if not self._begun:
            self._begun = True
            self._schedule.begin()
        with torch.no_grad():
            self._schedule.start(bucket.index, (), [*grads, *(t for m in bucket.members for t in self._states[m])])

    def finish(self) -> None:
        """The backward pass is over: start what it hasn't reached."""
        for bucket in self._schedule.plan.buckets:
            if self._missing[bucket.index]:
                self._missing[bucket.index] = 0
                self._start(bucket)
