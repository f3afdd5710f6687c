"""Bucket programs with the optimizer inside: ``overlap="update"`` where ranks communicate after the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ltx import comm, tree
from ltx.gradients.buckets import Bucket
from ltx.gradients.packing import refuse_sparse
from ltx.gradients.process_schedule import ProcessSchedule
from ltx.gradients.reduction import LeafState, Program, Reduced
from ltx.strategies.update import Old, PostUpdateHook, with_overwriting
from ltx.training.backward import Backward, BackwardResult, mean_at_once
from ltx.transforms.sync_state import states_after


class UpdateThenSend:
    """Updates and sends a bucket as soon as its gradients are there (:mod:`ltx.strategies.update`).

    The backward pass may still need the old parameters, so they keep their values until it is over; the optimizer's
    state doesn't. A :class:`ltx.training.backward.Completion`.

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
        opt_state = opt_state if work.donate else tree.map(torch.clone, opt_state)
        self._opt_state = opt_state
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
            self._scale = work.scale(schedule, weighted=weight is not None)
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
            if not self._scale.is_one:
                self._scale.apply(grads)
            return self._updated(bucket, list(grads))

    def _updated(self, bucket: Bucket, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        given = [self._hook.part(x, self._axis).clone() for x in self._old.of(bucket).params]
        self.updated += 1
        opt_states = [self._opt_states[member] for member in bucket.members]
        self._optimizer.apply_leaves(grads, opt_states, given, self._work.state.step)
        return given

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        """Take the bucket's next parameters and states."""
        done = self._hook.finish_bucket(bucket, reduced, self._old.of(bucket))
        for member, param, state in zip(bucket.members, done.params, done.states, strict=True):
            self._params[member], self._states[member] = param, state
        if done.finish is not None:
            done.finish()

    def result(self) -> BackwardResult:
        """Parameters and optimizer state after the step."""
        whole, spec = tree.flatten(self._work.state.trained)
        for place, param in zip(self._work.trained, self._params, strict=True):
            whole[place] = param
        after = states_after(self._plan, self._states, self._before, self._work.state.trained, self._work.trained)
        opt_state = self._hook.held(self._work.optimizer.advance(self._opt_state), self._axis)
        return BackwardResult(None, after, tree.unflatten(spec, whole), opt_state)
