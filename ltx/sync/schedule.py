"""Schedules: how the buckets of one backward pass are reduced.

A schedule is told ``start(bucket, tensors)`` as soon as a bucket's gradients are there, and ``land(...)`` at the
fence, after the last bucket. There are three:

* :class:`WireSchedule`: process groups, eagerly. Starts asynchronously and in bucket order, lands at the fence.
* :class:`GraphSchedule`: process groups, inside a compiled graph. Starts with functional collectives, lands at the
  fence; Inductor may move either.
* :class:`OnceSchedule`: simulated ranks and worlds of one. Does everything at once.

Tensors come as ``[*gradients, *state tensors]`` of the bucket. While they pass through vmap levels they gain leading
dimensions; `dims` lists them, outermost first, True for the simulated axis itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch._C import _functorch

from ltx import wire
from ltx.axis import Axis, GroupBacking, VmapBacking
from ltx.errors import UnsupportedError
from ltx.sync.buckets import Bucket
from ltx.sync.flights import Flights, Landed
from ltx.sync.reduction import (
    Ask,
    ExactSum,
    LeafState,
    Reducer,
    Reduction,
    Share,
    collective_alone,
    pack,
    pack_pure,
    reduce_at_once,
    unpack,
)
from ltx.wire import traced

Dims = tuple[bool, ...]


@dataclass(frozen=True)
class Plan:
    """What one synchronised step does: constant from step to step.

    Attributes:
        axis: the ranks.
        hook: what is done to each bucket.
        buckets: in the order of launches.
        state_names: for each leaf, the names of its communication state's tensors.
        step: the number of synchronised steps before this one.
        clock: what a compiled graph, for which `step` is a constant, adds to it; None elsewhere.
        agreement: what the ranks compared when they met this plan; None where there is nothing to compare.
    """

    axis: Axis
    hook: Reducer
    buckets: tuple[Bucket, ...]
    state_names: tuple[tuple[str, ...], ...]
    step: int = 0
    clock: torch.Tensor | None = None
    agreement: wire.Agreement | None = None

    def states_of(self, bucket: Bucket, flat_states: Sequence[torch.Tensor]) -> list[LeafState]:
        """State tensors of a bucket, by leaf and name."""
        tensors = iter(flat_states)
        return [{name: next(tensors) for name in self.state_names[member]} for member in bucket.members]

    def flatten_states(self, bucket: Bucket, states: Sequence[LeafState]) -> list[torch.Tensor]:
        """Inverse of :meth:`states_of`."""
        return [
            state[name]
            for member, state in zip(bucket.members, states, strict=True)
            for name in self.state_names[member]
        ]

    @cached_property
    def is_state(self) -> tuple[bool, ...]:
        """For each tensor in the order of :meth:`Schedule.land`: is it a state's?"""
        return tuple(
            state
            for bucket in self.buckets
            for state in (
                *(False for _ in bucket.members),
                *(True for member in bucket.members for _ in self.state_names[member]),
            )
        )

    def share(self, bucket: Bucket, flat: torch.Tensor, states: Sequence[LeafState]) -> Share:
        """The hook's view of a bucket."""
        # Simulated ranks have a clock each, all alike.
        step = self.step if self.clock is None else self.step + self.clock.max().long()
        last = bucket.index == len(self.buckets) - 1
        return Share(flat, bucket, self.axis.size, self.axis.rank, states, step, last, self.axis)


class Schedule(ABC):
    """How one backward pass is reduced.

    Attributes:
        threaded: whether :meth:`land` reads the tensors it is given, or knows its results itself.
        compiled: whether it is part of a compiled graph.
        again: whether this backward pass is one through an earlier backward pass. Gradients of gradients are reduced
            exactly, whatever the hook does to gradients: as what it counts as.
    """

    threaded = True
    compiled = False

    def __init__(self, plan: Plan):
        self.plan = plan
        self.again = False

    @property
    def hook(self) -> Reducer:
        """What this pass does to its buckets."""
        return ExactSum(self.plan.hook.counts_as(self.plan.axis.size)) if self.again else self.plan.hook

    @abstractmethod
    def begin(self) -> None:
        """The backward pass begins."""

    @abstractmethod
    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Bucket `index` is ready. Gives tensors of the same shapes, which :meth:`land` is given and may replace."""

    @abstractmethod
    def land(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All buckets were started: the reduced gradients and next states, bucket after bucket."""

    def _check_batchable(self, dims: Dims, states: Sequence[torch.Tensor]) -> None:
        if dims and not (self.hook.elementwise and (self.again or not states)):
            raise UnsupportedError(
                f"{self.hook!r} can't reduce gradients of several samples at once between processes. For per-sample "
                "gradients use ltx.block_backward_sync(step) under vmap, then ltx.sync_gradients on their mean; for "
                "several cotangents call the step once for each."
            )


def make_schedule(plan: Plan, compiled: bool) -> Schedule:
    """The schedule for `plan`'s axis."""
    if isinstance(plan.axis.backing, GroupBacking):
        return GraphSchedule(plan) if compiled else WireSchedule(plan)
    return OnceSchedule(plan)


class WireSchedule(Schedule):
    """Asynchronous reductions on the bucket channels of an axis, launched in bucket order (:class:`Flights`).

    With `deferred` the fence doesn't wait: a train step lands the buckets itself, one by one. With `ahead` the next
    forward pass is to go on while they land: see :func:`launch_order`.

    Where the hook stays within a part of the axis, so does the header: other ranks needn't be in this pass.
    """

    threaded = False

    def __init__(self, plan: Plan, deferred: bool = False, ahead: bool = False):
        super().__init__(plan)
        assert isinstance(plan.axis.backing, GroupBacking)
        self.deferred = deferred
        self.line: wire.Line = plan.axis.backing.line
        ahead = ahead and self.moves_by_itself
        self._order = launch_order(plan.buckets) if ahead else range(len(plan.buckets))
        self.header: wire.HeaderTicket | None = None
        #: By leaf: the hook's states at this pass, where they weren't there yet when the marker was made.
        self.states: Sequence[LeafState] | None = None
        self._passage: wire.BackwardPass | None = None
        part = plan.hook.within(plan.axis)
        self._part = None if part is None or not isinstance(part.backing, GroupBacking) else part.backing.line
        self._flights = Flights(self.line)
        self._batches: list[torch.Size] = []
        self._packed: dict[int, tuple[torch.Tensor, Sequence[LeafState]]] = {}

    @property
    def among(self) -> wire.Line:
        """The line of the ranks that are in this pass together."""
        return self.line if self._part is None or self.again else self._part

    def send_header(self, total: torch.Tensor, weight: torch.Tensor) -> wire.HeaderTicket:
        """Issue the header ahead of the buckets."""
        self.line.land_earlier()
        self.among.passes.rejoin()
        channel = self.among.bucket_channel(0)
        if self.plan.agreement is not None:
            channel.advance(self.plan.agreement)
        digest = self.line.user.digest ^ (channel.digest << 1)
        self.header = wire.send_header(channel, total.to(self.line.device), weight.to(self.line.device), digest)
        return self.header

    def begin(self) -> None:
        self._reset()
        if self.header is None:
            # A deferred pass, whose header is out already, is its train step's to watch.
            self._passage = self.among.passes.enter()
            if self.hook.phases_on(self.plan.axis.size) > 1:
                self._passage.flush = self._flights.flush
            nothing = torch.zeros((), dtype=torch.float64, device=self.line.device)
            self.send_header(nothing, nothing)

    def abandon(self, reason: BaseException) -> None:
        """Say that this pass won't go on, if it has begun."""
        if self.header is not None:
            self.among.passes.leave(f"{type(reason).__name__}: {reason}")

    def _reset(self) -> None:
        self._flights, self._batches, self._packed = Flights(self.line), [], {}

    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with self._watched():
            self._launch(index, dims, tensors)
            self._flights.poll()
        return tuple(tensors)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """What is raised in a hook, or by the wire, ends this pass: let the peers know."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, UnsupportedError) and not len(self._flights):
                self._forget()  # the program's mistake, which all ranks see before the first bucket
            else:
                self.abandon(error)
            raise

    def _launch(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> None:
        bucket, hook = self.plan.buckets[index], self.hook
        count = len(bucket.members)
        grads = tensors[:count]
        self._check_batchable(dims, tensors[count:])
        states = self.plan.states_of(bucket, tensors[count:])
        if self.states is not None:
            states = [self.states[member] for member in bucket.members]
        flat = pack(grads, bucket, hook, self.plan.axis.size, states, grads[0].shape[: len(dims)])
        self._packed[index] = (flat, states)
        if self._passage is not None and hook.phases_on(self.plan.axis.size) > 1:
            self.among.passes.flush_others(self._passage)
        # Strictly in the order of launches: one that is ready early waits for those before it.
        while len(self._flights) < len(self._order) and self._order[len(self._flights)] in self._packed:
            place = self._order[len(self._flights)]
            ready, its_states = self._packed.pop(place)
            self._batches.append(ready.shape[:-1])
            self._flights.launch(hook, self.plan.share(self.plan.buckets[place], ready.view(-1), its_states))

    def land_each(self) -> Iterator[tuple[Bucket, list[torch.Tensor], list[torch.Tensor]]]:
        """The buckets in order, each as soon as it has landed: (bucket, reduced gradients, next states)."""
        for place, batch, (flat, states) in zip(self._order, self._batches, self._flights.land_each(), strict=False):
            bucket = self.plan.buckets[place]
            grads = unpack(flat.view(*batch, bucket.numel), bucket)
            yield bucket, grads, self.plan.flatten_states(bucket, states)

    def land_bucket(self, index: int) -> tuple[list[torch.Tensor], list[LeafState]]:
        """(reduced gradients, next states) of one bucket, each by leaf, once it has landed."""
        bucket, place = self.plan.buckets[index], self._order.index(index)
        flat, states = self._flights.land(place)
        self._flights.poll()
        grads = unpack(flat.view(*self._batches[place], bucket.numel), bucket)
        names = [self.plan.state_names[member] for member in bucket.members]
        if not any(names):
            return grads, [{} for _ in names]
        return grads, [{name: state[name] for name in held} for held, state in zip(names, states, strict=True)]

    @property
    def several_phases(self) -> bool:
        """Whether a bucket may issue more than one collective."""
        return self.hook.phases_on(self.plan.axis.size) > 1

    @property
    def moves_by_itself(self) -> bool:
        """Whether buckets travel while no rank waits for them.

        They don't through shared memory; nor with a hook that asks the wire for nothing, which runs when it is landed.
        """
        by_hand = self.line.bucket_channel(0).lane is not None and self.plan.buckets[0].device.type == "cpu"
        return not by_hand and self.hook.phases_on(self.plan.axis.size) > 0

    @property
    def intact(self) -> bool:
        """Whether what has been launched can still be landed, after an exception in the middle of that."""
        return self._flights.intact

    def poll(self) -> None:
        """Let later phases of the buckets go on, where they can without waiting."""
        self._flights.poll()

    def flush(self) -> None:
        """Wait until all that was launched has landed, for whoever asks for it then."""
        self._flights.flush()

    def finish(self) -> wire.Header | None:
        """After the last bucket: the header, checked; and forget this pass, so that another may follow."""
        header = self.header
        self._forget()
        self.among.passes.complete()
        return header.wait() if header is not None else None

    def _forget(self) -> None:
        self.header = None
        if self._passage is not None:
            self._passage.done()
        self._reset()

    def drain(self) -> None:
        """Land everything, for nobody."""
        for _ in self.land_each():
            pass
        self.finish()

    def land(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if self.deferred:
            return tuple(tensors)  # in flight: whoever asked for that calls land_each and finish
        with self._watched():
            outs = [t for _, grads, states in self.land_each() for t in (*grads, *states)]
        self.finish()
        return tuple(outs)


#: Of all bytes, those that a link may have sent when the backward pass ends.
_SENT_BACKWARD = 1 / 3


def launch_order(buckets: Sequence[Bucket]) -> Sequence[int]:
    """The order of launches where the next forward pass goes on while buckets land.

    A link that isn't done when the backward pass ends should go on with what the forward pass uses first, whose
    gradients come last. So the first third of the bytes goes out as it comes, and the rest in the order of use.
    """
    total, sent, early = sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets), 0, 0
    while early < len(buckets) and sent < total * _SENT_BACKWARD:
        sent += buckets[early].numel * buckets[early].dtype.itemsize
        early += 1
    return (*range(early), *reversed(range(early, len(buckets))))


class GraphSchedule(Schedule):
    """Functional collectives as nodes of a compiled graph: started at the marker, waited for at the fence."""

    compiled = True

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self._started: dict[int, tuple[Reduction, Bucket, Callable[[], torch.Tensor] | Landed]] = {}

    def begin(self) -> None:
        self._started = {}

    def _go_on(self, reduction: Reduction, result: torch.Tensor | None) -> Callable[[], torch.Tensor] | Landed:
        """Run a reduction up to its next collective, and give what waits for that; or what has become of it."""
        try:
            return self._issue(next(reduction) if result is None else reduction.send(result))
        except StopIteration as end:
            landed: Landed = end.value
            return landed

    def _issue(self, ask: Ask) -> Callable[[], torch.Tensor]:
        """Start a collective; gives what waits for it."""
        axis = ask.axis or self.plan.axis
        buffer, size = ask.buffer, axis.size
        if axis.backing is None:
            return lambda: collective_alone(ask)
        assert isinstance(axis.backing, GroupBacking)
        group = axis.backing.line.bucket_channel(0).group.group_name
        if not buffer.numel():  # nothing to send; every rank has the same shapes
            return lambda: buffer
        given = buffer.flatten(0, 1) if ask.operation == "reduce_scatter" and buffer.ndim > 1 else buffer
        shape = (size, *buffer.shape) if ask.operation == "all_gather" else None
        pending = traced.start(ask.operation, given, size, group, ask.arguments)
        return lambda: traced.wait(pending) if shape is None else traced.wait(pending).reshape(shape)

    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        bucket, hook = self.plan.buckets[index], self.hook
        count = len(bucket.members)
        grads = tensors[:count]
        self._check_batchable(dims, tensors[count:])
        states = self.plan.states_of(bucket, tensors[count:])
        flat = pack_pure(grads, bucket, hook, self.plan.axis.size, states)
        # Samples lie side by side in the buffer: as far as unpacking goes, each leaf is a larger one.
        leaves = tuple(replace(leaf, shape=grad.shape) for leaf, grad in zip(bucket.leaves, grads, strict=True))
        reduction = hook.reduce(self.plan.share(bucket, flat, states))
        self._started[index] = (reduction, replace(bucket, leaves=leaves), self._go_on(reduction, None))
        return tuple(t.view_as(t) for t in tensors)

    def land(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outs: list[torch.Tensor] = []
        for index in range(len(self.plan.buckets)):
            reduction, bucket, landed = self._started.pop(index)
            while callable(landed):
                landed = self._go_on(reduction, landed())
            flat, states = landed
            outs.extend(unpack(flat, bucket))
            outs.extend(self.plan.flatten_states(self.plan.buckets[index], states))
        return tuple(outs)


class OnceSchedule(Schedule):
    """Reductions on simulated ranks and in a world of one, each done whole when its bucket is ready."""

    def begin(self) -> None:
        pass

    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        plan, bucket, hook = self.plan, self.plan.buckets[index], self.hook
        count = len(bucket.members)

        def one_rank(axis: Axis, *mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
            states = plan.states_of(bucket, mine[count:])
            flat = pack_pure(mine[:count], bucket, hook, axis.size, states)
            share = replace(plan, axis=axis).share(bucket, flat, states)
            flat, following = reduce_at_once(hook, axis, share)
            return (*unpack(flat, bucket), *plan.flatten_states(bucket, following))

        return _under_vmaps(one_rank, dims, plan.axis, tensors)

    def land(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)


def _under_vmaps(
    body: Callable[..., tuple[torch.Tensor, ...]], dims: Dims, axis: Axis, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run `body` for every entry of the leading dimensions that `dims` lists; the axis' own becomes its level."""
    if not dims:
        return body(axis, *tensors)

    def inner(*entries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = replace(axis, backing=VmapBacking(_functorch.current_level())) if dims[0] else axis
        return _under_vmaps(body, dims[1:], here, entries)

    # Contiguous: what all ranks share comes back expanded, which forward mode can't attach tangents to.
    results: tuple[torch.Tensor, ...] = torch.vmap(inner, randomness="different")(*tensors)
    return tuple(result.contiguous() for result in results)
