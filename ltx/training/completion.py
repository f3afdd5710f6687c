"""What a train step does with a bucket whose program is complete.

When that is, the step's policy says: at the end of the backward pass for all of them, as each arrives
(:meth:`ltx.training.backward.Backward.wait`), or where the next step first uses a parameter
(:class:`ltx.training.pending_step.PendingStep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ltx import comm, tree
from ltx.gradients.buckets import Bucket
from ltx.gradients.process_schedule import ProcessSchedule
from ltx.gradients.reduction import LeafState, Reduced
from ltx.optim import Optimizer
from ltx.training.train_state import TrainState
from ltx.transforms.sync_state import states_after
from ltx.typing import Tree


@dataclass(frozen=True)
class Scale:
    """What reduced gradients are multiplied by.

    Attributes:
        factor: a tensor where the host doesn't wait for it.
        skip: on the device, whether nothing may be updated; None if that isn't in question.
    """

    factor: float | torch.Tensor
    skip: torch.Tensor | None = None

    @property
    def at_most_one(self) -> bool:
        """Whether it is known to keep finite numbers finite."""
        return not isinstance(self.factor, torch.Tensor) and abs(self.factor) <= 1

    def apply(self, grads: Sequence[torch.Tensor]) -> None:
        """Multiply in place."""
        if isinstance(self.factor, torch.Tensor) or self.factor != 1:
            torch._foreach_mul_(list(grads), self.factor)

    def conditional(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Optimizer:
        """`optimizer`, which does nothing where nothing may be updated."""
        found = None if self.skip is None else optimizer.unless(self.skip, params)
        return optimizer if found is None else found


@dataclass(frozen=True)
class BackwardResult:
    """What the backward pass gave.

    Attributes:
        grads: reduced gradients; None if the optimizer has run bucket by bucket.
        states: the next communication state, by path.
        params, opt_state: what that optimizer made.
        sums: those of the gradients, if the guard wants them.
        skip: on the device, whether nothing may be updated; None if that isn't in question.
    """

    grads: list[torch.Tensor] | None
    states: dict[str, LeafState]
    params: Tree = None
    opt_state: Tree = None
    sums: list[torch.Tensor | float] | None = None
    skip: torch.Tensor | None = None


class Completion(Protocol):
    """What is done with the buckets of a pass.

    Attributes:
        updated: how many buckets the optimizer has updated in the state's own memory.
    """

    updated: int

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        """The program of `bucket` has returned `reduced`."""
        ...

    def result(self) -> BackwardResult:
        """The result, once all buckets are complete."""
        ...


class CollectGradients:
    """Collects the gradients, for an optimizer that runs on all of them. Nothing of the state is touched."""

    updated = 0

    def __init__(
        self,
        state: TrainState,
        trained: Sequence[int],
        schedule: ProcessSchedule,
        scale: Scale,
        probes: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None,
    ):
        self._state, self._trained, self._schedule = state, trained, schedule
        self._scale, self._probes = scale, probes
        self._grads: dict[int, torch.Tensor] = {}
        self._states: dict[int, LeafState] = {}
        self._sums: list[torch.Tensor | float] = []

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        """Keep the bucket's gradients."""
        grads = self._schedule.unpack(bucket, reduced)
        self._states.update(self._schedule.plan.states_by_leaf(bucket, reduced[1]))
        # A multiple (of at most 1) of finite numbers is finite.
        total = self._schedule.total(bucket) if self._probes is not None and self._scale.at_most_one else None
        self._scale.apply(grads)
        if total is not None:
            self._sums.append(total)
        elif self._probes is not None:
            self._sums += self._probes(grads)  # while they are in the cache
        self._grads.update(zip(bucket.members, grads, strict=True))

    def result(self) -> BackwardResult:
        """All gradients, in the order of the leaves."""
        before, sums = self._state.sync_state.leaves, self._sums if self._probes is not None else None
        after = states_after(self._schedule.plan, self._states, before, self._state.trained, self._trained)
        grads = [self._grads[m] for m in range(len(self._trained))]
        return BackwardResult(grads, after, sums=sums, skip=self._scale.skip)


class UpdateBuckets:
    """Runs the optimizer on each bucket. With `donate` in the state's own memory, else in copies."""

    def __init__(
        self,
        optimizer: Optimizer,
        state: TrainState,
        trained: Sequence[int],
        donate: bool,
        schedule: ProcessSchedule,
        scale: Scale,
    ):
        self.updated = 0
        self._optimizer, self._state, self._trained = optimizer, state, trained
        self._schedule, self._scale = schedule, scale
        self.params, self._opt_state = state.trained, state.opt_state
        if not donate:
            self.params, self._opt_state = tree.map(torch.clone, self.params), tree.map(torch.clone, self._opt_state)
        self._leaves = tree.flatten(self.params)[0]
        self._leaf_states = optimizer.leaf_states(self._opt_state, self.params)
        self._applied = scale.conditional(optimizer, [self._leaves[i] for i in trained])
        self._states: dict[int, LeafState] = {}

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        """Update the bucket's parameters with its gradients, which are overwritten."""
        grads = self._schedule.unpack(bucket, reduced)
        self.updated += 1
        self._scale.apply(grads)
        at = [self._trained[m] for m in bucket.members]
        with comm.span("update"):
            self._applied.apply_leaves(
                grads, [self._leaf_states[i] for i in at], [self._leaves[i] for i in at], self._state.step
            )
        self._states.update(self._schedule.plan.states_by_leaf(bucket, reduced[1]))

    def result(self) -> BackwardResult:
        """Parameters and optimizer state after the step."""
        before = self._state.sync_state.leaves
        after = states_after(self._schedule.plan, self._states, before, self.params, self._trained)
        return BackwardResult(None, after, self.params, self._optimizer.advance(self._opt_state))
