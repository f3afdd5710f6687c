"""What a training step sends, as values: collectives, buckets, exchanges, in the order of their issue.

A strategy's own methods are driven on the meta device, and what they ask for is written down. So what is counted is
what a step will issue, and not a formula beside it: :func:`ltx.profile.explain` shows it for one step,
:func:`ltx.profile.plan` takes the time of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from ltx import hooks
from ltx.core import comm
from ltx.core.base import tree
from ltx.core.comm.operations import OPERATIONS
from ltx.core.gradients.comm_hook import reduce_at_once
from ltx.core.gradients.pending import Exchange
from ltx.core.gradients.planning import Plan, arrival_order, differentiable, make_plan
from ltx.core.gradients.reduction import REQUESTS, Bucket, LeafState, Reduced
from ltx.core.optim.base import Update, advanced
from ltx.core.optim.combine import members_of
from ltx.core.optim.grad_transforms import ClipByGlobalNorm
from ltx.core.ranks.axis import DEFAULT_NAME, Axis, open_alone
from ltx.core.ranks.batched import ShapeRanks
from ltx.core.transforms.strategy import Strategy, in_dtype
from ltx.core.transforms.strategy_update import PostUpdateHook, States, StepInfo, Updated, check_updated
from ltx.errors import LtxError, StrategyError, UnsupportedError
from ltx.optim import Optimizer, chain, identity
from ltx.typing import Tree


@dataclass(frozen=True)
class Collective:
    """One collective that a bucket will issue.

    Attributes:
        operation: as in :class:`ltx.hooks.CollectiveRequest`.
        buffer: dtype and shape of what goes in, as "float16[99]".
        nbytes: bytes that this rank sends for it, as :func:`ltx.profile.record` will count them.
        ranks: how many take part.
        between: the first and the last of them.
    """

    operation: str
    buffer: str
    nbytes: int
    ranks: int
    between: tuple[int, int] = field(compare=False)


@dataclass(frozen=True)
class BucketExplanation:
    """What one bucket of gradients will send.

    Attributes:
        index: its place in the order of launches.
        paths: of its parameters, in the order in which they lie in it.
        elements, dtype, nbytes: of its gradients.
        hook: the hook in force.
        collectives: in the order in which they are issued.
    """

    index: int
    paths: tuple[str, ...]
    elements: int
    dtype: torch.dtype
    nbytes: int
    hook: hooks.CommHook
    collectives: tuple[Collective, ...]

    @classmethod
    def of(
        cls, bucket: Bucket, paths: Sequence[str], hook: hooks.CommHook, found: Sequence[Collective], **more: Any
    ) -> Self:
        """That of a `bucket` of the leaves that lie at `paths`."""
        mine, nbytes = tuple(paths[member] for member in bucket.members), bucket.numel * bucket.dtype.itemsize
        return cls(bucket.index, mine, bucket.numel, bucket.dtype, nbytes, hook, tuple(found), **more)

    @property
    def label(self) -> str:
        """What the ledger calls its collectives."""
        return f"bucket {self.index}"


@dataclass(frozen=True)
class ExchangeExplanation(BucketExplanation):
    """What one bucket of an exchange will send: what a strategy sends besides gradients.

    Attributes:
        index: its place in its exchange.
        paths, elements, dtype, nbytes: of the tensors that are exchanged.
        exchange: the exchange's number among those of the step.
        background: whether it is under way while the rank computes.
    """

    exchange: int
    background: bool

    @property
    def label(self) -> str:
        return f"{'background' if self.background else 'exchange'} {self.index}"


@dataclass(frozen=True)
class ExchangeStarted:
    """An exchange starts. `summary`: the small sum ahead of one in the foreground."""

    exchange: Exchange
    rows: tuple[ExchangeExplanation, ...]
    summary: Collective | None


@dataclass(frozen=True)
class ExchangeWaited:
    """An exchange is waited for, of this step or of one before it."""

    exchange: Exchange


@dataclass(frozen=True)
class Issues:
    """What a training step issues, and waits for, in order.

    Attributes:
        begun: ahead of the forward pass.
        summary: the small sum ahead of the gradients, if any are sent.
        buckets: of gradients, during the backward pass.
        updated: after it.
    """

    begun: tuple[ExchangeStarted | ExchangeWaited, ...] = ()
    summary: Collective | None = None
    buckets: tuple[BucketExplanation, ...] = ()
    updated: tuple[ExchangeStarted | ExchangeWaited, ...] = ()

    @property
    def exchanges(self) -> tuple[ExchangeExplanation, ...]:
        """All rows of all exchanges that start in this step."""
        return tuple(
            row for event in (*self.begun, *self.updated) if isinstance(event, ExchangeStarted) for row in event.rows
        )

    @property
    def summaries(self) -> tuple[Collective, ...]:
        """All summaries of this step."""
        started = (event.summary for event in (*self.begun, *self.updated) if isinstance(event, ExchangeStarted))
        return tuple(summary for summary in (self.summary, *started) if summary is not None)


def collective(operation: str, buffer: torch.Tensor, ranks: ShapeRanks) -> Collective:
    """The collective of a buffer, of which the shape is read."""
    part, size = ranks.members, ranks.size
    between = (part[0], part[-1]) if part else (0, size - 1)
    return Collective(operation, tree.describe(buffer), comm.bytes_sent(operation, buffer, size), size, between)


def summary(ranks: Any) -> Collective:
    """The small sum that goes ahead of gradients, and of exchanges in the foreground."""
    return collective("psum", meta((comm.SUMMARY_BYTES // 8,), torch.float64), ranks)


def meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without values."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


@dataclass
class Asked:
    """What one reduction has asked for so far."""

    hook: hooks.CommHook
    what: str
    size: int  # the number of all ranks
    found: list[Collective] = field(default_factory=list)

    def answer(self, operation: str, buffer: torch.Tensor, ranks: ShapeRanks) -> torch.Tensor:
        """Shape and dtype of what the collective gives."""
        if not buffer.numel():  # the schedules send nothing then
            return buffer
        if len(self.found) == self.hook.phases_on(self.size):
            raise StrategyError(
                f"{self.hook!r} asks for more than {len(self.found)} collectives in {self.what}. Say how many it may "
                "ask for: phases: ClassVar[int] = ..."
            )
        if operation not in REQUESTS:
            *others, last = REQUESTS
            raise StrategyError(
                f"{self.hook!r} asks for {operation!r} in {self.what}. A reduction may ask for "
                f"{', '.join(others)} and {last}."
            )
        self.found.append(collective(operation, buffer, ranks))
        return OPERATIONS[operation].new_result(buffer, ranks.size)


# --- found on shapes alone --------------------------------------------------------------------------------------------


class Watched(Exchange):
    """An exchange on shapes. It records what its buckets request, and when it is started and waited for."""

    def __init__(
        self,
        steps: Steps,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        states: Sequence[LeafState],
        background: bool,
        paths: Sequence[str],
    ):
        self._steps = steps
        self._paths = tuple(paths)
        self._background = background
        self._asked: list[Asked] = []
        self._alike: dict[Any, tuple[Asked, Reduced]] = {}
        super().__init__(plan, tensors, states, background)

    def _at_once(self, place: int, tensors: Sequence[torch.Tensor]) -> Reduced:
        hook, bucket = self._plan.hook, self._plan.buckets[place]
        assert isinstance(hook, hooks.CommHook)
        kind = _kind(self._plan, bucket, [self._states[member] for member in bucket.members])
        if kind not in self._alike:
            asked = Asked(hook, f"bucket {place} of an exchange", self._plan.axis.size)
            with self._steps.asking(asked):
                self._alike[kind] = asked, super()._at_once(place, tensors)
        asked, reduced = self._alike[kind]
        self._asked.append(asked)
        return reduced

    def wait_buckets(self) -> list[tuple[Bucket, Reduced]]:
        self._steps.events.append(ExchangeWaited(self))
        return super().wait_buckets()

    def started(self, number: int) -> ExchangeStarted:
        """What it has issued, as the `number`-th exchange of a step."""
        rows = tuple(
            ExchangeExplanation.of(
                bucket, self._paths, asked.hook, asked.found, exchange=number, background=self._background
            )
            for bucket, asked in zip(self._plan.buckets, self._asked, strict=True)
        )
        return ExchangeStarted(self, rows, None if self._background else summary(self._plan.axis.ranks))


class Gradients:
    """A strategy's gradients on shapes alone.

    Args:
        strategy: whose.
        params: the parameters, of which shapes and dtypes are read.
        size, rank: the number of ranks, and the one that is looked at.
    """

    def __init__(self, strategy: Strategy, params: Tree, size: int, rank: int = 0):
        self.strategy = strategy
        self.ranks = ShapeRanks(rank, size, self._answer, self._exchange)
        self.axis = Axis(DEFAULT_NAME, size, self.ranks)
        self._asked: Asked | None = None
        given, self.spec = tree.flatten(params)
        self.leaves = [meta(leaf.shape, leaf.dtype) for leaf in given]
        self.paths = tree.leaf_paths(params)
        # As if all were differentiated.
        self.wanted = differentiable(self.leaves)
        self._given = [given[i] for i in self.wanted]
        self._order = arrival_order(params, self.wanted)

    def plan(self, hook: hooks.CommHook, states: Sequence[LeafState] | None = None, step: int = 0) -> Plan:
        """The plan of a step's gradients."""
        names = tuple(tuple(state) for state in states or [{} for _ in self.wanted])
        mine = [self.paths[i] for i in self.wanted]
        return make_plan(
            self.strategy, hook, self.axis, self._given, lambda: self._order, names, step, lambda: mine, "", None
        )

    def first_states(self) -> States:
        """The communication state before the first step."""
        with on_shapes_alone(self.strategy.hook(0) or self.strategy, "the first state"):
            return {
                path: state
                for path, leaf in zip(self.paths, self.leaves, strict=True)
                if leaf.is_floating_point() and (state := self.strategy.init(leaf, path))
            }

    def buckets(self, hook: hooks.CommHook, entries: States, step: int) -> tuple[BucketExplanation, ...]:
        """What a step with `hook` issues for its gradients."""
        hook = hook.at(step)
        states = [hook.states_of(entries.get(self.paths[i], {})) for i in self.wanted]
        paths, plan, kinds, alike = [self.paths[i] for i in self.wanted], self.plan(hook, states, step), [], {}
        for bucket in plan.buckets:
            mine = [states[member] for member in bucket.members]
            kinds.append(_kind(plan, bucket, mine))
            if kinds[-1] not in alike:
                alike[kinds[-1]] = self._reduced(plan, hook, bucket, mine)
        return tuple(
            BucketExplanation.of(bucket, paths, hook, alike[kind])
            for bucket, kind in zip(plan.buckets, kinds, strict=True)
        )

    def only(self, hook: hooks.CommHook, step: int) -> Issues:
        """What a step with `hook` issues, where strategies do nothing besides."""
        buckets = self.buckets(hook, self.first_states(), step)
        return Issues((), self._summary(hook) if buckets else None, buckets)

    def _summary(self, hook: hooks.CommHook) -> Collective:
        return summary((hook.within(self.axis) or self.axis).ranks)

    def _reduced(
        self, plan: Plan, hook: hooks.CommHook, bucket: Bucket, states: Sequence[LeafState]
    ) -> tuple[Collective, ...]:
        """Drive the reduction of one bucket, and write down what it asks for."""
        there = replace(bucket, leaves=tuple(replace(leaf, device=torch.device("meta")) for leaf in bucket.leaves))
        flat = meta((bucket.numel,), hook.wire_dtype(bucket.dtype))
        tensors = [meta(x.shape, x.dtype) for state in states for x in state.values()]
        asked = Asked(hook, f"bucket {bucket.index}", plan.axis.size)
        with on_shapes_alone(hook, asked.what), self.asking(asked):
            inputs = plan.bucket_input(there, flat, plan.states_of(there, tensors))
            reduce_at_once(hook, plan.axis, replace(inputs, update=list))
        return tuple(asked.found)

    @contextmanager
    def asking(self, asked: Asked) -> Iterator[None]:
        """What is asked for meanwhile is written down there."""
        self._asked = asked
        yield
        self._asked = None

    def _answer(
        self, operation: str, buffer: torch.Tensor, arguments: tuple[int, ...], ranks: ShapeRanks
    ) -> torch.Tensor:
        if self._asked is None:
            raise UnsupportedError(
                f"{self.strategy!r} communicates by a collective ({operation} of {tree.describe(buffer)}) that belongs "
                "to no exchange, so that nothing can be said of it ahead. Let it communicate through Strategy.exchange."
            )
        return self._asked.answer(operation, buffer, ranks)

    def _exchange(self, *args: Any) -> Exchange:
        raise AssertionError("gradients are no exchange")


class Steps(Gradients):
    """A strategy's training steps on shapes alone, one after the other from step `first` on.

    Args:
        strategy, params, size, rank: as in :class:`Gradients`.
        first: the number of the first step.
        optimizer: what updates the parameters; one that does nothing to gradients if None.
        before_update: what the train step itself asks of the other ranks by exchanges, ahead of the optimizer.
    """

    def __init__(
        self,
        strategy: Strategy,
        params: Tree,
        size: int,
        rank: int = 0,
        first: int = 0,
        optimizer: Optimizer | None = None,
        reduce_dtype: torch.dtype | None = None,
        post_update_hook: Callable[[int], PostUpdateHook | None] = lambda step: None,
        before_update: Callable[[StepInfo], object] = lambda info: None,
    ):
        super().__init__(strategy, params, size, rank)
        self._reduce_dtype, self._post_update_hook = reduce_dtype, post_update_hook
        self._before_update = before_update
        self._optimizer = identity() if optimizer is None else optimizer
        self._step = first
        self.events: list[ExchangeStarted | ExchangeWaited] = []
        self._started = 0
        self._buckets: dict[hooks.CommHook, tuple[BucketExplanation, ...]] = {}
        whole = tree.unflatten(self.spec, self.leaves)
        strategy.check_axis(self.axis)
        strategy.check_optimizer(self._optimizer)
        self._grads = tree.map(torch.empty_like, whole)
        states = self.first_states()
        with on_shapes_alone(strategy, "the first state of the optimizer"):
            opt_state = strategy.init_optimizer(self._optimizer, whole, self.axis)
            for _ in range(first if self._optimizer.offers.leafwise else 0):  # such ones count their updates
                opt_state = advanced(opt_state)
        self._carried = Updated(whole, opt_state, states)  # what one step hands to the next

    def next(self) -> Issues:
        """Drive one step."""
        strategy, carried, info = self.strategy, self._carried, StepInfo(self._step, self.axis)
        self._started = 0
        with self._in_step():
            pending = strategy.begin(carried.params, carried.states, info, carried.pending)
        begun = self._taken()
        post_update_hook = self._post_update_hook(info.step)
        hook = post_update_hook or in_dtype(strategy.hook_in_training(info.step), self._reduce_dtype)
        buckets = self._gradients(hook, carried.states, info.step) if hook is not None else ()
        ahead = self._summary(hook) if hook is not None and buckets else None
        if post_update_hook is not None:
            self._carried = replace(carried, pending=pending)
            self._step += 1
            return Issues(begun, ahead, buckets)
        update = Update(self._optimizer, carried.params, self._grads, carried.opt_state)
        with self._in_step():
            self._before_update(info)
            got = strategy.update(update, carried.states, info, pending)
        self._carried = check_updated(strategy, got, update, carried.states)
        self._step += 1
        return Issues(begun, ahead, buckets, self._taken())

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """The strategy's part of a step, in which the axis that collectives find is the one that is counted."""
        undo = open_alone(self.axis)
        try:
            with on_shapes_alone(self.strategy, f"step {self._step}"):
                yield
        finally:
            undo()

    def _gradients(self, hook: hooks.CommHook, states: States, step: int) -> tuple[BucketExplanation, ...]:
        in_force = hook.at(step)
        if in_force not in self._buckets:
            self._buckets[in_force] = self.buckets(hook, states, step)
        return self._buckets[in_force]

    def _exchange(self, *args: Any) -> Exchange:
        exchange = Watched(self, *args)
        self.events.append(exchange.started(self._started))
        self._started += 1
        return exchange

    def _taken(self) -> tuple[ExchangeStarted | ExchangeWaited, ...]:
        events, self.events = self.events, []
        return tuple(events)


def _kind(plan: Plan, bucket: Bucket, states: Sequence[LeafState]) -> Any:
    """What a reduction on shapes can tell of a bucket: of those that are alike one is driven for all."""
    shapes = tuple((name, x.shape, x.dtype) for state in states for name, x in state.items())
    return bucket.leaves, shapes, bucket.index == len(plan.buckets) - 1


@contextmanager
def on_shapes_alone(whose: hooks.CommHook | Strategy, what: str) -> Iterator[None]:
    """Say what is wrong with a hook or a strategy that can't do without values."""
    try:
        yield
    except LtxError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{whose!r} can't be run on shapes alone: {what} took {type(error).__name__}: {error}. It may not "
            "read values, and the tensors that it makes belong on the device of those that it is given. What a step "
            "sends can still be counted while it runs: with ltx.profile.record() as trace."
        ) from error


def stand_in(strategy: Strategy, optimizer: Optimizer) -> Optimizer:
    """What does to shapes as `optimizer` does and reads no values, unless the strategy insists on another.

    That is :func:`ltx.optim.identity`, but for what clips by a norm: where ranks have parts of the gradients, that
    takes an exchange.
    """
    clips = [member for member in members_of(optimizer) if isinstance(member, ClipByGlobalNorm)]
    made = chain(*clips, identity())
    try:
        strategy.check_optimizer(made)
    except LtxError:
        return optimizer
    return made


def cycle_of(strategy: Strategy) -> range:
    """The steps of one cycle of the strategy.

    Raises:
        StrategyError: steps after it communicate at other times.
    """
    first, length = strategy.cycle
    late = strategy.communicates_after_update
    differs = next((step for step in range(first, first + 1000) if late(step) != late(step + length)), None)
    if differs is not None:
        raise StrategyError(
            f"plan: {type(strategy).__name__}.cycle says that from step {first} on steps repeat every {length}, and "
            f"communicates_after_update({differs}) isn't communicates_after_update({differs + length}). Define cycle: "
            "(the first step of the first cycle, how many steps a cycle has); or say which steps to take the mean of: "
            f"plan(..., steps=range({first}, {first + 1000}))."
        )
    return range(first + length, first + 2 * length)
