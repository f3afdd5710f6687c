"""The second half of an eager training step: the backward pass, and the wait for its reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ltx import collectives, comm, tree
from ltx.axis import Axis
from ltx.errors import WeightError
from ltx.gradients.process_schedule import ProcessSchedule
from ltx.gradients.schedule import Plan
from ltx.optim import Optimizer
from ltx.strategies.update import Update
from ltx.training.completion import BackwardResult, CollectGradients, Completion, Scale, UpdateBuckets
from ltx.training.train_state import TrainState


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

    def run(self, total: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of `total`, times the loss scale, with respect to the inputs."""
        if not _is_one(self.loss_scale):
            with torch.enable_grad():
                total = total * self.loss_scale
        if not self.inputs or not total.requires_grad:
            return [None] * len(self.inputs)
        # Not autograd.grad: accumulating lays each gradient out as its parameter, which the optimizers' kernels want,
        # while it is still in the cache.
        with comm.span("backward"):
            torch.autograd.backward(total, inputs=self.inputs)
        return [x.grad for x in self.inputs]

    def run_alone(self, total: torch.Tensor, divisor: torch.Tensor | None) -> BackwardResult:
        """Without communication: all gradients are there after the backward pass. `divisor`: a Weighted's."""
        found = self.run(total)
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

    def wait(self, schedule: ProcessSchedule, completion: Completion) -> tuple[BackwardResult, comm.StepSummary]:
        """Wait for every bucket and the step summary."""
        with torch.no_grad():  # views of results would be costly
            for bucket, reduced in schedule.wait_buckets():
                completion.complete(bucket, reduced)
        summary = schedule.finish()
        assert summary is not None
        return completion.result(), summary

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

    def update(self, grads: list[torch.Tensor], finite: bool | torch.Tensor | None) -> Update:
        """The optimizer's part, with the reduced gradients. Empties `grads`, so that nothing else holds them."""
        leaves, spec = tree.flatten(self.state.trained)
        by_place = dict(zip(self.trained, grads, strict=True))
        grads.clear()
        filled = [by_place[i] if i in by_place else torch.zeros_like(x) for i, x in enumerate(leaves)]
        return Update(
            self.optimizer,
            self.state.trained,
            tree.unflatten(spec, filled),
            self.state.opt_state,
            self.donate,
            finite,
        )


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
