"""What is done with the buckets of a training step when they complete.

Their gradients are collected (``overlap="backward"``), or the optimizer runs on each: when it is complete, or inside of
its program where ranks communicate after the optimizer. A completion counts in `updated` how many buckets the optimizer
has updated in the state's own memory; ``complete(bucket, reduced)`` is called when the program of `bucket` has returned
`reduced`, and ``result()`` once all have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ltx.core import comm
from ltx.core.base import tree
from ltx.core.base.errors import WeightError
from ltx.core.gradients.packing import refuse_sparse, unpack
from ltx.core.gradients.reduction import Bucket, LeafState, Program, Reduced
from ltx.core.gradients.schedule import ProcessSchedule
from ltx.core.optim import Optimizer
from ltx.core.training.backward import Backward, BackwardResult, is_one, mean_at_once
from ltx.core.transforms.strategy_update import Old, PostUpdateHook, take_updated, with_overwriting
from ltx.core.transforms.sync_state import states_after

_NEVER = torch.tensor(False)


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
        if not is_one(self.factor):
            torch._foreach_mul_(list(grads), self.factor)

    def conditional(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Optimizer:
        """`optimizer`, which does nothing where nothing may be updated."""
        found = None if self.skip is None else optimizer.unless(self.skip, params)
        return optimizer if found is None else found


def scale_of(work: Backward, schedule: ProcessSchedule, weighted: bool) -> Scale:
    """The factor of reduced gradients. With weights this waits for the step summary, if that comes to the host."""
    if not weighted:
        return Scale(1.0 / work.loss_scale)
    assert schedule.summary is not None
    if not schedule.summary.stays_on_device or work.optimizer.unless(_NEVER, work.leaves) is None:
        return Scale(_weighted_scale(schedule) / work.loss_scale)
    weight = schedule.summary.enqueued().weight
    empty = weight == 0  # the host raises when it reads the summary; until then nothing may change
    return Scale((schedule.among.size / weight).masked_fill(empty, 0.0) / work.loss_scale, empty)


def _weighted_scale(schedule: ProcessSchedule) -> float:
    assert schedule.summary is not None
    weight = float(schedule.summary.wait().weight)
    alone = schedule.among is not schedule.comm
    if weight == 0 and alone:  # no data on this rank and those that it shares gradients with; other ranks continue
        return 1.0
    if weight == 0:
        schedule.pending.flush()  # every rank raises: keep the channels in step
        schedule.finish()
        raise WeightError(
            "Weighted: the weights of all ranks add up to 0, so there is no mean. The state is as before the step. "
            "Give at least one rank a sample, or skip the step on all of them."
        )
    return schedule.among.size / weight


class CollectGradients:
    """Collects the gradients, for an optimizer that runs on all of them. Nothing of the state is touched."""

    updated = 0

    def __init__(self, work: Backward, schedule: ProcessSchedule, scale: Scale):
        self._state, self._trained, self._probes = work.state, work.trained, work.probes
        self._schedule, self._scale = schedule, scale
        self._grads: dict[int, torch.Tensor] = {}
        self._states: dict[int, LeafState] = {}
        self._sums: list[torch.Tensor | float] = []

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        grads = unpack(reduced[0].view(-1), bucket)
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
        before, sums = self._state.sync_state.leaves, self._sums if self._probes is not None else None
        after = states_after(self._schedule.plan, self._states, before, self._state.trained, self._trained)
        grads = [self._grads[m] for m in range(len(self._trained))]
        return BackwardResult(grads, after, sums=sums, skip=self._scale.skip)


class UpdateBuckets:
    """Runs the optimizer on each bucket. With `donate` in the state's own memory, else in copies."""

    def __init__(self, work: Backward, schedule: ProcessSchedule, scale: Scale):
        self.updated = 0
        self._optimizer, self._state, self._trained = work.optimizer, work.state, work.trained
        self._schedule, self._scale, self._work = schedule, scale, work
        self._params, self._opt_state = work.state.trained, work.state.opt_state
        if not work.donate:
            self._params, self._opt_state = tree.map(torch.clone, (self._params, self._opt_state))
        self._leaves = tree.flatten(self._params)[0]
        self._leaf_states = work.optimizer.leaf_states(self._opt_state, self._params)
        self._applied = scale.conditional(work.optimizer, [self._leaves[i] for i in work.trained])
        self._states: dict[int, LeafState] = {}

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        """Update the bucket's parameters with its gradients, which are overwritten."""
        grads = unpack(reduced[0].view(-1), bucket)
        if self._work.unused:
            self._work.look(bucket.members, grads)
        self.updated += 1
        if self._work.donate:
            self._state.begin_writing()
        self._scale.apply(grads)
        at = [self._trained[m] for m in bucket.members]
        states, params = [self._leaf_states[i] for i in at], [self._leaves[i] for i in at]
        with comm.span("update"):
            self._applied.apply_leaves(grads, states, params, self._opt_state)
        self._states.update(self._schedule.plan.states_by_leaf(bucket, reduced[1]))

    def result(self) -> BackwardResult:
        before = self._state.held("sync_state").leaves
        after = states_after(self._schedule.plan, self._states, before, self._params, self._trained)
        return BackwardResult(None, after, self._params, self._optimizer.advance(self._opt_state))


class UpdateThenSend:
    """Updates and sends a bucket as soon as its gradients are there (:mod:`ltx.core.transforms.strategy_update`).

    The backward pass may still need the old parameters, so they keep their values until it is over; the optimizer's
    state doesn't.

    Args:
        hook: what ranks do with the new parameters.
        work: the step's second half.
        schedule: that of its backward pass.
        states: the communication state, by path.
        total, weight: the loss, or a Weighted's sums.

    Attributes:
        mean: the mean loss, if ranks don't share gradients and so have no step summary of it.
    """

    def __init__(
        self,
        hook: PostUpdateHook,
        work: Backward,
        schedule: ProcessSchedule,
        states: dict[str, LeafState],
        total: torch.Tensor,
        weight: torch.Tensor | None,
    ):
        # Not the total: its graph holds the schedule, which holds this while the pass goes on, and the garbage
        # collector doesn't see through a graph.
        self.updated = 0
        self._hook, self._work, self._schedule, self._plan = hook, work, schedule, schedule.plan
        self._before = states
        state, optimizer, self._axis = work.state, work.optimizer, self._plan.axis
        opt_state = hook.own(state.opt_state, self._axis)
        self._opt_state = opt_state = opt_state if work.donate else tree.map(torch.clone, opt_state)
        at = optimizer.leaf_states(opt_state, state.trained)
        self._opt_states = [at[place] for place in work.trained]
        paths = tree.leaf_paths(state.trained) if any(self._plan.state_names) else []
        known = [states[paths[place]] if paths else {} for place in work.trained]
        old = Old([x.detach() for x in work.leaves], known, self._axis.size)
        self._old = with_overwriting(hook, old, work.donate, opt_state)
        self._params, self._states = list(old.params), dict[int, LeafState]()
        self.mean: torch.Tensor | None = None
        self._optimizer = optimizer
        if hook.shares_gradients:
            self._scale = scale_of(work, schedule, weighted=weight is not None)
            self._optimizer = self._scale.conditional(optimizer, self._params)
        else:
            self.mean, self._divisor = mean_at_once(total, weight, self._axis, local=True)

    def program(self, bucket: Bucket, grads: Sequence[torch.Tensor], states: Sequence[LeafState]) -> Program:
        """The program of a bucket. The optimizer runs inside it, on shared gradients; or now, on this rank's own."""
        if self._hook.shares_gradients:
            return self._schedule.program(bucket, grads, states, partial(self._update_shared, bucket))
        refuse_sparse(grads)
        with comm.span("update"):
            # The kernels want them so; others may have the same tensor for a gradient.
            given = self._updated(bucket, self._work.divided([g.contiguous() for g in grads], self._divisor))
        return self._schedule.program(bucket, given, self._hook.begun(self._old.of(bucket)))

    def _update_shared(self, bucket: Bucket, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's new parameters, of shared gradients, which nothing else holds."""
        with comm.span("update"):
            self._scale.apply(grads)
            return self._updated(bucket, list(grads))

    def _updated(self, bucket: Bucket, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        given = [self._hook.part(x, self._axis).clone() for x in self._old.of(bucket).params]
        if self._work.unused:
            self._work.look(bucket.members, grads)
        self.updated += 1
        if self._work.donate:
            self._work.state.begin_writing()
        opt_states = [self._opt_states[member] for member in bucket.members]
        self._optimizer.apply_leaves(grads, opt_states, given, self._opt_state)
        return given

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        """Take the bucket's next parameters and states."""
        finish = take_updated(self._hook, bucket, reduced, self._old, self._params, self._states)
        if finish is not None:
            finish()

    def result(self) -> BackwardResult:
        whole, spec = tree.flatten(params := self._work.state.held("params"))
        for place, param in zip(self._work.trained, self._params, strict=True):
            whole[place] = param
        after = states_after(self._plan, self._states, self._before, params, self._work.trained)
        opt_state = self._hook.held(self._work.optimizer.advance(self._opt_state), self._axis)
        return BackwardResult(None, after, tree.unflatten(spec, whole), opt_state)


#: What is done with the buckets of a pass.
Completion = CollectGradients | UpdateBuckets | UpdateThenSend
