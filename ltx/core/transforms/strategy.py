"""The contract of a strategy: when and how ranks communicate, as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal

import torch

from ltx.core import comm
from ltx.core.base import tree
from ltx.core.base.arguments import ShortRepr, brief, check_fields, seconds, whole
from ltx.core.base.errors import StrategyError, UnsupportedError
from ltx.core.gradients.comm_hook import CommHook, unchanging
from ltx.core.gradients.pending import Exchange
from ltx.core.gradients.planning import DEFAULT_BYTES, MIB, Plan, make_plan
from ltx.core.gradients.reduction import LeafState
from ltx.core.optim.base import Optimizer, Update
from ltx.core.ranks.axis import Axis
from ltx.core.transforms.strategy_update import PostUpdateHook, StateLayout, States, StepInfo, Updated, check_next
from ltx.typing import Tree


@dataclass(frozen=True, kw_only=True)
class Strategy(ShortRepr):
    """What a training step does besides the user's own work.

    A strategy is immutable: it compares, hashes, pickles, prints, and is changed with ``dataclasses.replace``. Its
    schedules read the static number of steps so far. Its state is explicit: it is part of the communication state that
    the step gets and returns.

    Most define :meth:`hook`, the reduction of the gradients during the backward pass, and :meth:`after_update`, what
    happens to the parameters after the optimizer. Methods from :meth:`begin` on concern whole training steps
    (:func:`ltx.train_step`) alone. They communicate through :meth:`exchange`: when a rank fails, what is left of one
    exchange doesn't mix with the next.

    Attributes:
        bucket_bytes: gradients travel in buckets of at most this many bytes, 25 MiB for the default on accelerators
            whose collectives streams order; a hook that sends far less may ask for larger ones
            (``CommHook.bucket_factor``). "auto": the axis is measured when ranks first use it
            (:func:`ltx.profile.measure_network`), and sizes are chosen by the cost of a message
            (:func:`ltx.core.gradients.planning.bucket_sizes`), the same on every rank and from then on. The rounding of
            a sum over three or more ranks depends on a number's place in its bucket: set a number where two runs must
            be equal bit for bit. Compiled graphs need the measurement before; simulated ranks and worlds of one take
            the default.
        first_bucket_bytes: size of the first bucket; small, so that communication starts early. With "auto" its largest
            size.
        network: what "auto" uses instead of a measurement.
        process_group_backend: backend for ``ltx.init``; None chooses NCCL on CUDA and gloo on CPU.
        timeout: how long ``ltx.init``'s collectives wait for a peer: a timedelta, or a number of seconds, of which it
            makes one.
    """

    bucket_bytes: int | Literal["auto"] = DEFAULT_BYTES
    first_bucket_bytes: int = MIB
    network: comm.Network | None = None
    process_group_backend: str | None = None
    timeout: timedelta = timedelta(seconds=1800)

    def __post_init__(self) -> None:
        check_fields(self, StrategyError, "process_group_backend")
        for name in ("bucket_bytes", "first_bucket_bytes"):
            value, auto = getattr(self, name), name == "bucket_bytes"
            if auto and isinstance(value, str) and value == "auto":
                continue
            what, besides = f"{type(self).__name__}.{name}", '"auto" or ' * auto
            object.__setattr__(self, name, whole(what, value, 1, StrategyError, besides=besides))
        if not isinstance(self.network, comm.Network | None):
            raise StrategyError(
                f"{type(self).__name__}.network must be an ltx.profile.Network or None, got {brief(self.network)}."
            )
        timeout = seconds(f"{type(self).__name__}.timeout", self.timeout, StrategyError)
        object.__setattr__(self, "timeout", timedelta(seconds=timeout))

    def hook(self, step: int) -> CommHook | None:
        """The reduction of the gradients of synchronised step `step`; None leaves them local."""
        raise NotImplementedError(f"{type(self).__name__} must define hook(step)")

    def hook_in_graph(self, step: int) -> CommHook | None:
        """:meth:`hook` for a compiled graph that is traced at step `step` and runs at later ones too.

        Raises:
            UnsupportedError: the hook changes with the step.
        """
        hook = self.hook(step)
        return None if hook is None else unchanging(hook, step)

    def hook_in_training(self, step: int) -> CommHook | None:
        """:meth:`hook` in a whole training step, where only :meth:`update` sees the gradients."""
        return self.hook(step)

    def shares_gradients(self, step: int) -> bool:
        """Whether :meth:`update` gets the same gradients on every rank, in the step after `step` others."""
        return self.hook_in_training(step) is not None

    def init(self, param: Any, path: str = "") -> LeafState:
        """The state of the parameter at `path`: the hook's, and the strategy's own under other names."""
        hook = self.hook(0)
        return hook.init(param, path) if hook is not None else {}

    @property
    def stateful(self) -> bool:
        """Whether a step needs communication state, even if only for the count of steps."""
        return _has_state(self)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a bucket, and of the first one; with "auto" those without a known network."""
        return DEFAULT_BYTES if isinstance(self.bucket_bytes, str) else self.bucket_bytes, self.first_bucket_bytes

    @property
    def auto_sizes(self) -> bool:
        """Whether the sizes of buckets are chosen for the network."""
        return self.bucket_bytes == "auto"

    @property
    def auto_hook(self) -> bool:
        """Whether ``step.init`` chooses the hook for the network; it puts the hook's name into the state."""
        return False

    def choose(self, on: Any, params: Tree, dtype: torch.dtype | None) -> str:
        """What ``step.init(params)`` puts into the state for a strategy that is "auto" in one way or another.

        A collective: the network of axis `on` is measured here, if it isn't known. `dtype`: in which mixed precision
        reduces gradients. Gives "" for a strategy whose hook isn't chosen.
        """
        self.network_on(comm.resolve(on), params)
        return ""

    def network_on(self, axis: Axis, params: Tree) -> comm.Network | None:
        """The network between the ranks of `axis`, measured if need be; None where there is none."""
        axis_comm: comm.AxisComm | None = axis.comm
        if self.network is not None or axis_comm is None or axis.size == 1:
            return self.network
        leaves, spec = tree.flatten(params)
        shapes = tuple((x.shape, x.dtype) for x in leaves)
        axis_comm.negotiate(
            axis_comm.bucket_channel(0),
            ("init", self, spec, shapes),
            lambda: comm.Signature.of("init of an automatic strategy", tree.leaf_paths(params), leaves, repr(self)),
        )
        return comm.measured(axis_comm)

    def with_choice(self, choice: str) -> Strategy:
        """This strategy with the hook that a state names; the strategy itself without a choice."""
        return self

    def grouping(self, paths: Callable[[], list[str]], arrival: Sequence[int]) -> tuple[int, ...]:
        """Which gradients share a bucket: for each of `paths` the number of its group, -1 for none; () for no groups.

        `arrival` has their places in the order in which gradients are expected, the last parameter's first; it is the
        same on every rank.
        """
        return ()

    @property
    def layout(self) -> StateLayout:
        """How the parts of a train state relate across ranks."""
        return StateLayout()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise :class:`ltx.errors.StrategyError` unless this strategy can train with `optimizer`.

        This one refuses optimizers that are a part of another strategy.
        """
        if (only := optimizer.offers.strategy) is not None:
            raise StrategyError(
                f"{type(self).__name__} can't train with {optimizer!r}, which is a part of the {only} "
                "strategy: later in training it takes for gradients what that strategy gives it. Train with that "
                "strategy, or use another optimizer."
            )

    def check_axis(self, axis: Axis) -> None:
        """Raise :class:`ltx.errors.StrategyError` unless this strategy works on so many ranks."""

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: Axis) -> Tree:
        """The optimizer's state before the first step."""
        return optimizer.init(params)

    def gather_optimizer(self, optimizer: Optimizer, params: Tree, opt_state: Tree, info: StepInfo) -> Tree:
        """A sharded optimizer state, whole on every rank, as :meth:`init_optimizer` makes it in a world of one."""
        return opt_state

    def begin(self, params: Tree, states: States, info: StepInfo, pending: Any) -> Any:
        """Start work that is pending during the forward and the backward pass.

        `pending` is what the last step left (None at first); the result is given to :meth:`update`. If it is new and
        the step then fails, peers are told; the state keeps what the last step left.
        """
        return pending

    def update(self, update: Update, states: States, info: StepInfo, pending: Any) -> Updated:
        """The optimizer's part of a step: ``update.apply()``, and the strategy's own work around it."""
        params, opt_state = update.apply()
        params, states = check_next(self, "after_update", self.after_update(params, states, info), params, states)
        return Updated(params, opt_state, states, pending)

    def after_update(self, params: Tree, states: States, info: StepInfo) -> tuple[Tree, States]:
        """The final parameters, made of the updated ones, and the next state. Neither input may be written to."""
        return params, states

    def finish(self, params: Tree, states: States, info: StepInfo, pending: Any) -> tuple[Tree, States]:
        """Wait for what is `pending` between two steps, on all ranks together."""
        return params, states

    def communicates_after_update(self, step: int) -> bool:
        """Whether :meth:`update` communicates after the optimizer, in the step after `step` others.

        The optimizer then doesn't update in place, so that a step in which a peer fails leaves its state as it was.
        """
        return type(self).after_update is not Strategy.after_update

    def post_update_hook(self, optimizer: Optimizer, step: int) -> PostUpdateHook | None:
        """What ranks do with parameters after the optimizer, if each bucket can do it without waiting for the others.

        With ``overlap="update"`` the step drives it in place of :meth:`update`. None: :meth:`update` does all of it.
        """
        return None

    def check_weighted(self, step: int) -> None:
        """Raise unless the training step after `step` others may return :class:`ltx.Weighted`."""
        if self.layout.params == "per_rank" or self.hook_in_training(step) is None:
            raise StrategyError(
                f"train_step: the loss is an ltx.Weighted, and {type(self).__name__} lets ranks take steps of their "
                "own and averages their parameters or updates, in which every rank counts alike whatever its weight. "
                "Give each rank equally many samples and return their mean, or use a strategy that averages gradients "
                "at every step, such as ltx.DDPStrategy()."
            )
        hook = self.hook(step)
        if hook is not None and not hook.gives_gradients:
            raise UnsupportedError(
                "train_step: the loss is an ltx.Weighted, whose gradients are divided by the sum of the weights once "
                f"they are reduced, and {hook!r} of {type(self).__name__} doesn't give gradients. Return the mean of "
                "equally many samples on each rank, or use another strategy."
            )

    @property
    def needs_whole(self) -> bool:
        """Whether what ranks do after the update depends on whole parameters, as :attr:`CommHook.needs_whole` says."""
        return False

    @property
    def updates_in_buckets(self) -> bool:
        """Whether the optimizer may run bucket by bucket (``overlap="update"``): :meth:`update` is the plain one."""
        return type(self).update is Strategy.update

    @property
    def communicates_besides(self) -> bool:
        """Whether a training step communicates more than gradients."""
        mine = type(self)
        return any(getattr(mine, part) is not getattr(Strategy, part) for part in ("begin", "update", "after_update"))

    @property
    def cycle(self) -> tuple[int, int]:
        """(first, length): from step `first` on, what a step sends repeats every `length` steps.

        :func:`ltx.profile.plan` takes its mean over that many steps.
        """
        hook = self.hook(0)
        return (0 if hook is None else hook.constant_after or 0), 1

    @property
    def steps_ahead(self) -> tuple[int, ...]:
        """The steps whose hooks checks look at before training: the first, and a whole cycle."""
        first, length = self.cycle
        return (0, *range(first, first + length))

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
            hook: its reduction is done, on buckets of this strategy's sizes.
            tensors: the same shapes and dtypes on every rank. They are copied before this returns.
            paths: their names in errors.
            info: as the strategy got it.
            states: the hook's state of each tensor.
            background: wait for it much later, at the earliest after the backward pass; for a hook with one phase.
            midway: another exchange of the same step follows it on every rank. If a rank fails between them, its peers
                can repeat the step with it.
            like: the tree whose leaves the tensors are, to have the buckets of its gradients.
        """
        plan = self._plan(hook, tensors, paths, info, states, background, like)
        if (make := info.axis.ranks.exchanges) is not None:
            recorded: Exchange = make(plan, tensors, states, background, paths)
            return recorded
        return Exchange(plan, tensors, states, background, midway)

    def negotiate(
        self,
        hook: CommHook,
        tensors: Sequence[torch.Tensor],
        paths: Sequence[str],
        info: StepInfo,
        *,
        background: bool = False,
    ) -> None:
        """Compare an exchange with the peers now, so that the first one needn't wait for them. Sends nothing."""
        self._plan(hook, tensors, paths, info, (), background)

    def _plan(
        self,
        hook: CommHook,
        tensors: Sequence[torch.Tensor],
        paths: Sequence[str],
        info: StepInfo,
        states: Sequence[LeafState],
        background: bool,
        like: Tree = None,
    ) -> Plan:
        names = tuple(tuple(state) for state in states) or tuple(() for _ in tensors)
        return make_plan(
            self,
            hook,
            info.axis,
            tensors,
            lambda: range(len(tensors)) if like is None else tree.insertion_order(like)[::-1],
            names,
            info.step,
            lambda: list(paths),
            f"{type(self).__name__}{' in the background' if background else ''}",
            tuple(paths),
            background=background,
            grouped=like is not None,
        )


@dataclass
class _HandedIn:
    """What rooms below the boundary give the kernel when ``ltx`` is imported, since it imports none of them.

    Attributes:
        default: the strategy of transformations that are given none. Made once: Dynamo can't make one while it traces.
        hooks: :mod:`ltx.hooks`.
    """

    default: Strategy
    hooks: Any = None


handed_in = _HandedIn(Strategy())


def default_strategy() -> Strategy:
    """What transformations use when they are given none."""
    return handed_in.default


def in_dtype(hook: CommHook | None, dtype: torch.dtype | None) -> CommHook | None:
    """`hook`, whose sums travel in `dtype`."""
    return hook if hook is None or dtype is None else handed_in.hooks.cast(hook, dtype)


@lru_cache(maxsize=64)
def _has_state(strategy: Strategy) -> bool:
    hook = strategy.hook(0)
    return bool(strategy.init(torch.zeros(1))) or (hook is not None and hook.stateful)
