"""The backward pass of an eager training step, and what is done with each bucket when it is complete."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from ltx.core import collectives, comm
from ltx.core.base import private, tree
from ltx.core.base.errors import StepError, UnusedParameterWarning, no_mean
from ltx.core.collectives.reduce import unusable
from ltx.core.gradients.buffers import unpack
from ltx.core.gradients.marker import Marker
from ltx.core.gradients.pending import ProcessSchedule
from ltx.core.gradients.planning import Plan, grads_kept
from ltx.core.gradients.reduction import Bucket, LeafState, Program, Reduced
from ltx.core.optim.base import LeafStates, Optimizer, Prepared, advanced, apply_leaves, unless
from ltx.core.ranks.axis import Axis
from ltx.core.training.accumulate import MicroBatches
from ltx.core.training.guard import probes
from ltx.core.training.train_state import TrainState
from ltx.core.transforms.closure_check import edges
from ltx.core.transforms.run import Run
from ltx.core.transforms.strategy import Old, PostUpdateHook, may_be_written_to, take_updated
from ltx.core.transforms.sync_state import states_after
from ltx.typing import Tree


class Backward(NamedTuple):
    """The backward pass of an eager step, after its forward pass."""

    optimizer: Optimizer
    state: TrainState
    run: Run  # the call of the user's step
    leaves: list[torch.Tensor]  # the parameters that the step was given
    sync_leaves: list[torch.Tensor]  # the communication state that the step was given
    inputs: list[torch.Tensor]  # what the loss is differentiated with respect to: these, or a single source of them all
    sync_spec: Any  # its structure
    total: torch.Tensor  # the loss, or a Weighted's sum of losses
    weight: torch.Tensor | None  # a Weighted's sum of weights; None for a plain loss
    donate: bool  # parameters and optimizer state are updated in place
    loss_scale: float | torch.Tensor  # the factor of the loss; a tensor where the host doesn't wait for it
    guarded: bool  # whether the guard wants sums of gradients, which are finite if the gradients are
    #: At a training's first step, paths by place: of parameters that the loss doesn't reach, later on no rank.
    unused: dict[int, str]
    prepared: Prepared | None  # the optimizer's faster update of the state's parameters, if it has one

    def objective(self) -> torch.Tensor | None:
        """What is differentiated: `total` times the loss scale; None if it depends on no input. The pass accumulates,
        and so gives each gradient its parameter's memory layout, which kernels need, while it is in the cache.
        """
        total = self.total
        if isinstance(self.loss_scale, torch.Tensor) or self.loss_scale != 1:
            with torch.enable_grad():
                total = total * self.loss_scale
        return total if total.requires_grad and (self.inputs or self.run.own) else None

    def mean_at_once(self, axis: Axis, local: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(mean loss, a Weighted's divisor or None), without a step summary. `local`: ranks share no gradients."""
        total, weight, alone = self.total.detach(), self.weight, local or axis.size == 1
        if weight is None:
            # a copy, since a loss may be a parameter, which the optimizer overwrites
            return total.clone() if alone else collectives.pmean(total, axis), None
        if not alone:
            total, weight = collectives.psum((total, weight), axis)
        fault = int(axis.ranks.read(unusable(weight), "the sum of the weights"))
        if fault:
            if fault == 1 and local and axis.size > 1:  # this rank has no data and no gradient; its peers continue
                return torch.full_like(total, float("nan")), torch.ones_like(weight)
            raise no_mean(state="The state is as before the step. ", odd=fault == 2)
        return total / weight, weight

    def run_alone(self, divisor: torch.Tensor | None) -> BackwardResult:
        """Run a backward pass that doesn't communicate. `divisor`: a Weighted's sum of weights, else None."""
        if (objective := self.objective()) is not None:
            with comm.span("backward"), grads_kept(self.run.own):
                private.run_backward([objective], None, False, [*self.inputs, *self.run.own])
        found = [None if objective is None else x.grad for x in self.inputs]
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(self.leaves, found, strict=False)]
        states = [x if g is None else g for x, g in zip(self.sync_leaves, found[len(grads) :], strict=True)]
        after = tree.unflatten(self.sync_spec, [x.detach() for x in states])
        return BackwardResult(self.divided(grads, divisor), after)

    def divided(self, grads: list[torch.Tensor], divisor: torch.Tensor | None) -> list[torch.Tensor]:
        """Gradients of this rank alone: divided by a Weighted's `divisor`, and without the loss scale."""
        if divisor is not None:
            # In float32 at least: float16 can't represent 100,000, and bfloat16 can't represent 1,025.
            grads = [(g.to(torch.promote_types(g.dtype, divisor.dtype)) / divisor).to(g.dtype) for g in grads]
        scaled = isinstance(self.loss_scale, torch.Tensor) or self.loss_scale != 1
        return [g * (1 / self.loss_scale) for g in grads] if scaled else grads

    def look(self, members: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Remove the parameters at the places `members` from :attr:`unused` if their `grads` aren't zero."""
        for member, grad in zip(members, grads, strict=True):
            if member in self.unused and bool(grad.any()):
                del self.unused[member]
                if len(self.unused) + 1 == len(self.leaves):  # a rank without data doesn't know of the others
                    self.unused.clear()

    def report_unused(self, shared: bool) -> None:
        """Warn of :attr:`unused`; raise if these are all and gradients are `shared`, or other ranks may use them."""
        paths = list(self.unused.values())
        said = ", ".join(map(repr, paths[:6])) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")
        todo = (
            "Leave out those that no step uses: train_step(..., trainable=lambda path: path not in "
            f"{{{paths[0]!r}, ...}}). Keep those that other steps or ranks use, such as idle experts."
        )
        text = f"train_step: the loss of the first step doesn't depend on {said}"
        if len(paths) == len(self.leaves):
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
            what = f"{which} buckets had been updated in place when something failed"
            instead = 'Load a checkpoint. With overlap="backward" a state is that before the step or that after it.'
            self.state.invalidate(what, error, instead)


def unreached(total: torch.Tensor, leaves: Sequence[torch.Tensor], plan: Plan | None) -> list[int]:
    """The places of the leaves that aren't in the graph of `total`. `plan`: the plan of the graph's markers. With
    micro-batches only the last is looked at: the single graph node of the others has all parameters as inputs.
    """
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    missing = set(places.values()) - {places.get(id(total))}
    for _, node, output in edges([total.grad_fn], lambda node: Marker.made(node) or MicroBatches.made(node)):
        if plan is not None and Marker.made(node):
            missing.difference_update(plan.buckets[node.bucket].members[output : output + 1])
        missing.discard(places.get(id(getattr(node, "variable", None)), -1))
    return sorted(missing)


class BackwardResult(NamedTuple):
    grads: list[torch.Tensor] | None  # reduced gradients; None if the optimizer has run bucket by bucket
    states: dict[str, LeafState]  # the next communication state, by path
    params: Tree = None  # the new parameters, if the optimizer has run bucket by bucket
    opt_state: Tree = None  # the new optimizer state, if the optimizer has run bucket by bucket
    sums: list[torch.Tensor | float] | None = None  # the sums of the gradients, if the guard wants them
    skip: torch.Tensor | None = None  # as :func:`scale_of` has found it


def scale_of(work: Backward, schedule: ProcessSchedule) -> tuple[float | torch.Tensor, torch.Tensor | None]:
    """The factor of reduced gradients. A Weighted's waits for the step summary, unless that stays on a device: then it
    is a tensor, and a bool is beside it; if that is true, nothing may be updated.
    """
    if work.weight is None:
        return 1.0 / work.loss_scale, None
    summary = schedule.pending.summary
    assert summary is not None
    if not summary.stays_on_device:
        number = float(summary.wait().weight)
        if 0 < number < math.inf:
            return schedule.among.size / number / work.loss_scale, None
        if number or schedule.among is schedule.comm:
            schedule.pending.flush()  # every rank raises: keep the channels in step
            schedule.finish()
            raise no_mean(state="The state is as before the step. ", odd=number != 0)
        return 1 / work.loss_scale, None  # no data on the ranks that share these gradients; other ranks continue
    weight = summary.enqueued().weight
    # The host raises later, when it reads the summary; until then nothing may change.
    empty = ~((weight > 0) & (weight < math.inf))
    return (schedule.among.size / weight).masked_fill(empty, 0.0) / work.loss_scale, empty


class _Completion:
    """Has `complete`, called with each complete bucket of a backward pass, and `result`, of all buckets."""

    def __init__(self, work: Backward, schedule: ProcessSchedule):
        self.updated = 0  # the number of buckets that the optimizer has updated
        self.mean: torch.Tensor | None = None  # the mean loss, where no step summary of all ranks has it
        self._work, self._schedule, self._plan = work, schedule, schedule.plan
        self._states: dict[int, LeafState] = {}
        self._factor: float | torch.Tensor = 1.0  # of reduced gradients

    def _scale(self, grads: Sequence[torch.Tensor]) -> None:
        if isinstance(self._factor, torch.Tensor) or self._factor != 1:
            torch._foreach_mul_(list(grads), self._factor)

    def _begin_update(self, bucket: Bucket, grads: Sequence[torch.Tensor]) -> None:
        """The optimizer is about to update the parameters of `bucket`, whose gradients are `grads`."""
        if self._work.unused:
            self._work.look(bucket.members, grads)
        self.updated += 1
        if self._work.donate:
            self._work.state.begin_writing()

    def _states_after(self) -> dict[str, LeafState]:
        state = self._work.state
        before = state.held_sync_state.leaves
        return states_after(self._plan, self._states, before, state.held_params) if before else {}


class CollectGradients(_Completion):
    """Collects gradients (``overlap="backward"``) for an optimizer that needs all at once. The state doesn't change."""

    def __init__(self, work: Backward, schedule: ProcessSchedule):
        super().__init__(work, schedule)
        self._factor, self._skip = scale_of(work, schedule)
        self._grads: dict[int, torch.Tensor] = {}
        self._sums: list[torch.Tensor | float] = []

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        flat = reduced[0] if reduced[0].dim() == 1 else reduced[0].view(-1)  # each call of torch costs microseconds
        if flat.dtype != bucket.dtype:
            flat = flat.to(bucket.dtype)
        if self._plan.keeps:
            self._states.update(self._plan.states_by_leaf(bucket, reduced[1]))
        # If the sum of the unscaled gradients is finite, so is the sum after a factor of at most 1.
        known = not isinstance(self._factor, torch.Tensor) and abs(self._factor) <= 1
        total = self._schedule.total(bucket) if self._work.guarded and known else None
        if isinstance(self._factor, torch.Tensor) or self._factor != 1:
            flat.mul_(self._factor)
        if total is not None:
            self._sums.append(total)
        elif self._work.guarded:
            self._sums += probes([flat])  # now, while the gradients are in the cache
        self._grads.update(zip(bucket.members, unpack(flat, bucket, cast=False), strict=True))

    def result(self) -> BackwardResult:
        grads = [*map(self._grads.__getitem__, range(len(self._work.leaves)))]
        return BackwardResult(grads, self._states_after(), sums=self._sums or None, skip=self._skip)


class UpdateBuckets(_Completion):
    """Runs the optimizer on each bucket (``overlap="update"``): in the state's memory with `donate`, else in copies."""

    def __init__(self, work: Backward, schedule: ProcessSchedule):
        super().__init__(work, schedule)
        self._factor, skip = scale_of(work, schedule)
        self._params, self._opt_state = work.state.held_params, work.state.held_opt_state
        if not work.donate:
            self._params, self._opt_state = tree.map(torch.clone, (self._params, self._opt_state))
        self._leaves = work.leaves if work.donate else tree.flatten(self._params)[0]
        self._applied = work.optimizer if skip is None else unless(work.optimizer, skip, self._leaves)
        self._runs = None
        if work.prepared is not None and work.prepared.holds(self._applied, self._params, self._opt_state):
            self._runs = work.prepared.runs

    @cached_property
    def _leaf_states(self) -> LeafStates:
        return self._work.optimizer.leaf_states(self._opt_state, self._params)

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        """Update the bucket's parameters with its gradients; the gradients are overwritten."""
        grads = unpack(reduced[0].view(-1), bucket)
        self._begin_update(bucket, grads)
        self._scale(grads)
        with comm.span("update"):
            if self._runs is None or not self._runs[bucket.index](grads, self._opt_state):
                states, params = zip(*[(self._leaf_states[m], self._leaves[m]) for m in bucket.members], strict=True)
                apply_leaves(self._applied, grads, states, params, self._opt_state)
        self._states.update(self._plan.states_by_leaf(bucket, reduced[1]))

    def result(self) -> BackwardResult:
        return BackwardResult(None, self._states_after(), self._params, advanced(self._opt_state))


class UpdateThenSend(_Completion):
    """Updates a bucket and sends it as soon as its gradients are ready (:mod:`ltx.core.transforms.strategy`). The pass
    may still need the old parameters, which so change only when it is over; the optimizer's state changes at once.
    """

    def __init__(self, hook: PostUpdateHook, work: Backward, schedule: ProcessSchedule):
        super().__init__(work, schedule)
        self._hook, self._axis, self._optimizer = hook, self._plan.axis, work.optimizer
        state, opt_state = work.state, hook.own(work.state.held_opt_state, self._axis)
        self._opt_state = opt_state = opt_state if work.donate else tree.map(torch.clone, opt_state)
        self._opt_states = work.optimizer.leaf_states(opt_state, state.held_params)
        paths = tree.leaf_paths(state.held_params) if self._plan.keeps else []
        known = [state.sync_state.leaves[path] for path in paths] or [{} for _ in work.leaves]
        old = Old([x.detach() for x in work.leaves], known, self._axis.size)
        self._old = replace(old, may_overwrite=work.donate and may_be_written_to(hook.written(old), opt_state))
        self._params = list(old.params)
        if hook.shares_gradients:
            self._factor, skip = scale_of(work, schedule)
            self._optimizer = work.optimizer if skip is None else unless(work.optimizer, skip, self._params)
        else:
            self.mean, self._divisor = work.mean_at_once(self._axis, local=True)

    def program(self, bucket: Bucket, grads: Sequence[torch.Tensor], states: Sequence[LeafState]) -> Program:
        """The program of a bucket. The optimizer runs inside it on shared gradients, or before it on the rank's own."""
        if self._hook.shares_gradients:
            return self._schedule.program(bucket, grads, states, partial(self._update_shared, bucket))
        self._schedule.plan.refuse_sparse(bucket, grads)
        with comm.span("update"):
            # Kernels need contiguous gradients. Not in place: two parameters may have the same gradient tensor.
            given = self._updated(bucket, self._work.divided([g.contiguous() for g in grads], self._divisor))
        return self._schedule.program(bucket, given, self._hook.begun(self._old.of(bucket)))

    def _update_shared(self, bucket: Bucket, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's new parameters, from shared gradients, which may be overwritten."""
        with comm.span("update"):
            self._scale(grads)
            return self._updated(bucket, list(grads))

    def _updated(self, bucket: Bucket, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        given = [self._hook.part(x, self._axis).clone() for x in self._old.of(bucket).params]
        self._begin_update(bucket, grads)
        apply_leaves(self._optimizer, grads, [self._opt_states[m] for m in bucket.members], given, self._opt_state)
        return given

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        if finish := take_updated(self._hook, bucket, reduced, self._old, self._params, self._states):
            finish()

    def result(self) -> BackwardResult:
        params = tree.unflatten(tree.flatten(self._work.state.held_params)[1], self._params)
        opt_state = self._hook.held(advanced(self._opt_state), self._axis)
        return BackwardResult(None, self._states_after(), params, opt_state)
