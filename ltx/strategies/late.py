"""Steps whose ranks talk after the optimizer: what they say then, and what may be done to the state they began with.

    x_r = update_r(w_r, g_r)         of every parameter, on each rank
    w_r = settled(w_r, talk(x))      by a hook among ranks, bucket by bucket

Two things drive the same hook. A step that commits whole runs the optimizer on all parameters, then the hook on all
buckets (:func:`talked_late`). With ``overlap="update"`` each bucket has its part of both as soon as its gradients are
there (:class:`ltx.transforms.late_landing.Late`), so that messages travel during the backward pass.

Until a bucket has landed, a peer that fails must find everybody's old parameters as they were, so the optimizer doesn't
run in place on them. What is left then, such as to add differences that have arrived, can't fail any more: it may be
done in the old state's memory where the step gives it away (:attr:`ltx.strategies.update.Update.gives`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ltx import tree
from ltx.axis import Axis
from ltx.hooks import CommHook
from ltx.strategies.update import Moment, States, Update, Updated
from ltx.sync.buckets import Bucket
from ltx.sync.flights import Landed
from ltx.sync.reduction import LeafState, is_plain
from ltx.typing import Tree

if TYPE_CHECKING:
    from ltx.strategies.base import Strategy


@dataclass(frozen=True)
class Settled:
    """A bucket's next parameters and communication states, each by leaf.

    Attributes:
        finish: what is left to be done in the memory of the old ones, which may be the new ones'. It can't fail.
    """

    params: list[torch.Tensor]
    states: list[LeafState]
    finish: Callable[[], None] | None = None


@dataclass(frozen=True)
class LateHook(CommHook):
    """A hook on parameters that the optimizer has updated."""

    #: Whether the optimizer runs on gradients that a first collective of :meth:`reduce` gives, by ``share.update``;
    #: else on this rank's own, and what is reduced are its new parameters.
    shares_gradients: ClassVar[bool] = False

    def cast(self, dtype: torch.dtype) -> LateHook:
        """Itself: ``Precision.reduce`` is for gradients."""
        return self

    def part(self, param: torch.Tensor, axis: Axis) -> torch.Tensor:
        """What of a parameter this rank's optimizer updates."""
        return param

    def own(self, opt_state: Tree, axis: Axis) -> Tree:
        """This rank's optimizer state, as the optimizer knows it, of a train state's."""
        return opt_state

    def held(self, opt_state: Tree, axis: Axis) -> Tree:
        """Inverse of :meth:`own`."""
        return opt_state

    def begun(self, starts: Sequence[torch.Tensor], states: Sequence[LeafState]) -> Sequence[LeafState]:
        """What :meth:`reduce` has for the state of each parameter: `starts` are those before the optimizer, and
        `states` their communication states.
        """
        return states

    def written(
        self, starts: Sequence[torch.Tensor], states: Sequence[LeafState], axis_size: int
    ) -> list[torch.Tensor]:
        """What of an old state :meth:`settled` writes to where it may."""
        raise NotImplementedError(f"{type(self).__name__} must define written(starts, states, axis_size)")

    def settled(
        self,
        bucket: Bucket,
        landed: Landed,
        starts: Sequence[torch.Tensor],
        states: Sequence[LeafState],
        axis_size: int,
        gives: bool,
    ) -> Settled:
        """What comes of a bucket for which :meth:`reduce` has given `landed`; in the old state's memory if it `gives`
        that away.
        """
        raise NotImplementedError(f"{type(self).__name__} must define settled(bucket, landed, ...)")


def talked_late(
    strategy: Strategy, hook: LateHook, update: Update, given: Tree, opt_state: Tree, states: States, at: Moment
) -> Updated:
    """The end of a step, whose optimizer has made `given` (new parameters, or whatever `hook` talks about)."""
    starts, spec = tree.flatten(update.params)
    paths = tree.leaf_paths(update.params)
    known = [states.get(path, {}) for path in paths]
    tensors = tree.flatten(given)[0]
    exchange = strategy.exchange(hook, tensors, paths, at, hook.begun(starts, known), like=update.params)
    gives = update.gives and may_be_written_to(hook.written(starts, known, at.axis.size), opt_state)
    params, after, left = list(starts), dict(states), list[Callable[[], None]]()
    for bucket, landed in exchange.land_buckets():
        old, theirs = [starts[m] for m in bucket.members], [known[m] for m in bucket.members]
        settled = hook.settled(bucket, landed, old, theirs, at.axis.size, gives)
        for member, param, state in zip(bucket.members, settled.params, settled.states, strict=True):
            params[member] = param
            if state:
                after[paths[member]] = state
        if settled.finish is not None:
            left.append(settled.finish)

    def finish() -> None:
        for do in left:
            do()

    return Updated(tree.unflatten(spec, params), opt_state, after, finish=finish if left else None)


def may_be_written_to(tensors: Iterable[torch.Tensor], others: Any) -> bool:
    """Whether `tensors` are eager ones on the CPU, contiguous, and share no memory's start with each other or `others`.

    An optimizer of one's own may well keep the parameters that it was given in its state.
    """
    mine = [x for x in tensors if x.numel()]
    if not all(is_plain(x) and x.is_contiguous() for x in mine):
        return False
    places = {x.data_ptr() for x in mine}
    return len(places) == len(mine) and not any(x.data_ptr() in places for x in tree.flatten(others)[0] if x.numel())
