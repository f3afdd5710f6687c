"""The contract of strategies: when and how ranks communicate, what a step tells them, and what they return.

After the optimizer a strategy may communicate parameters, by a :class:`PostUpdateHook`:

    x_r = update_r(w_r, g_r)         for every parameter, on each rank
    w_r = finish(w_r, reduce(x))     by a hook between ranks, bucket by bucket

on all parameters, then on all buckets (:func:`communicate_after_update`); with ``overlap="update"`` on each bucket as
soon as its gradients are ready (:class:`ltx.core.training.backward.UpdateThenSend`). Until a bucket is complete a peer
may fail, and then every rank must have its old parameters, so the optimizer doesn't run in place on them. Later work
can't fail: it may write into the old state's memory (:attr:`ltx.core.optim.base.Update.may_overwrite`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch

from ltx.core.base import traced, tree
from ltx.core.base.arguments import Offering, brief, follows, outcome
from ltx.core.base.errors import StrategyError
from ltx.core.base.handed_in import HandedIn
from ltx.core.base.needs import require
from ltx.core.gradients.buffers import is_plain, prefers_few_calls
from ltx.core.gradients.comm_hook import EXACT, CommHook, shared_part, stateful_hook
from ltx.core.gradients.pending import Exchange
from ltx.core.gradients.planning import BucketSettings, Plan, arrival_order, make_plan
from ltx.core.gradients.reduction import Bucket, LeafState, Reduced
from ltx.core.optim.base import Optimizer, Tensors, Update
from ltx.core.ranks.axis import Axis
from ltx.typing import Tree

H = TypeVar("H", bound=CommHook | None)
#: Communication state by parameter path.
States = dict[str, LeafState]
#: How a leaf's values relate across ranks.
LeafLayout = Literal["replicated", "per_rank", "sharded"]


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


def _has_own(strategy: Strategy, *methods: str) -> bool:
    return any(getattr(type(strategy), method) is not getattr(Strategy, method) for method in methods)


#: What strategies were asked before, and what says it now.
GONE = {
    **dict.fromkeys(("check_axis", "check_optimizer"), "check(optimizer, axis)"),
    **dict.fromkeys(("constant_after", "stateful"), "cycle, from whose first step on hook(step) stays the same"),
    "exchange": "ltx.extend.exchange(strategy, hook, tensors, paths, info)",
    "hook_in_graph": "hook(step) and cycle",
    "hook_in_training": "hook(step); where a layout's opt_state is sharded, gradients outside of training are the mean",
    "needs_whole": 'post_update_hook(step), whose hook says reach = "parameter"',
    "shares_gradients": "the hook of hook(step), which says whether all ranks get the same, alike",
    "takes_complex": "an error that init_optimizer raises",
}


@dataclass(frozen=True)
class StrategyOffers:
    """The properties of a strategy that steps and plans read. Functions get the number of synchronised steps so far.

    Attributes:
        layout: for each part of a train state, whether it is the same on all ranks.
        cycle: (first, length): from step `first` on, what a step sends repeats every `length` steps; None if it doesn't
            repeat. From `first` on, compiled graphs can hold the hook, if it is the same at each step of the cycle.
            :func:`ltx.profile.compare` times that many steps at a time.
        communicates_after_update: whether ``update`` communicates after the optimizer. The optimizer then doesn't
            update in place, so that a step in which a peer fails doesn't change its state.
        communicates_besides: a training step communicates more than gradients.
        updates_in_buckets: the optimizer may run bucket by bucket (``overlap="update"``): ``update`` isn't overridden.
    """

    layout: StateLayout = StateLayout()
    cycle: tuple[int, int] | None = follows(
        lambda strategy: None if (last := getattr(strategy.hook(0), "constant_after", 0)) is None else (last, 1)
    )
    communicates_after_update: Callable[[int], bool] = follows(
        lambda strategy: lambda n: _has_own(strategy, "after_update")
    )
    communicates_besides: bool = follows(lambda strategy: _has_own(strategy, "begin", "update", "after_update"))
    updates_in_buckets: bool = follows(lambda strategy: not _has_own(strategy, "update"))


@dataclass(frozen=True, kw_only=True)
class Strategy(Offering[StrategyOffers], BucketSettings, kind=StrategyOffers, gone=GONE):
    """How ranks communicate in a training step.

    A strategy is immutable: it compares, hashes, pickles, prints, and is changed with ``dataclasses.replace``. Its
    schedules depend on the number of steps so far, a Python int. A strategy's state is part of the communication state
    that the step gets and returns.

    Most strategies define :meth:`hook`, which reduces the gradients during the backward pass, and :meth:`after_update`,
    which changes the parameters after the optimizer. Methods from :meth:`begin` on only concern train steps
    (:func:`ltx.train_step`). They communicate through :func:`ltx.extend.exchange`: when a rank fails, messages left
    over from one exchange don't mix with the next.

    Attributes:
        offers: an :class:`ltx.extend.StrategyOffers`. A class overrides a default by an attribute, property or method
            of the field's name; a strategy has an attribute for each field.
        bucket_bytes: gradients travel in buckets of at most this many bytes, 25 MiB for the default on accelerators
            whose collectives streams order; a hook that sends far less may ask for larger ones
            (``Packing.bucket_factor``).
        first_bucket_bytes: size of the first bucket; small, so that communication starts early.
        process_group_backend: backend for ``ltx.init``; None chooses NCCL on CUDA and gloo on CPU.
        timeout: how long ``ltx.init``'s collectives wait for a peer: a timedelta, or a number of seconds.
    """

    def hook(self, step: int) -> CommHook | None:
        """The hook that reduces the gradients of synchronised step `step`; None leaves gradients local.

        If the layout's optimizer state is "sharded", it is for train steps, where only :meth:`update` sees gradients:
        others get the exact mean.
        """
        raise NotImplementedError(f"{type(self).__name__} must define hook(step)")

    def init(self, param: Any, path: str = "") -> LeafState:
        """The state of the parameter at `path`: that of the hook, and the strategy's own under other names."""
        hook = self.hook(0)
        return hook.init(param, path) if hook is not None and hook.state_names else {}

    def check(self, optimizer: Optimizer, axis: Axis | None = None) -> None:
        """Raise :class:`ltx.errors.StrategyError` if it can't train with `optimizer`, or on this number of ranks.

        `axis`: None when a train step is made, which may be before there is a world.
        """
        names = [cls.__name__ for cls in type(self).__mro__]
        require("own strategy, optimizer", optimizer, names[0], *names)

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: Axis) -> Tree:
        """The optimizer's state before the first step."""
        return optimizer.init(params)

    def rates(self, optimizer: Optimizer, opt_state: Tree, axis: Axis) -> Any:
        """What computes the learning rates that an update of `opt_state` has, for ``metrics.lr``."""
        return optimizer._rates(opt_state)

    def gather_optimizer(self, optimizer: Optimizer, params: Tree, opt_state: Tree, info: StepInfo) -> Tree:
        """The whole optimizer state, from a sharded one: as :meth:`init_optimizer` makes it on an axis of one rank."""
        return opt_state

    def begin(self, params: Tree, states: States, info: StepInfo, pending: Any) -> Any:
        """Start communication that goes on during the forward and the backward pass.

        `pending` is what the last step left (None at first); :meth:`update` gets the result. If the step then fails,
        peers are told of the new communication; the state keeps what the last step left.
        """
        return pending

    def update(self, update: Update, states: States, info: StepInfo, pending: Any) -> Updated:
        """The optimizer's part of a step: ``update.apply()``, and the strategy's own work around it."""
        params, opt_state = update.apply()
        params, states = check_next(self, "after_update", self.after_update(params, states, info), params, states)
        return Updated(params, opt_state, states, pending)

    def after_update(self, params: Tree, states: States, info: StepInfo) -> tuple[Tree, States]:
        """The final parameters, made of the updated ones, and the next state. Don't write to either input."""
        return params, states

    def finish(self, params: Tree, states: States, info: StepInfo, pending: Any) -> tuple[Tree, States]:
        """Wait for the communication that is `pending` between two steps. All ranks do it together."""
        return params, states

    def post_update_hook(self, step: int) -> PostUpdateHook | None:
        """The hook that communicates parameters after the optimizer, if buckets needn't wait for each other there.

        With ``overlap="update"`` the step runs this hook instead of :meth:`update`. None: :meth:`update` is used.
        """
        return None


def exchange(
    strategy: Strategy,
    hook: CommHook,
    tensors: Sequence[torch.Tensor],
    paths: Sequence[str],
    info: StepInfo,
    states: Sequence[LeafState] = (),
    *,
    background: bool = False,
    like: Tree = None,
) -> Exchange:
    """Start `hook` on tensors other than a backward pass' gradients; :meth:`Exchange.wait` returns the results.

    Args:
        hook: the hook that is run, on buckets of the sizes of `strategy`.
        tensors: the tensors, with the same shapes and dtypes on every rank. They are copied before this returns.
        paths: the names of the tensors in errors.
        info: as the strategy got it.
        states: the hook's state of each tensor.
        background: the strategy waits only after the backward pass, or later; for hooks with one phase.
        like: the tree of which the tensors are the leaves: they get the same buckets as its gradients.
    """
    plan = negotiate(strategy, hook, tensors, paths, info, states, background=background, like=like)
    return Exchange(plan, tensors, states, background)


def negotiate(
    strategy: Strategy,
    hook: CommHook,
    tensors: Sequence[torch.Tensor],
    paths: Sequence[str],
    info: StepInfo,
    states: Sequence[LeafState] = (),
    *,
    background: bool = False,
    like: Tree = None,
) -> Plan:
    """Compare a later exchange with the peers now, so that the first one needn't wait for them. Sends no tensors.

    Returns the plan of the exchange.
    """
    arrival = partial(range, len(tensors)) if like is None else partial(arrival_order, like, range(len(tensors)))
    names = tuple(map(tuple, states)) or ((),) * len(tensors)
    what = f"{type(strategy).__name__}{' in the background' if background else ''}"
    of = strategy, hook, info.axis, tensors, arrival, names, info.step, lambda: list(paths), what, tuple(paths)
    return make_plan(*of, background=background, grouped=like is not None)


def communicate_after_update(
    strategy: Strategy,
    hook: PostUpdateHook,
    update: Update,
    given: Tree,
    opt_state: Tree,
    states: States,
    info: StepInfo,
) -> Updated:
    """The end of a step whose optimizer has made `given` (new parameters, or whatever `hook` reduces)."""
    starts, spec = tree.flatten(update.params)
    paths = tree.leaf_paths(update.params)
    old = Old(starts, [states.get(path, {}) for path in paths], info.axis.size)
    pending = exchange(strategy, hook, tree.flatten(given)[0], paths, info, hook.begun(old), like=update.params)
    old = replace(old, may_overwrite=update.may_overwrite and may_be_written_to(hook.written(old), opt_state))
    params, found = list(starts), dict[int, LeafState]()
    left = [*filter(None, [take_updated(hook, *done, old, params, found) for done in pending.wait_buckets()])]
    after = {**states, **{paths[member]: state for member, state in found.items() if state}}

    def finish() -> None:
        for do in left:
            do()

    return Updated(tree.unflatten(spec, params), opt_state, after, finish=finish if left else None)


def take_updated(
    hook: PostUpdateHook, bucket: Bucket, reduced: Reduced, old: Old, params: Tensors, states: dict[int, LeafState]
) -> Callable[[], None] | None:
    """Put a complete bucket's next values into `params` and `states`. Returns what does the remaining work, or None."""
    done = hook.finish_bucket(bucket, reduced, old.of(bucket))
    for member, param, state in zip(bucket.members, done.params, done.states, strict=True):
        params[member], states[member] = param, state
    return done.finish


def may_be_written_to(tensors: Iterable[torch.Tensor], others: Any) -> bool:
    """Whether `tensors` are eager and contiguous, and none shares its address with another, or with one of `others` (an
    optimizer may have parameters in its state). Accelerators write on the step's stream, after all that reads.
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
    as_given = not torch.compiler.is_dynamo_compiling() and got.params is update.params and got.states is states
    if not (as_given or strategy.updates_in_buckets):
        check_next(strategy, "update", (got.params, got.states), update.params, states)
    return got


def check_next(strategy: Any, method: str, got: Any, params: Tree, states: States) -> tuple[Tree, States]:
    """`got`, the result of a strategy's `method` for `params` and `states`. Raises if it isn't as it should be."""
    if not (isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], dict)):
        raise _other(strategy, method, got, "(params, states), states a dict by path")
    found, after = got
    eager = not torch.compiler.is_dynamo_compiling()  # Dynamo can't ask for the identity of dicts in torch 2.11
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
                f"states of parameter {path!r}, which init made. Return all states: {{**states, path: {{...}}}}."
            )


def _other(strategy: Any, method: str, got: Any, expected: str) -> StrategyError:
    what = f"({', '.join(map(outcome, got))})" if isinstance(got, tuple) and len(got) == 2 else outcome(got)
    return StrategyError(f"{type(strategy).__name__}.{method} must return {expected}, got {what}.")


# --- what follows from a strategy's members ---------------------------------------------------------------------------


def constant_after(strategy: Strategy) -> int | None:
    """The number of steps after which ``hook(step)`` stays the same; None if it keeps changing."""
    first, length = strategy.cycle or (None, 0)
    return None if first is None or len({*map(strategy.hook, range(first, first + length))}) > 1 else first


@traced.at_trace_time
def stateful(strategy: Strategy, plain: bool = False) -> bool:
    """Whether a step needs communication state, even if only for the count of steps. `plain`: not in a train step."""
    return _stateful(strategy) and not (plain and strategy.layout.opt_state == "sharded")


@lru_cache(maxsize=64)
def _stateful(strategy: Strategy) -> bool:
    hook = strategy.hook(0)
    counts = constant_after(strategy) != 0 or (hook is not None and stateful_hook(hook))
    return counts or bool(strategy.init(torch.zeros(1, device="cpu")))


def shares_gradients(strategy: Strategy, step: int, axis: Axis | None = None) -> bool:
    """Whether ``update`` gets the same gradients on every rank that shares some, or on all ranks of `axis`."""
    hook = strategy.hook(step)
    return hook is not None and hook.alike and (axis is None or shared_part(hook, axis) is None)


def hook_of_plain(strategy: Strategy, step: int) -> CommHook | None:
    """The hook of synchronised step `step` where the caller gets the gradients, rather than ``update``."""
    return EXACT if strategy.layout.opt_state == "sharded" else strategy.hook(step)


def steps_ahead(strategy: Strategy) -> tuple[int, ...]:
    """The steps whose hooks are checked before training: the first, and a whole cycle."""
    first, length = strategy.cycle or (0, 1)
    return (0, *range(first, first + length))


def constant_hook(strategy: Strategy, step: int, dtype: torch.dtype | None = None) -> CommHook | None:
    """The hook for a graph that is compiled at `step` and runs at all later steps. Raises if the hook changes."""
    who, hook = f"a graph that is compiled at step {step}", hook_of_plain(strategy, step)
    require("graph, hook or strategy", strategy, who, step, constant_after(strategy))
    if hook is None:
        return None
    require("graph, hook or strategy", hook, who, step, hook.constant_after)
    return in_dtype(hook.at(step), dtype)


def default_strategy() -> Strategy:
    return cast(Strategy, HandedIn.strategy)


def in_dtype(hook: H, dtype: torch.dtype | None) -> H:
    """`hook`, whose sums are taken in `dtype`."""
    return hook if hook is None or dtype is None else cast(H, HandedIn.hooks.cast(hook, dtype))
