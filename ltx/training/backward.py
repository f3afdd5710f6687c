"""The second half of an eager training step: the backward pass, and what is done with its buckets when they complete.

When that is, the step's policy says: at the end of the backward pass for all of them, as each arrives, or where the
next step first uses a parameter (:class:`ltx.training.pending_step.PendingStep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ltx import collectives, comm, tree
from ltx.axis import Axis
from ltx.errors import WeightError
from ltx.gradients.buckets import Bucket
from ltx.gradients.packing import unpack
from ltx.gradients.process_schedule import ProcessSchedule
from ltx.gradients.reduction import LeafState, Reduced
from ltx.gradients.schedule import Plan
from ltx.optim import Optimizer
from ltx.training.train_state import TrainState
from ltx.transforms.sync_state import states_after
from ltx.typing import Tree


@dataclass(frozen=True)
class Backward:
    """The second half of an eager step.

    Attributes:
        optimizer, state: the step's.
        leaves, trained: the parameters that are trained, and their places among the leaves of the parameters.
        sync_leaves, sync_spec: the communication state.
        inputs: what the loss is differentiated with respect to: the leaves, or one source for all.
        donate: parameters and optimizer state are updated in place.
        loss_scale: the factor of the loss; a tensor where the host doesn't wait for it.
        probes: gives sums of complete gradients, where the guard wants them.
    """

    optimizer: Optimizer
    state: TrainState
    leaves: list[torch.Tensor]
    trained: list[int]
    sync_leaves: list[torch.Tensor]
    sync_spec: Any
    inputs: list[torch.Tensor]
    donate: bool
    loss_scale: float | torch.Tensor = 1.0
    probes: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None

    def objective(self, total: torch.Tensor) -> torch.Tensor | None:
        """What the backward pass differentiates: `total` times the loss scale; None if no input has a part in it.

        The pass is ``torch.autograd.backward`` and not ``grad``: accumulating lays each gradient out as its parameter,
        which the optimizers' kernels want, while it is still in the cache.
        """
        if not _is_one(self.loss_scale):
            with torch.enable_grad():
                total = total * self.loss_scale
        return total if self.inputs and total.requires_grad else None

    def run_alone(self, total: torch.Tensor, divisor: torch.Tensor | None) -> BackwardResult:
        """Without communication: all gradients are there after the backward pass. `divisor`: a Weighted's."""
        if (objective := self.objective(total)) is not None:
            with comm.span("backward"):
                torch.autograd.backward(objective, inputs=self.inputs)
        found = [None if objective is None else x.grad for x in self.inputs]
        count = len(self.leaves)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(self.leaves, found, strict=False)]
        grads = self.divided(grads, divisor)
        states = [x if g is None else g for x, g in zip(self.sync_leaves, found[count:], strict=True)]
        return BackwardResult(grads, tree.unflatten(self.sync_spec, [x.detach() for x in states]))

    def divided(self, grads: list[torch.Tensor], divisor: torch.Tensor | None) -> list[torch.Tensor]:
        """Gradients of this rank alone: divided by a Weighted's `divisor`, and without the loss scale."""
        if divisor is not None:
            grads = [g / divisor.to(g.dtype) for g in grads]
        return grads if _is_one(self.loss_scale) else [g * (1 / self.loss_scale) for g in grads]

    def completion(self, schedule: ProcessSchedule, by_bucket: bool, scale: Scale) -> Completion:
        """What is done with complete buckets: they are updated one by one, or their gradients collected."""
        if by_bucket:
            return UpdateBuckets(self.optimizer, self.state, self.trained, self.donate, schedule, scale)
        return CollectGradients(self.state, self.trained, schedule, scale, self.probes)

    def invalidated_by(self, error: BaseException, updated: int | None = None, plan: Plan | None = None) -> None:
        """Mark the state as invalid if `error` came when `updated` buckets (None: all) had been updated in place."""
        if self.donate and updated != 0:
            which = "all" if plan is None else f"{updated} of {len(plan.buckets)}"
            self.state.invalidate(
                f"this TrainState (step {self.state.step}) is invalid: {which} buckets had been updated in place when "
                f"something failed ({type(error).__name__}: {error}). Load a checkpoint. With "
                'overlap="backward" a state is that before the step or that after it.'
            )

    def scale(self, schedule: ProcessSchedule, weighted: bool) -> Scale:
        """The factor of reduced gradients. With weights this waits for the step summary, if that comes to the host."""
        if not weighted:
            return Scale(1.0 / self.loss_scale)
        assert schedule.summary is not None
        if not schedule.summary.stays_on_device or self.optimizer.unless(_NEVER, self.leaves) is None:
            return Scale(_weighted_scale(schedule) / self.loss_scale)
        weight = schedule.summary.enqueued().weight
        empty = weight == 0  # the host raises when it reads the summary; until then nothing may change
        return Scale((schedule.among.size / weight).masked_fill(empty, 0.0) / self.loss_scale, empty)


_NEVER = torch.tensor(False)


def _is_one(scale: float | torch.Tensor) -> bool:
    return not isinstance(scale, torch.Tensor) and scale == 1


def _weighted_scale(schedule: ProcessSchedule) -> float:
    assert schedule.summary is not None
    weight = float(schedule.summary.wait().weight)
    alone = schedule.among is not schedule.comm
    if weight == 0 and alone:  # no data on this rank and those that it shares gradients with; other ranks continue
        return 1.0
    if weight == 0:
        schedule.drain()  # every rank raises: keep the channels in step
        raise WeightError(
            "Weighted: the weights of all ranks add up to 0, so there is no mean. The state is as before the step. "
            "Give at least one rank a sample, or skip the step on all of them."
        )
    return schedule.among.size / weight


def mean_at_once(
    total: torch.Tensor, weight: torch.Tensor | None, axis: Axis, local: bool, reduced: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(mean loss, what gradients are divided by), without a step summary; None for that of an unweighted step.

    `local`: ranks that don't share gradients don't wait for each other to share losses. `reduced`: gradients are means
    over the ranks of `axis`.
    """
    total, alone = total.detach(), local or axis.size == 1
    if weight is None:
        mean: torch.Tensor = total if alone else collectives.pmean(total, axis)
        return mean, None
    if not alone:
        total, weight = collectives.psum((total, weight), axis)
    empty = weight == 0
    if bool(empty if axis.comm is None else axis.comm.read(empty, "the sum of the weights")):
        if local and axis.size > 1:  # no data on this rank, and so no gradient; its peers continue
            return torch.full_like(total, float("nan")), torch.ones_like(weight)
        raise WeightError("Weighted: the weights add up to 0, so there is no mean. The state is as before the step.")
    return total / weight, weight / axis.size if reduced and not alone else weight


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

    @property
    def is_one(self) -> bool:
        """Whether it changes nothing."""
        return not isinstance(self.factor, torch.Tensor) and self.factor == 1

    def apply(self, grads: Sequence[torch.Tensor]) -> None:
        """Multiply in place."""
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
        grads = unpack(reduced[0].view(-1), bucket)
        self._states.update(self._schedule.plan.states_by_leaf(bucket, reduced[1]))
        # A multiple (of at most 1) of finite numbers is finite.
        total = self._schedule.total(bucket) if self._probes is not None and self._scale.at_most_one else None
        if not self._scale.is_one:
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
        grads = unpack(reduced[0].view(-1), bucket)
        self.updated += 1
        if not self._scale.is_one:
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
