"""The two halves of an eager training step: what the forward pass gave, and what the backward pass needs and gives.

What is done with its buckets is in :mod:`ltx.core.training.completion`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ltx.core import collectives, comm
from ltx.core.base import tree
from ltx.core.base.errors import UnusedParameterWarning, WeightError
from ltx.core.gradients.marker import Mark
from ltx.core.gradients.planning import Plan
from ltx.core.gradients.reduction import LeafState
from ltx.core.gradients.schedule import ProcessSchedule
from ltx.core.optim import Optimizer
from ltx.core.ranks.axis import Axis
from ltx.core.training.accumulate import MicroBatches
from ltx.core.training.train_state import TrainState
from ltx.core.transforms.run import Run
from ltx.typing import Tree


@dataclass(frozen=True)
class Forward:
    """What the forward pass gave.

    Attributes:
        run: the call of the user's step.
        leaves, sync_leaves, sync_spec: the parameters and the communication state that the step was given.
        total, weight: the loss, or a Weighted's sums; None for the weight of a plain loss.
        buffers, aux, mean: what the step returned besides; the mean loss, if that is asked for and has to be taken.
    """

    run: Run
    leaves: list[torch.Tensor]
    sync_leaves: list[torch.Tensor]
    sync_spec: Any
    total: torch.Tensor
    weight: torch.Tensor | None
    buffers: Tree
    aux: Any
    mean: torch.Tensor | None

    @property
    def schedule(self) -> ProcessSchedule | None:
        """What reduces the gradients, if ranks are processes that share them."""
        return self.run.schedule if isinstance(self.run.schedule, ProcessSchedule) else None


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
        unused: the paths of parameters that the loss doesn't depend on on this rank, at a training's first step, by
            their places among `trained`; those are taken out whose gradients other ranks have.
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
    unused: dict[int, str] = field(default_factory=dict)

    def objective(self, total: torch.Tensor) -> torch.Tensor | None:
        """What the backward pass differentiates: `total` times the loss scale; None if no input has a part in it.

        The pass is ``torch.autograd.backward`` and not ``grad``: accumulating lays each gradient out as its parameter,
        which the optimizers' kernels want, while it is still in the cache.
        """
        if not is_one(self.loss_scale):
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
            # In float32 at least: float16 has no 100,000, and bfloat16 no 1,025.
            grads = [(g.to(torch.promote_types(g.dtype, divisor.dtype)) / divisor).to(g.dtype) for g in grads]
        return grads if is_one(self.loss_scale) else [g * (1 / self.loss_scale) for g in grads]

    def look(self, members: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Take parameters out of :attr:`unused` that have gradients: `grads`, of these places among `trained`."""
        for member, grad in zip(members, grads, strict=True):
            if member in self.unused and bool(grad.any()):
                del self.unused[member]

    def warn_of_unused(self) -> None:
        if self.unused:
            paths = list(self.unused.values())
            said = ", ".join(map(repr, paths[:6])) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")
            warnings.warn(
                f"train_step: the loss of the first step doesn't depend on {said}. Their gradients are zeros, and "
                "weight decay moves them, where torch leaves parameters whose .grad is None alone. Leave out what "
                f"isn't trained: train_step(..., trainable=lambda path: path not in {{{paths[0]!r}, ...}}).",
                UnusedParameterWarning,
                stacklevel=1,
            )

    def invalidated_by(self, error: BaseException, updated: int | None = None, plan: Plan | None = None) -> None:
        """Mark the state as invalid if `error` came when `updated` buckets (None: all) had been updated in place."""
        if self.donate and updated != 0:
            which = "all" if plan is None else f"{updated} of {len(plan.buckets)}"
            self.state.invalidate(
                f"this TrainState (step {self.state.step}) is invalid: {which} buckets had been updated in place when "
                f"something failed ({type(error).__name__}: {error}). Load a checkpoint. With "
                'overlap="backward" a state is that before the step or that after it.'
            )


def unreached(total: torch.Tensor, leaves: Sequence[torch.Tensor], plan: Plan | None) -> list[int]:
    """The places of the leaves that `total` doesn't depend on, by its graph; `plan`: that of its markers.

    Of micro-batches the last one tells: the node of the others has all parameters for inputs.
    """
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    queue: list[Any] = [total.grad_fn]
    missing, seen = set(places.values()) - {places.get(id(total))}, set[Any]()
    for node in queue:  # which grows meanwhile
        ends = node is None or isinstance(node, (MicroBatches._backward_cls, Mark._backward_cls))
        for following, output in () if ends else node.next_functions:
            if plan is not None and isinstance(following, Mark._backward_cls):
                bucket = plan.buckets[following.bucket]  # type: ignore[attr-defined]
                missing.difference_update(bucket.members[output : output + 1])
            missing.discard(places.get(id(getattr(following, "variable", None)), -1))
            if following not in seen:
                seen.add(following)
                queue.append(following)
    return sorted(missing)


def is_one(scale: float | torch.Tensor) -> bool:
    """Whether the host knows that it is 1."""
    return not isinstance(scale, torch.Tensor) and scale == 1


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
