"""The messages of a training step, found from shapes alone before anything runs.

A strategy's own methods run on the meta device, and the collectives that they ask for are recorded. So the result is
what a step will really issue, and not a separate formula. :func:`ltx.profile.explain` shows it for one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ltx import hooks
from ltx.core import comm
from ltx.core.base import tree
from ltx.core.comm.operations import OPERATIONS
from ltx.core.gradients.comm_hook import reduce_at_once, states_of
from ltx.core.gradients.exchange import Exchange
from ltx.core.gradients.planning import Plan, arrival_order, differentiable, make_plan
from ltx.core.gradients.reduction import REQUESTS, LeafState, Reduced
from ltx.core.optim.base import Update, advanced
from ltx.core.ranks.axis import DEFAULT_NAME, Axis, open_alone
from ltx.core.ranks.batched import ShapeRanks
from ltx.core.transforms.strategy import Strategy, in_dtype
from ltx.core.transforms.strategy_update import PostUpdateHook, States, StepInfo, Updated, check_updated
from ltx.errors import LtxError, StrategyError, UnsupportedError
from ltx.optim import Optimizer, identity
from ltx.typing import Tree


@dataclass(frozen=True)
class Collective:
    """One collective that a bucket will issue."""

    operation: str  # as in :class:`ltx.hooks.CollectiveRequest`
    buffer: str  # dtype and shape of the input, as "float16[99]"
    nbytes: int  # bytes that this rank sends for it, as :func:`ltx.profile.record` will count them
    ranks: int  # the number of ranks that take part


@dataclass(frozen=True)
class BucketExplanation:
    """The messages of one bucket: of gradients, or of the tensors of a strategy's exchange."""

    index: int  # the bucket's place in the order of launches, or in its exchange
    paths: tuple[str, ...]  # the paths of its parameters, in the bucket's order
    elements: int  # the number of elements of its gradients or tensors; `dtype` and `nbytes` are theirs too
    dtype: torch.dtype
    nbytes: int
    hook: hooks.CommHook  # the hook at this step
    collectives: tuple[Collective, ...]  # in the order in which they are issued
    exchange: int | None = None  # the exchange's number among those of the step; None for gradients
    background: bool = False  # whether the exchange goes on while the rank computes

    @property
    def label(self) -> str:
        """The label of the bucket's collectives in the ledger."""
        kind = "bucket" if self.exchange is None else "background" if self.background else "exchange"
        return f"{kind} {self.index}"


@dataclass(frozen=True)
class Started:
    """Gradients are sent, or an `exchange` starts. `summary`: the small sum before them; None in the background."""

    rows: tuple[BucketExplanation, ...] = ()
    summary: Collective | None = None


@dataclass(frozen=True)
class Issues:
    """What a step issues, in order: `begun` before the forward pass, `updated` after the gradients."""

    begun: tuple[Started, ...] = ()
    gradients: Started = Started()
    updated: tuple[Started, ...] = ()

    @property
    def exchanges(self) -> tuple[BucketExplanation, ...]:
        """The rows of all exchanges that start in this step."""
        return tuple(row for event in (*self.begun, *self.updated) for row in event.rows)

    @property
    def summaries(self) -> tuple[Collective, ...]:
        events = (self.gradients, *self.begun, *self.updated)
        return tuple(x.summary for x in events if x.summary is not None)


def collective(operation: str, buffer: torch.Tensor, ranks: Any) -> Collective:
    """The collective `operation` of `buffer`, whose shape is read, among `ranks`, a :class:`ShapeRanks`."""
    size = ranks.size
    return Collective(operation, tree.describe(buffer), comm.bytes_sent(operation, buffer, size), size)


def summary(ranks: Any) -> Collective:
    """The small sum that is sent before gradients, and before exchanges in the foreground."""
    return collective("psum", meta((comm.SUMMARY_BYTES // 8,), torch.float64), ranks)


def meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


# --- run on shapes alone ----------------------------------------------------------------------------------------------


class Counted(Exchange):
    """An exchange on shapes, or a step's gradients; `found` has the requests of each bucket.

    The reduction runs once for all buckets of equal shapes.
    """

    def __init__(self, steps: Steps, what: str, plan: Plan, *args: Any):
        self._steps, self._what = steps, what
        self._alike: dict[Any, tuple[tuple[Collective, ...], Reduced]] = {}
        self.found: list[tuple[Collective, ...]] = []
        super().__init__(plan, *args)

    def at_once(self, place: int, tensors: Sequence[torch.Tensor]) -> Reduced:
        plan, bucket = self._plan, self._plan.buckets[place]
        hook = plan.hook_of(bucket)
        assert isinstance(hook, hooks.CommHook)
        _, given = self._of(bucket, tensors)
        states = [{name: meta(x.shape, x.dtype) for name, x in state.items()} for state in given]
        shapes = tuple((name, x.shape, x.dtype) for state in states for name, x in state.items())
        kind = hook, bucket.leaves, shapes, place == len(plan.buckets) - 1
        if kind not in self._alike:
            there = replace(bucket, leaves=tuple(replace(leaf, device=torch.device("meta")) for leaf in bucket.leaves))
            with self._steps.asking(hook, f"bucket {place}{self._what}") as asked:
                flat = meta((bucket.numel,), hook.wire_dtype(bucket.dtype))
                reduced = reduce_at_once(hook, plan.axis, plan.bucket_input(there, flat, states, list))
            self._alike[kind] = tuple(asked), reduced
        self.found.append(self._alike[kind][0])
        return self._alike[kind][1]

    def rows(
        self, paths: Sequence[str], exchange: int | None = None, background: bool = False
    ) -> tuple[BucketExplanation, ...]:
        """An explanation of each bucket; `paths` are those of all leaves."""
        rows = []
        for bucket, found in zip(self._plan.buckets, self.found, strict=True):
            of = tuple(paths[member] for member in bucket.members), bucket.numel, bucket.dtype
            nbytes, hook = bucket.numel * bucket.dtype.itemsize, self._plan.hook_of(bucket)
            rows.append(BucketExplanation(bucket.index, *of, nbytes, hook, found, exchange, background))
        return tuple(rows)


class Steps:
    """A strategy's training steps on shapes alone, from step `first` on, as `rank` sees them.

    Without an `optimizer`, one that leaves gradients unchanged is used. `reduce_dtype` and `post_update_hook` are the
    train step's. `before_update` runs the train step's own exchanges before the optimizer. `scope`: the
    axes in scope where the steps are taken, whose backends decide on the default size of buckets.
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
        scope: Sequence[Axis] = (),
    ):
        self.strategy = strategy
        streams = (axis.ranks.stream_of(x.device) for axis in scope for x in tree.flatten(params)[0])
        stream = next(filter(None, streams), None)
        self.axis = Axis(DEFAULT_NAME, size, ShapeRanks(rank, size, self._answer, self._exchange, stream=stream))
        self.events: list[Started] = []
        self._exchanges = 0  # the number of exchanges that have started in this step
        self._asked: Callable[[str, torch.Tensor, ShapeRanks], torch.Tensor] | None = None
        given, self._spec = tree.flatten(params)
        self._leaves, self._paths = [meta(leaf.shape, leaf.dtype) for leaf in given], tree.leaf_paths(params)
        self._wanted = differentiable(self._leaves)  # all are counted as if they were differentiated
        self._given, self._order = [given[i] for i in self._wanted], arrival_order(params, self._wanted)
        self._optimizer = identity() if optimizer is None else optimizer
        self._reduce_dtype, self._post_update_hook = reduce_dtype, post_update_hook
        self._before_update, self._step = before_update, first
        self._carried: Updated | None = None  # the values that one step gives to the next
        self._sent: dict[hooks.CommHook, Started] = {}

    def plan(self, hook: hooks.CommHook, states: Sequence[LeafState] = (), step: int = 0) -> Plan:
        """The plan of a step's gradients."""
        names = tuple(tuple(state) for state in states or [{} for _ in self._wanted])
        mine = [self._paths[i] for i in self._wanted]
        return make_plan(
            self.strategy, hook, self.axis, self._given, lambda: self._order, names, step, lambda: mine, "", None
        )

    @cached_property
    def first_states(self) -> States:
        with on_shapes_alone(self.strategy.hook(0) or self.strategy, "the first state"):
            return {
                path: state
                for path, leaf in zip(self._paths, self._leaves, strict=True)
                if leaf.is_floating_point() and (state := self.strategy.init(leaf, path))
            }

    def gradients(self, hook: hooks.CommHook, step: int, entries: States | None = None) -> Started:
        """What a step with `hook` issues for its gradients. `entries`: the communication state; None for the first."""
        hook, entries = hook.at(step), self.first_states if entries is None else entries
        if hook not in self._sent:
            states = [states_of(hook, entries.get(self._paths[i], {})) for i in self._wanted]
            counted = Counted(self, "", self.plan(hook, states, step), [self._leaves[i] for i in self._wanted], states)
            rows = counted.rows([self._paths[i] for i in self._wanted])
            self._sent[hook] = Started(rows, summary((hook.within(self.axis) or self.axis).ranks) if rows else None)
        return self._sent[hook]

    def next(self) -> Issues:
        """Run one step on shapes. Returns what it issues."""
        carried, strategy, info = self._carried or self._first(), self.strategy, StepInfo(self._step, self.axis)
        self._exchanges = 0
        with self._in_step():
            pending = strategy.begin(carried.params, carried.states, info, carried.pending)
        begun, self.events = tuple(self.events), []
        post_update_hook = self._post_update_hook(info.step)
        hook = post_update_hook or in_dtype(strategy.hook_in_training(info.step), self._reduce_dtype)
        gradients = Started() if hook is None else self.gradients(hook, info.step, carried.states)
        if post_update_hook is not None:
            self._carried = replace(carried, pending=pending)
        else:
            grads = tree.map(torch.empty_like, carried.params)
            update = Update(self._optimizer, carried.params, grads, carried.opt_state)
            with self._in_step():
                self._before_update(info)
                got = strategy.update(update, carried.states, info, pending)
            self._carried = check_updated(strategy, got, update, carried.states)
        updated, self.events, self._step = tuple(self.events), [], self._step + 1
        return Issues(begun, gradients, updated)

    def _first(self) -> Updated:
        """The values that the first step starts from."""
        self.strategy.check_axis(self.axis)
        self.strategy.check_optimizer(self._optimizer)
        params = tree.unflatten(self._spec, self._leaves)
        with on_shapes_alone(self.strategy, "the first state of the optimizer"):
            opt_state = self.strategy.init_optimizer(self._optimizer, params, self.axis)
            # a leafwise optimizer counts its updates
            for _ in range(self._step if self._optimizer.offers.leafwise else 0):
                opt_state = advanced(opt_state)
        return Updated(params, opt_state, self.first_states)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """A context for the strategy's part of a step: its collectives find the axis that counts messages."""
        undo = open_alone(self.axis)
        try:
            with on_shapes_alone(self.strategy, f"step {self._step}"):
                yield
        finally:
            undo()

    @contextmanager
    def asking(self, hook: hooks.CommHook, what: str) -> Iterator[list[Collective]]:
        """A context that records the requests of `hook`. `what`: the name of its bucket, for errors."""
        found: list[Collective] = []

        def answer(operation: str, buffer: torch.Tensor, ranks: ShapeRanks) -> torch.Tensor:
            """A meta tensor with the shape and dtype of the collective's result."""
            if not buffer.numel():  # empty buffers aren't sent
                return buffer
            if len(found) == hook.phases_on(self.axis.size):
                raise StrategyError(
                    f"{hook!r} asks for more than {len(found)} collectives in {what}. Say how many it may ask for: "
                    "phases: ClassVar[int] = ..."
                )
            if operation not in REQUESTS:
                *others, last = REQUESTS
                raise StrategyError(
                    f"{hook!r} asks for {operation!r} in {what}. A reduction may ask for {', '.join(others)} and "
                    f"{last}."
                )
            found.append(collective(operation, buffer, ranks))
            return OPERATIONS[operation].new_result(buffer, ranks.size)

        self._asked = answer
        with on_shapes_alone(hook, what):
            yield found
        self._asked = None

    def _answer(
        self, operation: str, buffer: torch.Tensor, arguments: tuple[int, ...], ranks: ShapeRanks
    ) -> torch.Tensor:
        if self._asked is None:
            raise UnsupportedError(
                f"{self.strategy!r} communicates by a collective ({operation} of {tree.describe(buffer)}) that belongs "
                "to no exchange, so that nothing can be said of it ahead. Let it communicate through Strategy.exchange."
            )
        return self._asked(operation, buffer, ranks)

    def _exchange(
        self, plan: Plan, tensors: Sequence[torch.Tensor], states: Any, background: bool, paths: Sequence[str]
    ) -> Exchange:
        counted = Counted(self, " of an exchange", plan, tensors, states, background)
        rows = counted.rows(paths, self._exchanges, background)
        self._exchanges += 1
        self.events.append(Started(rows, None if background else summary(plan.axis.ranks)))
        return counted


@contextmanager
def on_shapes_alone(whose: hooks.CommHook | Strategy, what: str) -> Iterator[None]:
    """A context that turns errors of a hook or a strategy that reads values into UnsupportedError."""
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
