"""A strategy's part of a step: its arguments and results, the layout of the state, and hooks after the optimizer:

    x_r = update_r(w_r, g_r)         for every parameter, on each rank
    w_r = finish(w_r, reduce(x))     by a hook between ranks, bucket by bucket

Two drivers run the same hook. A step that commits whole runs the optimizer on all parameters, then the hook on all
buckets (:func:`communicate_after_update`). With ``overlap="update"`` each bucket runs its part of both as soon as its
gradients are ready (:class:`ltx.core.training.backward.UpdateThenSend`), so messages are sent in the backward pass.

Until a bucket is complete, a peer may still fail, and then every rank must have its old parameters. So the optimizer
doesn't run in place on them. Later work, such as adding the differences that have arrived, can't fail: it may write
into the old state's memory, if the step allows it (:attr:`ltx.core.optim.base.Update.may_overwrite`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from ltx.core.base import traced, tree
from ltx.core.base.arguments import brief, outcome
from ltx.core.base.errors import StrategyError
from ltx.core.gradients.buffers import is_plain, prefers_few_calls
from ltx.core.gradients.comm_hook import CommHook
from ltx.core.gradients.reduction import Bucket, LeafState, Reduced
from ltx.core.optim.base import Update
from ltx.core.ranks.axis import Axis
from ltx.typing import Tree

#: Communication state by parameter path.
States = dict[str, LeafState]


@dataclass(frozen=True)
class StepInfo:
    """When and where a strategy acts: the step and the axis.

    Attributes:
        step: the number of steps before this one, a Python int that is the same on every rank.
        axis: the ranks.
    """

    step: int
    axis: Axis


@dataclass(frozen=True)
class Updated:
    """The result of :meth:`Strategy.update`: everything that a step changes, and the communication that stays pending.

    Attributes:
        finish: writes to the tensors of the old state that the new state takes over (see
            :attr:`ltx.core.optim.base.Update.may_overwrite`), when everything is complete. It can't fail, and nothing
            comes between it and the step's end, not even an interrupt.
    """

    params: Tree
    opt_state: Tree
    states: States
    pending: Any = None
    finish: Callable[[], None] | None = None


#: How a leaf's values relate across ranks.
LeafLayout = Literal["replicated", "per_rank", "sharded"]


@dataclass(frozen=True)
class StateLayout:
    """For each part of a train state: is it the same on every rank, different on each, or a shard of one value?

    Checkpoints, replica checks and changes of the number of ranks read this.

    Attributes:
        strategy: the strategy that has this layout, for errors; "" if unknown. Comparisons leave it out.
        copies_of: the name of a state that is copied from peers: a parameter's other states are copies of it; "" if
            there is none.
        optimizer: the classes of the optimizer that the state was made for, and its text. left_out: the paths that
            ``trainable=`` left out. adopted: what ``train.adopt`` kept of another step's state; "" if the state comes
            from init. held_by: the ranks of the world that hold the same parts of DTensors; () if nothing is split.
            Comparisons leave them out too.
    """

    params: LeafLayout = "replicated"
    buffers: LeafLayout = "per_rank"
    opt_state: LeafLayout = "replicated"
    sync_state: LeafLayout = "per_rank"
    strategy: str = field(default="", compare=False)
    copies_of: str = ""
    optimizer: tuple[str, str] = field(default=("", ""), compare=False, repr=False)
    left_out: tuple[str, ...] = field(default=(), compare=False, repr=False)
    adopted: str = field(default="", compare=False, repr=False)
    held_by: tuple[int, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Old:
    """The parameters and communication states that a step began with.

    Attributes:
        axis_size: the number of ranks.
        may_overwrite: whether the tensors of :meth:`PostUpdateHook.written` may be overwritten when nothing can fail.
    """

    params: Sequence[torch.Tensor]
    states: Sequence[LeafState]
    axis_size: int
    may_overwrite: bool = False

    def of(self, bucket: Bucket) -> Old:
        members = bucket.members
        return replace(self, params=[self.params[m] for m in members], states=[self.states[m] for m in members])


@dataclass(frozen=True)
class PostUpdateResult:
    """The next parameters and communication states of a bucket, one for each leaf.

    Attributes:
        finish: a function that completes them in place, in the old or the new tensors' memory. It can't fail.
    """

    params: Sequence[torch.Tensor]
    states: Sequence[LeafState]
    finish: Callable[[], None] | None = None


@dataclass(frozen=True)
class PostUpdateHook(CommHook):
    """A hook on parameters that the optimizer has updated."""

    #: Whether :meth:`reduce` first reduces the gradients and then runs the optimizer by ``inputs.update``. If not, the
    #: optimizer runs on this rank's own gradients, and its new parameters are reduced.
    shares_gradients: ClassVar[bool] = False

    def part(self, param: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The part of a parameter that this rank's optimizer updates."""
        return param

    def own(self, opt_state: Tree, axis: Axis) -> Tree:
        """This rank's optimizer state in the optimizer's form, from that of a train state."""
        return opt_state

    def held(self, opt_state: Tree, axis: Axis) -> Tree:
        """Inverse of :meth:`own`."""
        return opt_state

    def begun(self, old: Old) -> Sequence[LeafState]:
        """The state of each parameter that :meth:`reduce` gets."""
        return old.states

    def written(self, old: Old) -> Sequence[torch.Tensor]:
        """The tensors that :meth:`finish_bucket` writes to if it may overwrite: the parameters."""
        return old.params

    def finish_bucket(self, bucket: Bucket, reduced: Reduced, old: Old) -> PostUpdateResult:
        """The result for a bucket, from its part of `old` and what :meth:`reduce` returned."""
        raise NotImplementedError(f"{type(self).__name__} must define finish_bucket(bucket, reduced, old)")


def take_updated(
    hook: PostUpdateHook,
    bucket: Bucket,
    reduced: Reduced,
    old: Old,
    params: list[torch.Tensor],
    states: dict[int, LeafState],
) -> Callable[[], None] | None:
    """Put a complete bucket's next values into `params` and `states`. Returns what does the remaining work, or None."""
    done = hook.finish_bucket(bucket, reduced, old.of(bucket))
    for member, param, state in zip(bucket.members, done.params, done.states, strict=True):
        params[member], states[member] = param, state
    return done.finish


def may_be_written_to(tensors: Iterable[torch.Tensor], others: Any) -> bool:
    """Whether `tensors` are eager and contiguous, and none shares its address with another, or with one of `others`.

    A user's optimizer may have the parameters in its state too. On an accelerator writes are enqueued after everything
    that reads the old values: on the step's own stream, and after a bucket's fence.
    """
    mine = [x for x in tensors if x.numel()]
    if not all((is_plain(x) or prefers_few_calls(x)) and x.is_contiguous() for x in mine):
        return False
    places = {x.data_ptr() for x in mine}
    return len(places) == len(mine) and not any(x.data_ptr() in places for x in tree.flatten(others)[0] if x.numel())


# --- what a strategy's methods return ---------------------------------------------------------------------------------


def check_updated(strategy: Any, got: Any, update: Update, states: States) -> Updated:
    """`got`, the result of ``strategy.update`` for `update` and `states`. Raises if it isn't as it should be."""
    if not isinstance(got, Updated):
        raise _other(strategy, "update", got, "an ltx.strategies.Updated(params, opt_state, states)")
    # A plain `update` has checked the result of after_update already.
    as_given = not traced.recording() and got.params is update.params and got.states is states
    if not (as_given or strategy.updates_in_buckets):
        check_next(strategy, "update", (got.params, got.states), update.params, states)
    return got


def check_next(strategy: Any, method: str, got: Any, params: Tree, states: States) -> tuple[Tree, States]:
    """`got`, the result of a strategy's `method` for `params` and `states`. Raises if it isn't as it should be."""
    if not (isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], dict)):
        raise _other(strategy, method, got, "(params, states), states a dict by path")
    found, after = got
    eager = not traced.recording()  # Dynamo can't ask for the identity of dicts in torch 2.11
    if not (eager and after is states):
        _check_states(strategy, method, after, params, states)
    if eager and found is params:
        return found, after
    before, now = tree.flatten(params)[0], tree.flatten(found)[0]
    if len(before) != len(now) or tree.leaf_paths(params) != tree.leaf_paths(found):
        raise StrategyError(
            f"{type(strategy).__name__}.{method} returned parameters with the leaves {brief(tree.leaf_paths(found))}, "
            f"and was given {brief(tree.leaf_paths(params))}. Return the tree that it was given, with other tensors."
        )
    for place, (x, y) in enumerate(zip(before, now, strict=True)):
        if not isinstance(y, torch.Tensor) or x.shape != y.shape or x.dtype != y.dtype:
            raise StrategyError(
                f"{type(strategy).__name__}.{method} returned {tree.describe(y)} for parameter "
                f"{tree.leaf_paths(params)[place]!r}, which is {tree.describe(x)}. Return its shape and dtype."
            )
    return found, after


def _check_states(strategy: Any, method: str, after: States, params: Tree, states: States) -> None:
    """Raise if states that ``init`` makes are missing. Other states may come and go."""
    lost = [path for path, state in states.items() if state and not state.keys() <= after.get(path, {}).keys()]
    if not lost:
        return
    leaves = dict(zip(tree.leaf_paths(params), tree.flatten(params)[0], strict=True))
    for path in lost:
        names = strategy.init(leaves[path], path).keys() - after.get(path, {}).keys() if path in leaves else ()
        if names:
            raise StrategyError(
                f"{type(strategy).__name__}.{method} returned no {' and no '.join(map(repr, sorted(names)))} in the "
                f"states of parameter {path!r}, which init made. Return all states, also those that haven't changed: "
                "{**states, path: {...}}."
            )


def _other(strategy: Any, method: str, got: Any, expected: str) -> StrategyError:
    pair = isinstance(got, tuple) and len(got) == 2
    what = f"({outcome(got[0])}, {outcome(got[1])})" if pair else outcome(got)
    return StrategyError(f"{type(strategy).__name__}.{method} must return {expected}, got {what}.")
