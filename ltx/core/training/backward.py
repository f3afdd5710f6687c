"""The results of the two halves of an eager training step, and the losses and factors between them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ltx.core import collectives, comm
from ltx.core.base import tree
from ltx.core.base.errors import StepError, UnusedParameterWarning, no_mean
from ltx.core.collectives.reduce import unusable
from ltx.core.gradients.marker import Marker
from ltx.core.gradients.pending import ProcessSchedule
from ltx.core.gradients.planning import Plan
from ltx.core.gradients.reduction import LeafState
from ltx.core.optim.base import Optimizer, unless
from ltx.core.ranks.axis import Axis
from ltx.core.training.accumulate import MicroBatches
from ltx.core.training.train_state import TrainState
from ltx.core.transforms.run import Run
from ltx.typing import Tree


class Forward(NamedTuple):
    """The results of the forward pass."""

    run: Run  # the call of the user's step
    leaves: list[torch.Tensor]  # the parameters that the step was given
    sync_leaves: list[torch.Tensor]  # the communication state that the step was given
    sync_spec: Any  # its structure
    total: torch.Tensor  # the loss, or a Weighted's sum of losses
    weight: torch.Tensor | None  # a Weighted's sum of weights; None for a plain loss
    buffers: Tree  # the next buffers, which the step returned; None if there are none
    aux: Any  # the other outputs of the step
    mean: torch.Tensor | None  # the mean loss, if it is asked for and has to be communicated


class Backward(NamedTuple):
    """The second half of an eager step: the backward pass."""

    optimizer: Optimizer
    state: TrainState
    forward: Forward
    # the tensors to differentiate the loss with respect to: the leaves, or a single source of them all
    inputs: list[torch.Tensor]
    donate: bool  # parameters and optimizer state are updated in place
    loss_scale: float | torch.Tensor  # the factor of the loss; a tensor where the host doesn't wait for it
    #: If the guard wants them: returns sums of gradients, which are finite if the gradients are.
    probes: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None
    #: At a training's first step, the paths of parameters that the loss doesn't depend on on this rank, by their places
    #: among the leaves. Parameters whose gradients other ranks have are taken out later.
    unused: dict[int, str]

    def objective(self, total: torch.Tensor) -> torch.Tensor | None:
        """The tensor that is differentiated: `total` times the loss scale; None if it depends on no input.

        The pass uses ``torch.autograd.backward`` and not ``grad``, because accumulation gives each gradient its
        parameter's memory layout while the gradient is in the cache. Optimizers' kernels need that layout.
        """
        if not is_one(self.loss_scale):
            with torch.enable_grad():
                total = total * self.loss_scale
        return total if self.inputs and total.requires_grad else None

    def run_alone(self, total: torch.Tensor, divisor: torch.Tensor | None) -> BackwardResult:
        """Run a backward pass that doesn't communicate. `divisor`: a Weighted's sum of weights, else None."""
        if (objective := self.objective(total)) is not None:
            with comm.span("backward"):
                torch.autograd.backward(objective, inputs=self.inputs)
        found = [None if objective is None else x.grad for x in self.inputs]
        count = len(self.forward.leaves)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(self.forward.leaves, found, strict=False)]
        grads = self.divided(grads, divisor)
        states = [x if g is None else g for x, g in zip(self.forward.sync_leaves, found[count:], strict=True)]
        return BackwardResult(grads, tree.unflatten(self.forward.sync_spec, [x.detach() for x in states]))

    def divided(self, grads: list[torch.Tensor], divisor: torch.Tensor | None) -> list[torch.Tensor]:
        """Gradients of this rank alone: divided by a Weighted's `divisor`, and without the loss scale."""
        if divisor is not None:
            # In float32 at least: float16 can't represent 100,000, and bfloat16 can't represent 1,025.
            grads = [(g.to(torch.promote_types(g.dtype, divisor.dtype)) / divisor).to(g.dtype) for g in grads]
        return grads if is_one(self.loss_scale) else [g * (1 / self.loss_scale) for g in grads]

    def look(self, members: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Remove the parameters at the places `members` from :attr:`unused` if their `grads` aren't zero."""
        for member, grad in zip(members, grads, strict=True):
            if member in self.unused and bool(grad.any()):
                del self.unused[member]
                if len(self.unused) + 1 == len(self.forward.leaves):  # a rank without data doesn't know of the others
                    self.unused.clear()

    def report_unused(self, shared: bool) -> None:
        """Warn of :attr:`unused`; raise if these are all parameters. `shared`: the gradients are those of all ranks.

        If they aren't, other ranks may use parameters, while this one has no data in this step.
        """
        paths = list(self.unused.values())
        said = ", ".join(map(repr, paths[:6])) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")
        todo = (
            "Leave out those that no step uses: train_step(..., trainable=lambda path: path not in "
            f"{{{paths[0]!r}, ...}}). Keep those that other steps or ranks use, such as idle experts."
        )
        text = f"train_step: the loss of the first step doesn't depend on {said}"
        if len(paths) == len(self.forward.leaves):
            todo = "These are all: use the parameters that the step is given, and don't detach the loss."
            if shared:
                raise StepError(f"{text}, on any rank. {todo}")
        warnings.warn(
            f"{text}. Their gradients are zeros, and weight decay moves them, where torch leaves parameters whose "
            f".grad is None alone. {todo}",
            UnusedParameterWarning,
            stacklevel=1,
        )

    def invalidated_by(self, error: BaseException, updated: int | None = None, plan: Plan | None = None) -> None:
        """Mark the state as invalid if `updated` buckets (None: all) had been updated in place before `error`."""
        if self.donate and updated != 0:
            which = "all" if plan is None else f"{updated} of {len(plan.buckets)}"
            self.state.invalidate(
                f"this TrainState (step {self.state.step}) is invalid: {which} buckets had been updated in place when "
                f"something failed ({type(error).__name__}: {error}). Load a checkpoint. With "
                'overlap="backward" a state is that before the step or that after it.'
            )


def unreached(total: torch.Tensor, leaves: Sequence[torch.Tensor], plan: Plan | None) -> list[int]:
    """The places of the leaves that aren't in the graph of `total`. `plan`: the plan of the graph's markers.

    With micro-batches only the last is looked at: the single graph node of the others has all parameters as inputs.
    """
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    queue: list[Any] = [total.grad_fn]
    missing, seen = set(places.values()) - {places.get(id(total))}, set[Any]()
    for node in queue:  # the loop appends to the queue
        ends = node is None or isinstance(node, (MicroBatches._backward_cls, Marker._backward_cls))
        for following, output in () if ends else node.next_functions:
            if plan is not None and isinstance(following, Marker._backward_cls):
                bucket = plan.buckets[following.bucket]  # type: ignore[attr-defined]
                missing.difference_update(bucket.members[output : output + 1])
            missing.discard(places.get(id(getattr(following, "variable", None)), -1))
            if following not in seen:
                seen.add(following)
                queue.append(following)
    return sorted(missing)


def is_one(scale: float | torch.Tensor) -> bool:
    """Whether `scale` is 1, as far as the host knows without waiting for a device."""
    return not isinstance(scale, torch.Tensor) and scale == 1


def mean_at_once(
    total: torch.Tensor, weight: torch.Tensor | None, axis: Axis, local: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(mean loss, divisor of the gradients), without a step summary; the divisor of an unweighted step is None.

    `local`: ranks don't share gradients, so they don't wait for each other to share losses either.
    """
    total, alone = total.detach(), local or axis.size == 1
    if weight is None:
        # a copy, since a loss may be a parameter, which the optimizer overwrites
        mean: torch.Tensor = total.clone() if alone else collectives.pmean(total, axis)
        return mean, None
    if not alone:
        total, weight = collectives.psum((total, weight), axis)
    fault = int(axis.ranks.read(unusable(weight), "the sum of the weights"))
    if fault:
        if fault == 1 and local and axis.size > 1:  # this rank has no data and no gradient; its peers continue
            return torch.full_like(total, float("nan")), torch.ones_like(weight)
        raise no_mean(state="The state is as before the step. ", odd=fault == 2)
    return total / weight, weight


class BackwardResult(NamedTuple):
    """The results of the backward pass."""

    grads: list[torch.Tensor] | None  # reduced gradients; None if the optimizer has run bucket by bucket
    states: dict[str, LeafState]  # the next communication state, by path
    params: Tree = None  # the new parameters, if the optimizer has run bucket by bucket
    opt_state: Tree = None  # the new optimizer state, if the optimizer has run bucket by bucket
    sums: list[torch.Tensor | float] | None = None  # the sums of the gradients, if the guard wants them
    # a bool on the device: if true, nothing may be updated; None if there is no such condition
    skip: torch.Tensor | None = None


class Scale(NamedTuple):
    """The factor by which reduced gradients are multiplied."""

    factor: float | torch.Tensor  # a tensor if the host doesn't wait for its value
    # a bool on the device: if true, nothing may be updated; None if there is no such condition
    skip: torch.Tensor | None = None

    def apply(self, grads: Sequence[torch.Tensor]) -> None:
        """Multiply `grads` in place by the factor."""
        if not is_one(self.factor):
            torch._foreach_mul_(list(grads), self.factor)

    def conditional(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Optimizer:
        """`optimizer`, wrapped so that it does nothing if `skip` is true."""
        return optimizer if self.skip is None else unless(optimizer, self.skip, params)


def scale_of(work: Backward, schedule: ProcessSchedule, weighted: bool) -> Scale:
    """The factor of reduced gradients. If `weighted`, it waits for the step summary, unless that stays on a device."""
    if not weighted:
        return Scale(1.0 / work.loss_scale)
    summary = schedule.pending.summary
    assert summary is not None
    if not summary.stays_on_device:
        number = float(summary.wait().weight)
        if 0 < number < math.inf:
            return Scale(schedule.among.size / number / work.loss_scale)
        if number or schedule.among is schedule.comm:
            schedule.pending.flush()  # every rank raises: keep the channels in step
            schedule.finish()
            raise no_mean(state="The state is as before the step. ", odd=number != 0)
        return Scale(1 / work.loss_scale)  # no data on the ranks that share these gradients; other ranks continue
    weight = summary.enqueued().weight
    empty = ~(
        (weight > 0) & (weight < math.inf)
    )  # the host raises later, when it reads the summary; until then nothing may change
    return Scale((schedule.among.size / weight).masked_fill(empty, 0.0) / work.loss_scale, empty)
