"""Steps whose ranks talk after the optimizer: what they say then, and what may be done to the state they began with.

    x_r = update_r(w_r, g_r)         of every parameter, on each rank
    w_r = finish(w_r, talk(x))       by a hook among ranks, bucket by bucket

Two things drive the same hook. A step that commits whole runs the optimizer on all parameters, then the hook on all
buckets (:func:`communicate_after_update`). With ``overlap="update"`` each bucket has its part of both as soon as its
gradients are there (:class:`ltx.training.update_then_send.UpdateThenSend`), so that messages travel during the backward
pass.

Until a bucket has landed, a peer that fails must find everybody's old parameters as they were, so the optimizer doesn't
run in place on them. What is left then, such as to add differences that have arrived, can't fail any more: it may be
done in the old state's memory where the step gives it away (:attr:`ltx.strategies.update.Update.may_overwrite`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from ltx import tree
from ltx.axis import Axis
from ltx.gradients.buckets import Bucket
from ltx.gradients.exchange import Exchange
from ltx.gradients.pending import Reduced
from ltx.gradients.reduction import LeafState, is_plain
from ltx.hooks import CommHook
from ltx.strategies.update import States, StepInfo, Update, Updated
from ltx.typing import Tree

#: :meth:`ltx.strategies.base.Strategy.exchange`.
Exchanging = Callable[..., Exchange]


@dataclass(frozen=True)
class Old:
    """What a step began with: parameters, and the communication state of each.

    Attributes:
        axis_size: the number of ranks.
        may_overwrite: whether the step gives :meth:`PostUpdateHook.written` away, to be written to when nothing can
            fail any more.
    """

    params: Sequence[torch.Tensor]
    states: Sequence[LeafState]
    axis_size: int
    may_overwrite: bool = False

    def of(self, bucket: Bucket) -> Old:
        """That of a bucket."""
        members = bucket.members
        return replace(self, params=[self.params[m] for m in members], states=[self.states[m] for m in members])


@dataclass(frozen=True)
class PostUpdateResult:
    """A bucket's next parameters and communication states, each by leaf.

    Attributes:
        finish: what is left to be done in the memory of the old ones, which may be the new ones'. It can't fail.
    """

    params: Sequence[torch.Tensor]
    states: Sequence[LeafState]
    finish: Callable[[], None] | None = None


@dataclass(frozen=True)
class PostUpdateHook(CommHook):
    """A hook on parameters that the optimizer has updated."""

    #: Whether the optimizer runs on gradients that a first collective of :meth:`reduce` gives, by ``share.update``;
    #: else on this rank's own, and what is reduced are its new parameters.
    shares_gradients: ClassVar[bool] = False

    def cast(self, dtype: torch.dtype) -> Self:
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

    def begun(self, old: Old) -> Sequence[LeafState]:
        """What :meth:`reduce` has for the state of each parameter."""
        return old.states

    def written(self, old: Old) -> Sequence[torch.Tensor]:
        """What :meth:`settled` writes to where it may: the parameters."""
        return old.params

    def finish_bucket(self, bucket: Bucket, reduced: Reduced, old: Old) -> PostUpdateResult:
        """What comes of a bucket, of which `old` is, and for which :meth:`reduce` has given `landed`."""
        raise NotImplementedError(f"{type(self).__name__} must define finish_bucket(bucket, reduced, old)")


def communicate_after_update(
    exchange: Exchanging,
    hook: PostUpdateHook,
    update: Update,
    given: Tree,
    opt_state: Tree,
    states: States,
    info: StepInfo,
) -> Updated:
    """The end of a step, whose optimizer has made `given` (new parameters, or whatever `hook` talks about)."""
    starts, spec = tree.flatten(update.params)
    paths = tree.leaf_paths(update.params)
    old = Old(starts, [states.get(path, {}) for path in paths], info.axis.size)
    talk = exchange(hook, tree.flatten(given)[0], paths, info, hook.begun(old), like=update.params)
    left: list[Callable[[], None]] = []
    params, found = collect_updates(
        hook, talk.wait_buckets(), with_overwriting(hook, old, update.may_overwrite, opt_state), left.append
    )
    after = {**states, **{paths[member]: state for member, state in found.items() if state}}

    def finish() -> None:
        for do in left:
            do()

    return Updated(tree.unflatten(spec, params), opt_state, after, finish=finish if left else None)


def with_overwriting(hook: PostUpdateHook, old: Old, may_overwrite: bool, opt_state: Tree) -> Old:
    """`old`, of a step that `may_overwrite` its old state away, if all that `hook` writes to may be written to."""
    return replace(old, may_overwrite=may_overwrite and may_be_written_to(hook.written(old), opt_state))


def collect_updates(
    hook: PostUpdateHook,
    reduced: Iterable[tuple[Bucket, Reduced]],
    old: Old,
    finish: Callable[[Callable[[], None]], object],
) -> tuple[list[torch.Tensor], dict[int, LeafState]]:
    """The next parameters, and communication states by leaf, of buckets that land one after the other.

    `finish` is told what is left to be done of each.
    """
    params, states = list(old.params), dict[int, LeafState]()
    for bucket, result in reduced:
        settled = hook.finish_bucket(bucket, result, old.of(bucket))
        for member, param, state in zip(bucket.members, settled.params, settled.states, strict=True):
            params[member], states[member] = param, state
        if settled.finish is not None:
            finish(settled.finish)
    return params, states


def may_be_written_to(tensors: Iterable[torch.Tensor], others: Any) -> bool:
    """Whether `tensors` are eager ones on the CPU, contiguous, and share no memory's start with each other or `others`.

    An optimizer of one's own may well keep the parameters that it was given in its state.
    """
    mine = [x for x in tensors if x.numel()]
    if not all(is_plain(x) and x.is_contiguous() for x in mine):
        return False
    places = {x.data_ptr() for x in mine}
    return len(places) == len(mine) and not any(x.data_ptr() in places for x in tree.flatten(others)[0] if x.numel())
