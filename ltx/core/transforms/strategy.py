"""The contract of a strategy: when and how ranks communicate, as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch

from ltx.core import comm
from ltx.core.base import tree
from ltx.core.base.arguments import Offering, follows
from ltx.core.base.needs import require
from ltx.core.gradients.comm_hook import CommHook, unchanging
from ltx.core.gradients.pending import Exchange
from ltx.core.gradients.planning import BucketSettings, Plan, make_plan
from ltx.core.gradients.reduction import LeafState
from ltx.core.optim.base import Optimizer, Update
from ltx.core.ranks.axis import Axis
from ltx.core.transforms.strategy_update import PostUpdateHook, StateLayout, States, StepInfo, Updated, check_next
from ltx.typing import Tree

T = TypeVar("T")
#: What a strategy says of the step after so many others.
OfStep = Callable[[int], T]


@lru_cache(maxsize=64)
def _has_state(strategy: Strategy) -> bool:
    hook = strategy.hook(0)
    counts = strategy.constant_after != 0 or (hook is not None and hook.stateful)
    return counts or bool(strategy.init(torch.zeros(1)))


def _has_own(strategy: Strategy, *methods: str) -> bool:
    return any(getattr(type(strategy), method) is not getattr(Strategy, method) for method in methods)


@dataclass(frozen=True)
class StrategyOffers:
    """What a strategy says of itself, for steps and plans to read. Methods get the number of synchronised steps
    so far.

    Attributes:
        layout: how the parts of a train state relate across ranks.
        stateful: a step needs communication state, even if only for the count of steps.
        needs_whole: what ranks do after the update depends on whole parameters, as ``HookOffers.needs_whole`` says.
        takes_complex: the strategy trains complex parameters too.
        constant_after: the number of steps after which ``hook(step)`` is the same at every step; None if it goes on
            changing. Compiled graphs can hold the hook from that step on.
        cycle: (first, length): from step `first` on, what a step sends repeats every `length` steps.
            :func:`ltx.profile.plan` takes the mean over that many steps.
        hook_in_graph: ``hook(step)`` for a compiled graph that is traced at step `step` and runs at later steps; raises
            if the hook changes.
        hook_in_training: ``hook(step)`` in a whole training step, where ``update`` alone sees the gradients.
        shares_gradients: whether ``update`` gets the same gradients on every rank.
        communicates_after_update: whether ``update`` communicates after the optimizer. The optimizer then doesn't
            update in place, so that a step in which a peer fails leaves its state as it was.
        communicates_besides: a training step communicates more than gradients.
        updates_in_buckets: the optimizer may run bucket by bucket (``overlap="update"``): ``update`` is the plain one.
        auto_hook: ``step.init`` chooses the hook for the network, and puts the hook's name into the state. Then the
            class has ``choose(params, ranks, network, dtype)``, which returns a hook's name (mixed precision reduces
            gradients in `dtype`), and ``with_choice(name)``, which returns the strategy with that hook.
    """

    layout: StateLayout = StateLayout()
    stateful: bool = follows(_has_state)
    needs_whole: bool = False
    takes_complex: bool = True
    constant_after: int | None = follows(
        lambda strategy: getattr(strategy.hook(0), "constant_after", 0)
    )  # 0 without a hook
    cycle: tuple[int, int] = follows(lambda strategy: (strategy.constant_after or 0, 1))
    hook_in_graph: OfStep[CommHook | None] = follows(lambda strategy: partial(constant_hook, strategy))
    hook_in_training: OfStep[CommHook | None] = follows(lambda strategy: strategy.hook)
    shares_gradients: OfStep[bool] = follows(
        lambda strategy: lambda n: getattr(strategy.hook_in_training(n), "alike", False)
    )
    communicates_after_update: OfStep[bool] = follows(lambda strategy: lambda n: _has_own(strategy, "after_update"))
    communicates_besides: bool = follows(lambda strategy: _has_own(strategy, "begin", "update", "after_update"))
    updates_in_buckets: bool = follows(lambda strategy: not _has_own(strategy, "update"))
    auto_hook: bool = False


@dataclass(frozen=True, kw_only=True)
class Strategy(Offering[StrategyOffers], BucketSettings, kind=StrategyOffers):
    """What a training step does besides the user's own work.

    A strategy is immutable: it compares, hashes, pickles, prints, and is changed with ``dataclasses.replace``. Its
    schedules read the static number of steps so far. Its state is explicit: it is part of the communication state that
    the step gets and returns.

    Most strategies define :meth:`hook`, which reduces the gradients during the backward pass, and :meth:`after_update`,
    which changes the parameters after the optimizer. Methods from :meth:`begin` on concern whole training steps
    (:func:`ltx.train_step`) alone. They communicate through :meth:`exchange`: when a rank fails, messages left over
    from one exchange don't mix with the next.

    Attributes:
        offers: an :class:`ltx.extend.StrategyOffers`. A class overrides a default by an attribute, property or method
            of the field's name, and each can be read so.
        bucket_bytes, first_bucket_bytes, network, process_group_backend, timeout: as in
            :class:`ltx.extend.BucketSettings`.
    """

    def hook(self, step: int) -> CommHook | None:
        """The hook that reduces the gradients of synchronised step `step`; None leaves gradients local."""
        raise NotImplementedError(f"{type(self).__name__} must define hook(step)")

    def init(self, param: Any, path: str = "") -> LeafState:
        """The state of the parameter at `path`: the hook's, and the strategy's own under other names."""
        hook = self.hook(0)
        return hook.init(param, path) if hook is not None else {}

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise :class:`ltx.errors.StrategyError` unless it trains with `optimizer`; not with another strategy's."""
        require("own strategy, optimizer", optimizer, type(self).__name__)

    def check_axis(self, axis: Axis) -> None:
        """Raise :class:`ltx.errors.StrategyError` unless this strategy works on the axis' number of ranks."""

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: Axis) -> Tree:
        """The optimizer's state before the first step."""
        return optimizer.init(params)

    def gather_optimizer(self, optimizer: Optimizer, params: Tree, opt_state: Tree, info: StepInfo) -> Tree:
        """The whole optimizer state on every rank, made of a sharded one, as :meth:`init_optimizer` makes it alone."""
        return opt_state

    def begin(self, params: Tree, states: States, info: StepInfo, pending: Any) -> Any:
        """Start work that is pending during the forward and the backward pass.

        `pending` is the work that the last step left (None at first); :meth:`update` gets the result. If the step then
        fails, peers are told of new work; the state keeps the work that the last step left.
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
        """Wait for the work that is `pending` between two steps; all ranks do it together."""
        return params, states

    def post_update_hook(self, optimizer: Optimizer, step: int) -> PostUpdateHook | None:
        """The hook on parameters after the optimizer, if buckets needn't wait for each other there.

        With ``overlap="update"`` the step runs this hook in place of :meth:`update`. None: :meth:`update` does it all.
        """
        return None

    def exchange(
        self,
        hook: CommHook,
        tensors: Sequence[torch.Tensor],
        paths: Sequence[str],
        info: StepInfo,
        states: Sequence[LeafState] = (),
        *,
        background: bool = False,
        midway: bool = False,
        like: Tree = None,
    ) -> Exchange:
        """Start `hook` on tensors that aren't gradients of a backward pass; :meth:`Exchange.wait` gives the results.

        Args:
            hook: the hook that is run, on buckets of this strategy's sizes.
            tensors: the same shapes and dtypes on every rank. They are copied before this returns.
            paths: their names in errors.
            info: as the strategy got it.
            states: the hook's state of each tensor.
            background: wait for it much later, at the earliest after the backward pass; for a hook with one phase.
            midway: another exchange of the same step follows it on every rank. If a rank fails between them, peers can
                repeat the step.
            like: the tree whose leaves the tensors are: they get the same buckets as its gradients.
        """
        plan = _plan(self, hook, tensors, paths, info, states, background, like)
        if (make := info.axis.ranks.exchanges) is not None:
            recorded: Exchange = make(plan, tensors, states, background, paths)
            return recorded
        return Exchange(plan, tensors, states, background, midway)


def negotiate(
    strategy: Strategy,
    hook: CommHook,
    tensors: Sequence[torch.Tensor],
    paths: Sequence[str],
    info: StepInfo,
    states: Sequence[LeafState] = (),
    *,
    background: bool = False,
) -> None:
    """Compare an exchange with the peers now, so that the first exchange needn't wait for them. Sends nothing."""
    _plan(strategy, hook, tensors, paths, info, states, background)


def _plan(
    strategy: Strategy,
    hook: CommHook,
    tensors: Sequence[torch.Tensor],
    paths: Sequence[str],
    info: StepInfo,
    states: Sequence[LeafState],
    background: bool,
    like: Tree = None,
) -> Plan:
    return make_plan(
        strategy,
        hook,
        info.axis,
        tensors,
        lambda: range(len(tensors)) if like is None else tree.insertion_order(like)[::-1],
        tuple(tuple(state) for state in states) or tuple(() for _ in tensors),
        info.step,
        lambda: list(paths),
        f"{type(strategy).__name__}{' in the background' if background else ''}",
        tuple(paths),
        background=background,
        grouped=like is not None,
    )


def steps_ahead(strategy: Strategy) -> tuple[int, ...]:
    """The steps whose hooks checks look at before training: the first, and a whole cycle."""
    first, length = strategy.cycle
    return (0, *range(first, first + length))


@lru_cache(maxsize=64)  # each step with DTensors asks this, and a cycle may be long
def hooks_ahead(strategy: Strategy) -> tuple[CommHook | None, ...]:
    return tuple(dict.fromkeys(map(strategy.hook, steps_ahead(strategy))))


def constant_hook(strategy: Strategy, step: int) -> CommHook | None:
    """The hook that a graph compiled at `step` can hold at all later steps too."""
    require("graph, hook or strategy", strategy, f"a graph that is compiled at step {step}", step)
    hook = strategy.hook(step)
    return None if hook is None else unchanging(hook, step)


def network_on(strategy: Strategy, axis: Axis, params: Tree) -> comm.Network | None:
    """The network between the ranks of `axis`, measured if it isn't known; None where there is no network."""
    axis_comm: comm.AxisComm | None = axis.comm
    if strategy.network is not None or axis_comm is None or axis.size == 1:
        return strategy.network
    leaves, spec = tree.flatten(params)
    shapes = tuple((x.shape, x.dtype) for x in leaves)
    axis_comm.negotiate(
        axis_comm.bucket_channel(0),
        ("init", strategy, spec, shapes),
        lambda: comm.Signature.of("init of an automatic strategy", tree.leaf_paths(params), leaves, repr(strategy)),
    )
    return comm.measured(axis_comm)


class HandedIn:
    """Objects that packages outside of the core give it when ``ltx`` is imported; the core imports none of them."""

    strategy = Strategy()  # the default strategy, made once: Dynamo can't make it while it traces
    hooks: Any = None  # ltx.hooks


def default_strategy() -> Strategy:
    return HandedIn.strategy


def in_dtype(hook: CommHook | None, dtype: torch.dtype | None) -> CommHook | None:
    """`hook`, whose sums travel in `dtype`."""
    return hook if hook is None or dtype is None else HandedIn.hooks.cast(hook, dtype)
