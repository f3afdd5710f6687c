"""What a training step asks before it runs, once for the steps after it too: the state that it makes has the answers.
They hold for the next step if

* this very object is given to the same train step, on the same axis of a world that is whole, and
* nobody has read its tensors, so nobody can have replaced one, frozen it, or put a hook on it, and
* the strategy has the same hook, communicates gradients alone, and keeps nothing from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch

from ltx.core.base import tree
from ltx.core.gradients.comm_hook import CommHook, shared_part
from ltx.core.optim.base import Prepared
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import ALONE, Ranks
from ltx.core.training.guard import must_sync_finite
from ltx.core.training.settings import check_layout
from ltx.core.training.train_state import TrainState
from ltx.core.transforms.run import KIND, Known
from ltx.core.transforms.strategy import PostUpdateHook, StepInfo, in_dtype, stateful
from ltx.typing import Tree


@dataclass(frozen=True, eq=False)
class Resolved:
    train: Any
    axis: Axis
    params: Tree  # those that are trained; then their leaves and structure
    leaves: list[torch.Tensor]
    spec: Any
    hook: CommHook | None  # reduces gradients; None if they stay local
    ranks: Ranks  # those that leave the step together if one of them fails
    late: bool  # ranks communicate after the optimizer
    post_update_hook: PostUpdateHook | None  # communicates each bucket after the optimizer, if that is possible
    ahead: bool  # the host runs ahead of a device, so it shouldn't read values
    lasts: bool  # the strategy answers the same at the next step, and has nothing to begin in it
    known: Known = field(default_factory=Known)  # what the call of the user's step has found out, once there was one
    prepared: Prepared | None = None  # the optimizer's faster update in place of these parameters, if it has one
    straight: bool = False  # a :class:`ltx.core.training.straight.StraightStep` can run the next step

    def holds(self, axis: Axis, step: int) -> bool:
        """Whether these are the answers at training step `step` on `axis` too. Raises if nothing may be sent there."""
        # Asked at each step: a strategy may change its hook without saying so by `constant_after`.
        same = (self.axis is axis or self.axis == axis) and self.train.step.hook(step, training=True) == self.hook
        return same and axis.ranks.goes_on()

    def after(self, state: TrainState, known: Known) -> Resolved | None:
        """The answers for the `state` that this step has made, in which the user's step has made these `known`."""
        if not self.lasts or state.held_sync_state.leaves:
            return None
        train, plan, params, prepared = self.train, known.plan, state.held_params, self.prepared
        if prepared is not None and params is self.params and known == self.known:
            return self
        if plan is not None and not plan.lasts(len(self.leaves)):
            return None
        leaves, spec, straight = self.leaves, self.spec, self._is_straight(state, known)
        if prepared is None or params is not self.params or plan is not self.known.plan or straight != self.straight:
            leaves, spec = tree.flatten(params)
            if not train.donate and any(map(is_, leaves, self.leaves)):  # somebody may hold those of the old state
                return None
            if spec != self.spec or [*map(KIND, leaves)] != [*map(KIND, self.leaves)]:
                return None
            by_bucket = plan if train.overlap == "update" and not straight else None
            groups = [bucket.members for bucket in by_bucket.buckets] if by_bucket else []
            prepared = Prepared.of(train.optimizer, params, state.held_opt_state, groups) if train.donate else None
        straight = straight and prepared is not None
        return replace(self, params=params, leaves=leaves, spec=spec, prepared=prepared, known=known, straight=straight)

    def _is_straight(self, state: TrainState, known: Known) -> bool:
        """Whether one sum reduces all that a step sends, and nothing else is asked of it."""
        train, plan, besides = self.train, known.plan, (state.frozen, state.held_buffers, self.train.step.precision)
        alone = not (any(x is not None for x in besides) or train.has_aux or train.checks_finite)
        of_pass = plan is not None and plan.one_sum and known.nodes is not None and not self.ahead
        return alone and of_pass  # by overlap="update" too: there is one bucket


def resolve(train: Any, params: Tree, leaves: list[torch.Tensor], spec: Any, info: StepInfo) -> Resolved:
    """Ask everything for a step on parameters of these `leaves` and `spec`."""
    strategy, axis, step = train.step.strategy, info.axis, info.step
    strategy.check(train.optimizer, axis)
    check_layout(strategy, step)
    late = axis.size > 1 and strategy.communicates_after_update(step)
    by_bucket = late and axis.comm is not None and train.overlap == "update"
    post_update_hook = in_dtype(strategy.post_update_hook(step), train.step.reduce_dtype) if by_bucket else None
    hook = train.step.hook(step, training=True)
    everyone = late or must_sync_finite(train, info)
    among = axis if everyone or hook is None else shared_part(hook, axis) or axis
    ranks = ALONE if axis.size == 1 or (hook is None and not everyone) else among.ranks
    lasts = not (late or strategy.communicates_besides or stateful(strategy))
    device, on_host = axis.ranks.device, not leaves or leaves[0].device.type == "cpu"
    ahead = not on_host or (device is not None and axis.ranks.stream_of(device) is not None)
    return Resolved(train, axis, params, leaves, spec, hook, ranks, late, post_update_hook, ahead, lasts)
