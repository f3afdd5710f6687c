"""The second half of a step that updates and sends bucket by bucket, where ranks talk after the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ltx import tree, wire
from ltx.strategies.late import LateHook, may_be_written_to
from ltx.sync.buckets import Bucket
from ltx.sync.reduction import LeafState, refuse_sparse
from ltx.sync.wire_schedule import Instead, WireSchedule
from ltx.transforms.landing import Done, Work, mean_at_once, scaled, states_after

T = TypeVar("T")


class Late:
    """The second half of a step whose ranks talk after the optimizer, with ``overlap="update"``.

    A bucket is updated and sent as soon as its gradients are there (:mod:`ltx.strategies.late`). Until the backward
    pass is over parameters stay as they are, which may be needed in it; the optimizer's state doesn't.

    Args:
        hook: what ranks say of the new parameters.
        work: the step's.
        schedule: that of its backward pass.
        states: the communication state, by path.
        total, weight: the loss, or a Weighted's sums.
    """

    def __init__(
        self,
        hook: LateHook,
        work: Work,
        schedule: WireSchedule,
        states: dict[str, LeafState],
        total: torch.Tensor,
        weight: torch.Tensor | None,
    ):
        self._hook, self._work, self._schedule, self._plan = hook, work, schedule, schedule.plan
        self._before, self._total = states, total
        state, optimizer, self._axis = work.state, work.optimizer, self._plan.axis
        opt_state = hook.own(state.opt_state, self._axis)
        opt_state = opt_state if work.donate else tree.map(torch.clone, opt_state)
        self._opt_state, self._count = opt_state, state.step
        at = optimizer.leaf_states(opt_state, state.params)
        self._opt_states = [at[place] for place in work.trained]
        self._starts = [x.detach() for x in work.leaves]
        paths = tree.leaf_paths(state.params) if any(self._plan.state_names) else []
        self._states = [states[paths[place]] if paths else {} for place in work.trained]
        written = hook.written(self._starts, self._states, self._plan.axis.size)
        self._gives = work.donate and may_be_written_to(written, opt_state)
        self._updated = 0
        if hook.shares_gradients:
            self._mean: torch.Tensor | None = None
            self._scale = work.scale(schedule, weighted=weight is not None)
            schedule.update = self._update_parts
        else:
            self._mean, self._divisor = mean_at_once(total, weight, self._axis, local=True)
            schedule.instead = self._update

    def run(self) -> tuple[Done, torch.Tensor]:
        """The backward pass, and what comes of it; and the mean loss, of all ranks if they share gradients."""
        try:
            self._work.backward(self._total)
            with torch.no_grad():
                done, header = self._land()
                return done, header.mean.to(self._total.dtype) if self._mean is None else self._mean
        except BaseException as error:
            self._schedule.abandon(error)
            self._work.torn_by(error, self._updated, self._plan)
            raise

    def _update(self, bucket: Bucket, grads: Sequence[torch.Tensor]) -> Instead:
        """The new parameters of a bucket, in memory of their own, and what they are packed with."""
        refuse_sparse(grads)
        with wire.span("update"):
            # The kernels want them so; others may have the same tensor for a gradient.
            laid = self._work.divided([g.contiguous() for g in grads], self._divisor)
            given = self._applied(bucket, laid)
        return given, self._hook.begun(self._of(bucket, self._starts), self._of(bucket, self._states))

    def _update_parts(self, bucket: Bucket, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same of parts of the parameters, with gradients that nobody else looks at."""
        with wire.span("update"):
            scaled(grads, self._scale)
            return self._applied(bucket, list(grads))

    def _applied(self, bucket: Bucket, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        given = [self._hook.part(x, self._axis).clone() for x in self._of(bucket, self._starts)]
        self._updated += 1
        self._work.optimizer.apply_leaves(grads, self._of(bucket, self._opt_states), given, self._count)
        return given

    def _land(self) -> tuple[Done, wire.Header]:
        params, states = list(self._starts), dict[int, LeafState]()
        for bucket, landed in self._schedule.land_buckets():
            starts, known = self._of(bucket, self._starts), self._of(bucket, self._states)
            settled = self._hook.settled(bucket, landed, starts, known, self._plan.axis.size, self._gives)
            if settled.finish is not None:
                settled.finish()
            for member, param, state in zip(bucket.members, settled.params, settled.states, strict=True):
                params[member], states[member] = param, state
        header = self._schedule.finish()
        assert header is not None
        whole, spec = tree.flatten(self._work.state.params)
        for place, param in zip(self._work.trained, params, strict=True):
            whole[place] = param
        after = states_after(self._plan, states, self._before, self._work.state.params, self._work.trained)
        opt_state = self._hook.held(self._work.optimizer.advance(self._opt_state), self._axis)
        return Done(None, tree.flatten(after)[0], tree.unflatten(spec, whole), opt_state), header

    @staticmethod
    def _of(bucket: Bucket, values: Sequence[T]) -> list[T]:
        return [values[member] for member in bucket.members]
