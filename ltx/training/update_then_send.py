"""The second half of a step that updates and sends bucket by bucket: its ranks communicate after the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ltx import comm, tree
from ltx.gradients.buckets import Bucket
from ltx.gradients.process_schedule import Packed, PassOptions, ProcessSchedule
from ltx.gradients.reduction import LeafState, refuse_sparse
from ltx.strategies.post_update import Old, PostUpdateHook, collect_updates, with_overwriting
from ltx.training.backward_update import BackwardResult, BackwardUpdate, mean_at_once, scaled
from ltx.transforms.sync_state import states_after


class UpdateThenSend:
    """The second half of a step with ``overlap="update"`` whose ranks communicate after the optimizer.

    A bucket is updated and sent as soon as its gradients are there (:mod:`ltx.strategies.post_update`). The backward
    pass may still need the old parameters, so they keep their values until it is over; the optimizer's state doesn't.

    Args:
        hook: what ranks do with the new parameters.
        work: the step's.
        schedule: that of its backward pass.
        states: the communication state, by path.
        total, weight: the loss, or a Weighted's sums.
    """

    def __init__(
        self,
        hook: PostUpdateHook,
        work: BackwardUpdate,
        schedule: ProcessSchedule,
        states: dict[str, LeafState],
        total: torch.Tensor,
        weight: torch.Tensor | None,
    ):
        # Not the total: its graph holds the schedule, which holds this while the pass goes on, and the garbage
        # collector doesn't see through a graph.
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
        self._updated = 0
        if hook.shares_gradients:
            self._mean: torch.Tensor | None = None
            self._scale = work.scale(schedule, weighted=weight is not None)
            schedule.configure(replace(schedule.options, update=self._update_parts))
        else:
            self._mean, self._divisor = mean_at_once(total, weight, self._axis, local=True)
            schedule.configure(replace(schedule.options, replace=self._update))

    def run(self, total: torch.Tensor) -> tuple[BackwardResult, torch.Tensor]:
        """Run the backward pass of `total`: its result, and the mean loss (all ranks', if they share gradients)."""
        try:
            self._work.backward(total)
            with torch.no_grad():
                done, summary = self._collect()
                return done, summary.mean.to(total.dtype) if self._mean is None else self._mean
        except BaseException as error:
            self._schedule.abandon(error)
            self._work.invalidated_by(error, self._updated, self._plan)
            raise
        finally:
            self._schedule.configure(PassOptions())  # the options hold this object

    def _update(self, bucket: Bucket, grads: Sequence[torch.Tensor]) -> Packed:
        """The new parameters of a bucket, in new memory, and the states they are packed with."""
        refuse_sparse(grads)
        with comm.span("update"):
            # The kernels want them so; others may have the same tensor for a gradient.
            laid = self._work.divided([g.contiguous() for g in grads], self._divisor)
            given = self._applied(bucket, laid)
        return given, self._hook.begun(self._old.of(bucket))

    def _update_parts(self, bucket: Bucket, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same for parts of the parameters, with gradients that nothing else holds."""
        with comm.span("update"):
            scaled(grads, self._scale)
            return self._applied(bucket, list(grads))

    def _applied(self, bucket: Bucket, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        given = [self._hook.part(x, self._axis).clone() for x in self._old.of(bucket).params]
        self._updated += 1
        opt_states = [self._opt_states[member] for member in bucket.members]
        self._work.optimizer.apply_leaves(grads, opt_states, given, self._work.state.step)
        return given

    def _collect(self) -> tuple[BackwardResult, comm.StepSummary]:
        reduced = self._schedule.wait_buckets()
        params, states = collect_updates(self._hook, reduced, self._old, lambda finish: finish())
        summary = self._schedule.finish()
        assert summary is not None
        whole, spec = tree.flatten(self._work.state.trained)
        for place, param in zip(self._work.trained, params, strict=True):
            whole[place] = param
        after = states_after(self._plan, states, self._before, self._work.state.trained, self._work.trained)
        opt_state = self._hook.held(self._work.optimizer.advance(self._opt_state), self._axis)
        return BackwardResult(None, tree.flatten(after)[0], tree.unflatten(spec, whole), opt_state), summary
