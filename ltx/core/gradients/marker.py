"""The marker: identities around a step whose transpose is the reduction of its gradients.

    params -> Fence -> Marker (one a bucket) -> step -> Tie -> output

In the order of the backward pass:

* **Tie** runs first. It takes a token from every marker, so that the pass comes to each marker even if this rank's loss
  doesn't reach its parameters; otherwise the peers would wait for this rank forever.
* **Marker** has all parameters of one bucket as inputs, so the engine runs it when all their gradients are there: it
  starts the bucket's reduction. A raised sequence number makes it run at once: it is older than the step's nodes.
* **Fence** has all parameters as inputs, so it runs after every marker. It is the one safe place to wait: nothing after
  it sees a pending gradient.

A train step has no tie and no fence: it starts the buckets that its pass hasn't reached, and waits, itself. Where one
sum reduces all gradients, and before torch 2.13, it has :class:`Leaves` in place of markers.

All is differentiable again, in reverse and forward mode. :class:`Launch` counts as the identity and :class:`Wait` as
the exact mean over ranks, so second derivatives are exact even where the hook compresses first ones. A backward pass
reduces exactly too (:attr:`Schedule.again`) if it comes through :class:`Wait`, or if a level of transforms inside of
its own has differentiated the step. The functions take vmap levels off one by one, and know which levels are ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, islice
from typing import Any

import torch
from torch.autograd import forward_ad

from ltx.core.base import private
from ltx.core.base.errors import UnsupportedError
from ltx.core.base.private import Tensors
from ltx.core.collectives.linear import Function, apply, index_below
from ltx.core.gradients.comm_hook import counts_as
from ltx.core.gradients.one_sum import taken
from ltx.core.gradients.pending import ProcessSchedule
from ltx.core.gradients.reduction import Bucket
from ltx.core.gradients.schedule import Dims, Schedule
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.batched import in_front

# Above every node of a forward pass, below the engine's own (AccumulateGrad has the maximum of 64 bits).
MARKER_PRIORITY = 1 << 62
ACCUMULATE_PRIORITY = MARKER_PRIORITY + 1

with torch.inference_mode(False):
    #: A dummy input of markers, which makes autograd build the nodes where no parameter requires gradients, if a
    #: schedule has no fence. The passes are differentiated with respect to it, and give it no gradient.
    SOURCE = torch.zeros((), requires_grad=True, device="cpu")


@cache
def can_raise_priority() -> bool:
    """Whether torch has ``_set_sequence_nr`` (from 2.13 on). Without it only :class:`Leaves` overlap the pass."""
    with torch.enable_grad():
        return hasattr(torch.zeros((), requires_grad=True, device="cpu").view(()).grad_fn, "_set_sequence_nr")


def raise_priority(output: torch.Tensor, priority: int) -> None:
    """Have the engine run the node that made `output` early, at every functorch level, if torch can."""
    while True:
        if (set_sequence_nr := getattr(output.grad_fn, "_set_sequence_nr", None)) is not None:
            set_sequence_nr(priority)
        if not private.is_wrapped(output):
            return
        output = private.unwrapped_once(output)


def _views(tensors: Tensors) -> tuple[Any, ...]:  # plain autograd makes views itself
    return tuple([t.view_as(t) for t in tensors] if private.in_transform() else tensors)


def _index(axis: Axis, dims: Dims = ()) -> torch.Tensor | None:
    """A dummy input, so that functorch calls a Function's vmap rule at each remaining level of a simulated axis."""
    left = _left(axis, dims)
    return None if left is None else left.batch_index


def _left(axis: Axis, dims: Dims) -> Axis | None:
    """`axis` without the levels that `dims` marks as taken off; None if no level is left."""
    levels, taken = axis.ranks.levels, sum(dims)
    if taken and taken == len(levels.numbers):
        return None
    return axis.at(replace(levels, taken=taken))


class Peeled(Function):
    """A Function of ``(schedule, bucket or None for all, dims, index, *tensors)``; `dims`: vmap levels taken off."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.schedule, ctx.bucket, ctx.dims, *_ = inputs

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, schedule: Schedule, bucket: Any, dims: Dims, index: Any, *xs: Any) -> Any:
        axis, level = schedule.plan.axis, (private.maybe_current_level() or 0) + 1
        stacked, here = in_front(info.batch_size, xs, in_dims[4:]), level in axis.ranks.levels.numbers
        dims = (here, *dims)
        if here:
            index = None if _left(axis, dims) is None else index_below(index, in_dims[3])
        outs = cls.apply(schedule, bucket, dims, index, *stacked)
        return outs, (0,) * len(outs)


def _zeros_later(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    return partial(torch.zeros, like.shape, dtype=like.dtype, device=like.device)


def _filled(tangents: Sequence[torch.Tensor | None], zeros: Sequence[Callable[[], Any]]) -> list[torch.Tensor]:
    return [zero() if t is None else t for t, zero in zip(tangents, zeros, strict=True)]


def _counted(schedule: Schedule, dims: Dims, tensors: Tensors) -> list[torch.Tensor]:
    """The sum over ranks times what the hook's result counts as, most often the mean; differentiable."""
    axis = schedule.plan.axis
    factor = counts_as(schedule.plan.hook, axis.size)
    at, left = [i for i, here in enumerate(dims) if here], _left(axis, dims)
    if left is None:
        return [(t.sum(at, keepdim=True) * factor).expand_as(t).contiguous() for t in tensors]
    front = list(range(len(at)))  # collectives expect these dimensions in front
    totals = apply("psum", (), left, [t.movedim(at, front) for t in tensors], schedule.compiled)
    return [t.movedim(front, at) * factor for t in totals]


def _plain() -> bool:
    """Whether the backward pass itself is neither differentiated nor batched."""
    if torch.is_grad_enabled() or private.in_transform() or private.is_dispatched(private.AUTOGRAD_VMAP):
        return False
    return not private.has_tangents()  # which gradients may have


def _note_level(ctx: Any, tangents: bool = False) -> None:
    """Note that the level of transforms where `ctx` is made (0: plain autograd) differentiates the call, unless no
    input has a derivative. Plain tangents count as inside of backward passes.
    """
    ctx.level = private.maybe_current_level() or 0
    if tangents or any(ctx.needs_input_grad):
        schedule, inside = ctx.schedule, 0.5 if tangents and not ctx.level else ctx.level
        schedule.innermost = max(schedule.innermost, inside)


def _begin(schedule: Schedule) -> None:
    """Begin a backward pass below every transform: tensors made under one would be wrapped in its levels."""
    with private.below_transforms(), torch.no_grad():
        schedule.enter()


class Launch(Peeled):
    """``Launch.apply(schedule, bucket, dims, index, link, *gradients, *states)``: start a bucket's reduction."""

    @staticmethod
    def forward(schedule: Schedule, bucket: int, dims: Dims, index: Any, link: Any, *tensors: torch.Tensor) -> Any:
        started = schedule.start(bucket, dims, tensors)
        return started if schedule.threaded else _views(started)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count = len(inputs[0].plan.buckets[inputs[1]].members)
        ctx.mark_non_differentiable(*output[ctx.count :])
        ctx.zeros = [_zeros_later(t) for t in output[: ctx.count]]
        ctx.states, ctx.link = len(output) - ctx.count, _zeros_later(inputs[4])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        # Through the link every marker waits for this pass' Wait, which says how all buckets are reduced.
        return (None, None, None, None, ctx.link(), *cotangents[: ctx.count], *(None,) * ctx.states)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        return (*_filled(tangents[5 : 5 + ctx.count], ctx.zeros), *(None,) * ctx.states)


class Wait(Peeled):
    """``Wait.apply(schedule, None, dims, index, *started)``: waits for all reduced gradients and next states."""

    @staticmethod
    def forward(schedule: Schedule, bucket: None, dims: Dims, index: Any, *started: torch.Tensor) -> tuple[Any, ...]:
        return schedule.wait(started)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        Peeled.setup_context(ctx, inputs, output)
        ctx.zeros = [_zeros_later(t) for t in output]
        ctx.mark_non_differentiable(*(t for t, state in zip(output, ctx.schedule.plan.is_state, strict=True) if state))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        ctx.schedule.again = True  # this pass goes on to the markers
        return (None, None, None, None, *Wait._derivatives(ctx, cotangents))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        return tuple(Wait._derivatives(ctx, _filled(tangents[4:], ctx.zeros)))

    @staticmethod
    def _derivatives(ctx: Any, tensors: Tensors) -> list[torch.Tensor | None]:
        is_state = ctx.schedule.plan.is_state  # states have no derivative
        grads = [t for t, state in zip(tensors, is_state, strict=True) if not state]
        means = iter(_counted(ctx.schedule, ctx.dims, grads))
        return [None if state else next(means) for state in is_state]


class Shared(Peeled):
    """The identity, for tangents of parameters that all ranks share; its transpose is the exact mean over ranks."""

    @staticmethod
    def forward(schedule: Schedule, bucket: None, dims: Dims, index: Any, *tangents: torch.Tensor) -> tuple[Any, ...]:
        return _views(tangents)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, None, None, *_counted(ctx.schedule, ctx.dims, cotangents))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> tuple[Any, ...]:
        index = _index(ctx.schedule.plan.axis, ctx.dims)
        shared: tuple[Any, ...] = Shared.apply(ctx.schedule, None, ctx.dims, index, *tangents[4:])
        return shared


class Fence(Peeled):
    """``Fence.apply(schedule, None, dims, index, *tensors)``: identity; its backward pass waits for every bucket."""

    @staticmethod
    def forward(schedule: Schedule, bucket: None, dims: Dims, index: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
        return _views(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        Peeled.setup_context(ctx, inputs, output)
        # Pending gradients can't be materialised. Tangents are materialised below, if there may be any.
        ctx.set_materialize_grads(False)
        forward_mode = ctx.schedule.threaded or private.has_tangents() or private.in_transform()
        ctx.zeros = [_zeros_later(t) for t in output] if forward_mode else []

    @staticmethod
    def backward(ctx: Any, *started: torch.Tensor) -> tuple[Any, ...]:
        if _plain():
            reduced = ctx.schedule.wait(started)
        else:
            index = _index(ctx.schedule.plan.axis, ctx.dims)
            reduced = Wait.apply(ctx.schedule, None, ctx.dims, index, *started)
        ctx.schedule.again = False
        return (None, None, None, None, *reduced)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        return _views(_filled(tangents[4:], ctx.zeros))


class Marker(Peeled):
    """``Marker.apply(schedule, bucket, dims, index, *parameters, *states) -> (*parameters, token)``: starts the bucket.
    Identity on the parameters. The cotangent of a state is its next value. Without a fence there is no token.
    """

    @staticmethod
    def forward(schedule: Schedule, bucket: int, dims: Dims, index: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
        params = tensors[: len(schedule.plan.buckets[bucket].members)]
        given = _views(params) if private.in_transform() else params
        return (*given, params[0].new_zeros(params[0].shape[: len(dims)])) if schedule.fenced else given

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.schedule, ctx.bucket, ctx.dims, _, *tensors = inputs
        _note_level(ctx)
        states = tensors[len(output) - ctx.schedule.fenced :]
        if not ctx.schedule.fenced:
            # A backward pass inside of this one may come here too, after which saved tensors are gone.
            ctx.states = states
            ctx.set_materialize_grads(False)
            return
        ctx.save_for_backward(*states)
        ctx.save_for_forward(*states, output[-1])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        ctx.schedule.again |= ctx.level < ctx.schedule.innermost  # as in Tie
        grads, link = (cotangents[:-1], cotangents[-1]) if ctx.schedule.fenced else (cotangents, None)
        tensors = [*grads, *(ctx.saved_tensors if ctx.schedule.fenced else ctx.states)]
        if _plain():
            started = ctx.schedule.start(ctx.bucket, ctx.dims, tensors)
            # A process schedule keeps the results itself, so release the memory of these tensors.
            return (None, None, None, None, *(started if ctx.schedule.threaded else (None,) * len(tensors)))
        index = _index(ctx.schedule.plan.axis, ctx.dims)
        return (None, None, None, None, *Launch.apply(ctx.schedule, ctx.bucket, ctx.dims, index, link, *tensors))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        _note_level(ctx, tangents=True)
        # A token's tangent, though zero, keeps this rank in step with its peers in forward over reverse mode.
        count = len(ctx.schedule.plan.buckets[ctx.bucket].members)
        index = _index(ctx.schedule.plan.axis, ctx.dims)
        shared = Shared.apply(ctx.schedule, None, ctx.dims, index, *tangents[4 : 4 + count])
        return (*shared, torch.zeros_like(ctx.saved_tensors[-1]))


class Tie(Function):
    """``Tie.apply(schedule, tokens, kept, *tokens, *kept, *successors, *outputs) -> outputs``: leads to every marker.
    Identity on the outputs. The cotangent of each kept tensor is its successor.
    """

    @staticmethod
    def forward(schedule: Schedule, tokens: int, kept: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        # A loss may be changed in place (loss /= steps), which torch refuses for views that a Function makes.
        return _views([t.clone() if t.ndim == 0 else t for t in tensors[tokens + 2 * kept :]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.schedule, ctx.tokens, ctx.kept, *tensors = inputs
        _note_level(ctx)
        ctx.save_for_forward(*tensors[: ctx.tokens])
        ctx.save_for_backward(*tensors[: ctx.tokens], *tensors[ctx.tokens + ctx.kept : ctx.tokens + 2 * ctx.kept])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        # A level inside of this pass' own has differentiated the call: this isn't a first derivative.
        ctx.schedule.again |= ctx.level < ctx.schedule.innermost
        tokens, successors = ctx.saved_tensors[: ctx.tokens], ctx.saved_tensors[ctx.tokens :]
        if _plain():
            ctx.schedule.enter()
            links = [torch.zeros_like(token) for token in tokens]
        else:
            _begin(ctx.schedule)
            # Zero in value, but batched and differentiable wherever the cotangents and parameters are, so that the
            # markers take part at every level of every transform.
            link = torch.zeros_like(cotangents[0].sum())
            links = [token * link.to(token.dtype) for token in tokens]
        return (None, None, None, *links, *successors, *(None,) * ctx.kept, *cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        _note_level(ctx, tangents=True)
        # Tied too: a pass over tangents that don't reach all parameters on this rank leads to every marker as well.
        tokens = [forward_ad.unpack_dual(token, level=0).primal for token in ctx.saved_tensors]
        of_outputs = tangents[3 + ctx.tokens + 2 * ctx.kept :]
        tied: tuple[Any, ...] = Tie.apply(ctx.schedule, ctx.tokens, 0, *tokens, *of_outputs)
        return tied

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], schedule: Schedule, tokens: int, kept: int, *tensors: torch.Tensor
    ) -> tuple[Any, Any]:
        # A kept tensor and its successor must be batched alike, or the cotangent wouldn't fit.
        ends = (tokens, tokens + kept, tokens + 2 * kept)
        dims = list(in_dims[3:])
        lists = [list(tensors[i:j]) for i, j in zip((0, *ends), (*ends, len(tensors)), strict=True)]
        for k in range(kept):
            pair, own = (lists[1][k], lists[2][k]), (dims[ends[0] + k], dims[ends[1] + k])
            if (own[0] is None) != (own[1] is None):
                lists[1][k], lists[2][k] = in_front(info.batch_size, pair, own)
        return Tie.apply(schedule, tokens, kept, *(t for ts in lists for t in ts)), in_dims[3 + ends[2] :]


def put_on(
    schedule: Schedule, params: Tensors, states: Sequence[Tensors]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Put markers on `params`, each with its state tensors; returns (marked parameters, tokens)."""
    plan = schedule.plan
    per_bucket = [plan.tensors_of(bucket, params, states) for bucket in plan.buckets]
    index = _index(plan.axis) if schedule.fenced else SOURCE
    if schedule.fenced:
        # The fence takes its inputs in the order in which `wait` returns the results.
        fenced = iter(Fence.apply(schedule, None, (), index, *(t for tensors in per_bucket for t in tensors)))
        per_bucket = [list(islice(fenced, len(tensors))) for tensors in per_bucket]
    marked: dict[int, torch.Tensor] = {}
    tokens: list[torch.Tensor] = []
    for bucket, tensors in zip(plan.buckets, per_bucket, strict=True):
        outs = Marker.apply(schedule, bucket.index, (), index, *tensors)
        raise_priority(outs[0], MARKER_PRIORITY)
        marked.update(zip(bucket.members, outs, strict=False))
        tokens += outs[len(bucket.members) :]
    return [*map(marked.__getitem__, range(len(params)))], tokens


def tie(
    schedule: Schedule, tokens: Tensors, outputs: Tensors, kept: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
) -> list[torch.Tensor]:
    """Tie `outputs` to every marker. Each kept pair is a tensor and the cotangent that it gets."""
    before, after = [x for x, _ in kept], [y for _, y in kept]
    return list(Tie.apply(schedule, len(tokens), len(kept), *tokens, *before, *after, *outputs))


def reduce_gradients(
    schedule: Schedule, grads: Tensors, states: Sequence[Tensors]
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Reduce gradients: (reduced gradients, next states). This is differentiable, as the marker's backward pass is."""
    plan, index = schedule.plan, _index(schedule.plan.axis)
    _begin(schedule)
    link, started = torch.zeros((), device="cpu"), list[torch.Tensor]()
    for bucket in plan.buckets:
        started += Launch.apply(schedule, bucket.index, (), index, link, *plan.tensors_of(bucket, grads, states))
    results = iter(Wait.apply(schedule, None, (), index, *started))
    reduced, advanced = list(grads), [*map(list, states)]
    for bucket in plan.buckets:
        for m in bucket.members:
            reduced[m] = next(results)
        for m in bucket.members:
            advanced[m] = [next(results) for _ in states[m]]
    return reduced, advanced


class Leaves:
    """Leaves for a plan's parameters, whose hooks start its buckets; a single one is ready when the pass is over."""

    def __init__(
        self, schedule: Schedule, params: Tensors, states: Sequence[Tensors], made: list[torch.Tensor] | None = None
    ):
        self._states = states
        self._missing: dict[int, int] = {}
        self.leaves = made or [*map(torch.Tensor.requires_grad_, map(torch.Tensor.detach, params))]
        for bucket in schedule.plan.buckets if len(schedule.plan.buckets) > 1 else ():
            self._missing[bucket.index] = len(bucket.members)
            for member in bucket.members:
                self.leaves[member].register_post_accumulate_grad_hook(partial(self._arrived, bucket, schedule))

    def _arrived(self, bucket: Bucket, schedule: Schedule, _: torch.Tensor) -> None:
        if not self._missing[bucket.index]:
            raise UnsupportedError(
                "a gradient came twice in one backward pass: a part of the step was differentiated inside of it. Use "
                "torch.utils.checkpoint with use_reentrant=False, or torch 2.13."
            )
        self._missing[bucket.index] -= 1
        if not self._missing[bucket.index]:
            with private.no_grad():
                schedule.start(bucket.index, (), self.taken(bucket))

    def taken(self, bucket: Bucket) -> Tensors:
        """The gradients of a bucket that have come, zeros where none has, and the states."""
        grads = taken([*map(self.leaves.__getitem__, bucket.members)])
        return [*grads, *chain.from_iterable(map(self._states.__getitem__, bucket.members))]


def defer(
    schedule: ProcessSchedule, params: Tensors, states: Sequence[Tensors], made: list[torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Have a pass without a fence start the buckets: (what the step gets, what to differentiate with respect to).
    `made`: leaves in place of the parameters that the step has got already.
    """
    plan = schedule.plan
    if plan.one_sum or not can_raise_priority():
        leaves = Leaves(schedule, params, states, made)
        schedule.late = leaves.taken
        return leaves.leaves, leaves.leaves

    def late(bucket: Bucket) -> Tensors:
        tensors, count = plan.tensors_of(bucket, params, states), len(bucket.members)
        return [*map(torch.zeros_like, tensors[:count]), *tensors[count:]]

    marked, _ = put_on(schedule, params, states)
    schedule.late = late
    return marked, [SOURCE]
