"""The second half of an eager training step: the backward pass, the wait for its reductions, the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ltx import collectives, comm, tree
from ltx.axis import Axis
from ltx.errors import WeightError
from ltx.gradients.process_schedule import ProcessSchedule
from ltx.gradients.reduction import LeafState
from ltx.gradients.schedule import Plan
from ltx.optim import Optimizer
from ltx.strategies.update import Update
from ltx.training.train_state import TrainState
from ltx.transforms.sync_state import states_after
from ltx.typing import Tree

T = TypeVar("T")


@dataclass(frozen=True)
class BackwardResult:
    """What the backward pass gave: reduced gradients; or, updated by bucket, None and the optimizer's result."""

    grads: list[torch.Tensor] | None
    sync_flat: list[torch.Tensor]
    params: Tree = None
    opt_state: Tree = None
    sums: list[torch.Tensor | float] | None = None  # of the gradients, if asked for


@dataclass(frozen=True)
class BackwardUpdate:
    """The second half of an eager step: backward pass, wait, optimizer."""

    optimizer: Optimizer
    by_bucket: bool  # the optimizer runs as buckets complete
    state: TrainState
    leaves: list[torch.Tensor]  # the parameters that are trained
    trained: list[int]  # their positions among the parameters' leaves
    sync_leaves: list[torch.Tensor]
    inputs: list[torch.Tensor]  # what the loss is differentiated with respect to: the leaves, or one source for all
    donate: bool
    loss_scale: float = 1.0
    probes: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None  # sums of complete gradients

    def backward(self, total: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of `total`, times the loss scale, with respect to the inputs."""
        if self.loss_scale != 1:
            with torch.enable_grad():
                total = total * self.loss_scale
        if not self.inputs or not total.requires_grad:
            return [None] * len(self.inputs)
        # Not autograd.grad: accumulating lays each gradient out as its parameter, which the optimizers' kernels want,
        # while it is still in the cache.
        with comm.span("backward"):
            torch.autograd.backward(total, inputs=self.inputs)
        return [x.grad for x in self.inputs]

    def at_once(self, total: torch.Tensor, divisor: torch.Tensor | None) -> BackwardResult:
        """Without communication: all gradients are there after the backward pass. `divisor`: a Weighted's."""
        found = self.backward(total)
        count = len(self.leaves)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(self.leaves, found, strict=False)]
        grads = self.divided(grads, divisor)
        states = [x if g is None else g for x, g in zip(self.sync_leaves, found[count:], strict=True)]
        return BackwardResult(grads, [x.detach() for x in states])

    def divided(self, grads: list[torch.Tensor], divisor: torch.Tensor | None) -> list[torch.Tensor]:
        """Gradients of this rank alone: divided by a Weighted's `divisor`, and without the loss scale."""
        if divisor is not None:
            grads = [g / divisor.to(g.dtype) for g in grads]
        return grads if self.loss_scale == 1 else [g * (1 / self.loss_scale) for g in grads]

    def wait(self, schedule: ProcessSchedule, weighted: bool) -> tuple[BackwardResult, comm.StepSummary]:
        """Wait for every bucket and the step summary. With overlap="update", update bucket by bucket."""
        scale = self.scale(schedule, weighted)
        grads: dict[int, torch.Tensor] = {}
        states: dict[int, LeafState] = {}
        sums: list[torch.Tensor | float] = []
        params, opt_state, targets = self.in_place() if self.by_bucket else (None, None, None)
        updated = 0
        try:
            for bucket, reduced, next_states in _without_grad(schedule.wait_each()):
                if next_states:
                    states.update(zip(bucket.members, schedule.plan.states_of(bucket, next_states), strict=True))
                if targets is not None:
                    updated += 1
                    self.apply_bucket(bucket.members, reduced, targets, scale)
                    continue
                total = schedule.total(bucket) if self.probes is not None and abs(scale) <= 1 else None
                scaled(reduced, scale)
                if total is not None:  # a multiple (of at most 1) of finite numbers is finite
                    sums.append(total)
                elif self.probes is not None:
                    sums += self.probes(reduced)  # while they are in the cache
                grads.update(zip(bucket.members, reduced, strict=True))
            summary = schedule.finish()
        except BaseException as error:
            self.invalidated_by(error, updated, schedule.plan)
            raise
        assert summary is not None
        before = self.state.sync_state.leaves
        flat = tree.flatten(states_after(schedule.plan, states, before, self.state.trained, self.trained))[0]
        if targets is None:
            found = sums if self.probes is not None else None
            return BackwardResult([grads[m] for m in range(len(self.leaves))], flat, sums=found), summary
        return BackwardResult(None, flat, params, self.optimizer.advance(opt_state)), summary

    def invalidated_by(self, error: BaseException, updated: int | None = None, plan: Plan | None = None) -> None:
        """Mark the state as invalid if `error` came when `updated` buckets (None: all) had been updated in place."""
        if self.donate and updated != 0:
            which = "all" if plan is None else f"{updated} of {len(plan.buckets)}"
            self.state.invalidate(
                f"this TrainState (step {self.state.step}) is invalid: {which} buckets had been updated in place when "
                f"something failed ({type(error).__name__}: {error}). Load a checkpoint. With "
                'overlap="backward" a state is that before the step or that after it.'
            )

    def scale(self, schedule: ProcessSchedule, weighted: bool) -> float:
        """The factor of reduced gradients. With weights this waits for the step summary."""
        return (self._weighted_scale(schedule) if weighted else 1.0) / self.loss_scale

    def _weighted_scale(self, schedule: ProcessSchedule) -> float:
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

    def in_place(self) -> tuple[Tree, Tree, tuple[list[torch.Tensor], list[Any], int]]:
        """Parameters and optimizer state to be updated in place: the state's own, or copies."""
        params, opt_state = self.state.trained, self.state.opt_state
        if not self.donate:
            params, opt_state = tree.map(torch.clone, params), tree.map(torch.clone, opt_state)
        leaves = tree.flatten(params)[0]
        return params, opt_state, (leaves, self.optimizer.leaf_states(opt_state, params), self.state.step)

    def apply_bucket(
        self,
        members: Sequence[int],
        grads: list[torch.Tensor],
        targets: tuple[list[torch.Tensor], list[Any], int],
        scale: float,
    ) -> None:
        """Update the parameters of one bucket with their reduced gradients, which are overwritten."""
        scaled(grads, scale)
        params, states, count = targets
        at = [self.trained[m] for m in members]
        with torch.no_grad(), comm.span("update"):
            self.optimizer.apply_leaves(grads, [states[i] for i in at], [params[i] for i in at], count)


def _without_grad(items: Iterator[T]) -> Iterator[T]:
    """`items`, each made without autograd, for which views of results would be costly."""
    while True:
        with torch.no_grad():
            item = next(items, None)
        if item is None:
            return
        yield item


def scaled(grads: Sequence[torch.Tensor], scale: float) -> None:
    """Multiply in place."""
    if scale != 1:
        torch._foreach_mul_(list(grads), scale)


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
    if bool(weight == 0):
        if local and axis.size > 1:  # no data on this rank, and so no gradient; its peers continue
            return torch.full_like(total, float("nan")), torch.ones_like(weight)
        raise WeightError("Weighted: the weights add up to 0, so there is no mean. The state is as before the step.")
    return total / weight, weight / axis.size if reduced and not alone else weight


def any_not_finite(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether any element isn't finite: a 0-dim bool tensor."""
    grads = [g for g in grads if g.numel()]
    if not grads:
        return torch.tensor(False)
    found = [g.isfinite().all().logical_not().to(grads[0].device) for g in grads]
    return torch.stack(found).any()
