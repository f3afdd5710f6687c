"""The marker: identities around a step whose transpose is the reduction of its gradients.

    params -> Fence -> Mark (one a bucket) -> step -> Tie -> output

In the order of the backward pass:

* **Tie** runs first. It takes a token from every marker, so that each marker takes part in the backward pass even if
  the loss on this rank doesn't reach its parameters; otherwise the peers would wait for this rank forever.
* **Mark** has all parameters of one bucket as inputs, so the engine runs it exactly when all their gradients are there:
  it starts the bucket's reduction. Its node was made before the step's, which would put it last in the engine's queue;
  a raised sequence number puts it first.
* **Fence** has all parameters as inputs, so it runs after every marker. It is the one safe place to wait: nothing
  downstream sees a pending gradient. A train step has no fence: nothing is downstream, and it waits itself.

Where torch can't raise the marker's priority (before 2.13), hooks of leaves start the buckets: :class:`LeafHooks`.

All of it is differentiable again, in both modes. :class:`~ltx.core.gradients.functions.Launch` counts as the identity
and
:class:`~ltx.core.gradients.functions.Wait` as the exact mean over ranks, so second derivatives are exact whatever the
hook does to first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from ltx.core.base.errors import UnsupportedError
from ltx.core.collectives.linear import Function
from ltx.core.gradients.buckets import Bucket
from ltx.core.gradients.functions import (
    MARKER_PRIORITY,
    Begin,
    Launch,
    Peeled,
    Shared,
    Wait,
    _index,
    _peel,
    _plain,
    _reverse_only,
    _views,
    _zeros_later,
    raise_priority,
)
from ltx.core.gradients.schedule import Dims, Schedule


class Fence(Peeled):
    """``Fence.apply(schedule, None, dims, index, *tensors)``: identity; its backward pass waits for every bucket."""

    @staticmethod
    def forward(schedule: Schedule, bucket: None, dims: Dims, index: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
        return _views(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.schedule, _, ctx.dims, *_ = inputs
        # Gradients that are pending can't be materialised; tangents are, below.
        ctx.set_materialize_grads(False)
        ctx.zeros = [] if _reverse_only(ctx.schedule) else [_zeros_later(t) for t in output]

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
        return _views([zero() if t is None else t for t, zero in zip(tangents[4:], ctx.zeros, strict=True)])


class Mark(Peeled):
    """``Mark.apply(schedule, bucket, dims, index, *parameters, *states) -> (*parameters, token)``: starts the bucket.

    Identity on the parameters. The cotangent of a state is its next value.
    """

    @staticmethod
    def forward(schedule: Schedule, bucket: int, dims: Dims, index: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
        params = tensors[: len(schedule.plan.buckets[bucket].members)]
        return (*_views(params), params[0].new_zeros(params[0].shape[: len(dims)]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.schedule, ctx.bucket, ctx.dims, _, *tensors = inputs
        states = tensors[len(output) - 1 :]
        ctx.save_for_backward(*states)
        ctx.save_for_forward(*states, output[-1])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        *grads, link = cotangents
        tensors = [*grads, *ctx.saved_tensors]
        if _plain():
            started = ctx.schedule.start(ctx.bucket, ctx.dims, tensors)
            # A process schedule knows its results itself: these tensors are only memory, so let go of them.
            return (None, None, None, None, *(started if ctx.schedule.threaded else (None,) * len(tensors)))
        index = _index(ctx.schedule.plan.axis, ctx.dims)
        return (None, None, None, None, *Launch.apply(ctx.schedule, ctx.bucket, ctx.dims, index, link, *tensors))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
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
        ctx.save_for_backward(*tensors[: ctx.tokens], *tensors[ctx.tokens + ctx.kept : ctx.tokens + 2 * ctx.kept])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        Begin.apply(ctx.schedule)
        # Zero in value, but batched and differentiable wherever the cotangents and parameters are, so that the markers
        # take part at every level of every transform.
        link = torch.zeros_like(cotangents[0].sum())
        tokens, successors = ctx.saved_tensors[: ctx.tokens], ctx.saved_tensors[ctx.tokens :]
        links = (token * link.to(token.dtype) for token in tokens)
        return (None, None, None, *links, *successors, *(None,) * ctx.kept, *cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        return _views(tangents[3 + ctx.tokens + 2 * ctx.kept :])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], schedule: Schedule, tokens: int, kept: int, *tensors: torch.Tensor
    ) -> tuple[Any, Any]:
        # A kept tensor and its successor must be batched alike, or the cotangent wouldn't fit.
        ends = (tokens, tokens + kept, tokens + 2 * kept)
        dims = list(in_dims[3:])
        lists = [list(tensors[i:j]) for i, j in zip((0, *ends), (*ends, len(tensors)), strict=True)]
        for k in range(kept):
            if (dims[ends[0] + k] is None) != (dims[ends[1] + k] is None):
                _, (lists[1][k], lists[2][k]) = _peel(
                    schedule.plan.axis,
                    info.batch_size,
                    (lists[1][k], lists[2][k]),
                    (dims[ends[0] + k], dims[ends[1] + k]),
                )
        return Tie.apply(schedule, tokens, kept, *(t for ts in lists for t in ts)), in_dims[3 + ends[2] :]


def mark(
    schedule: Schedule,
    params: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
    source: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Put the marker on `params` (with each one's state tensors): (marked parameters, tokens).

    `source`: a dummy input that makes autograd build the nodes where no parameter requires gradients, for a schedule
    without a fence. Its own gradient is never used.
    """
    plan = schedule.plan
    per_bucket = [plan.tensors_of(bucket, params, states) for bucket in plan.buckets]
    index = _index(plan.axis) if source is None else source
    if schedule.fenced:
        # The fence's inputs lie in the order in which `wait` gives its results.
        fenced = iter(Fence.apply(schedule, None, (), index, *(t for tensors in per_bucket for t in tensors)))
        per_bucket = [list(islice(fenced, len(tensors))) for tensors in per_bucket]
    marked: list[Any] = [None] * len(params)
    tokens: list[torch.Tensor] = []
    for bucket, tensors in zip(plan.buckets, per_bucket, strict=True):
        *outs, token = Mark.apply(schedule, bucket.index, (), index, *tensors)
        raise_priority(token, MARKER_PRIORITY)
        for member, out in zip(bucket.members, outs, strict=True):
            marked[member] = out
        tokens.append(token)
    return marked, tokens


def tie(
    schedule: Schedule,
    tokens: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    kept: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> list[torch.Tensor]:
    """Tie `outputs` to every marker. Each kept pair is a tensor and the cotangent that it gets."""
    before, after = [x for x, _ in kept], [y for _, y in kept]
    return list(Tie.apply(schedule, len(tokens), len(kept), *tokens, *before, *after, *outputs))


class LeafHooks:
    """Leaves for the parameters of a schedule's plan, whose hooks start its buckets; `states`: each one's tensors."""

    def __init__(self, schedule: Schedule, params: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]]):
        self._schedule, self._states, self._begun = schedule, states, False
        self._missing = {bucket.index: len(bucket.members) for bucket in schedule.plan.buckets}
        self.leaves = [param.detach().requires_grad_() for param in params]
        for bucket in schedule.plan.buckets:
            for member in bucket.members:
                self.leaves[member].register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))

    def _arrived(self, bucket: Bucket) -> None:
        if not self._missing[bucket.index]:
            raise UnsupportedError(
                "a gradient came twice in one backward pass: a part of the step was differentiated inside of it. Use "
                "torch.utils.checkpoint with use_reentrant=False, or torch 2.13."
            )
        self._missing[bucket.index] -= 1
        if not self._missing[bucket.index]:
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        leaves = [self.leaves[member] for member in bucket.members]
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        if not self._begun:
            self._begun = True
            self._schedule.begin()
        with torch.no_grad():
            self._schedule.start(bucket.index, (), [*grads, *(t for m in bucket.members for t in self._states[m])])

    def finish(self) -> None:
        """The backward pass is over: start what it hasn't reached."""
        for bucket in self._schedule.plan.buckets:
            if self._missing[bucket.index]:
                self._missing[bucket.index] = 0
                self._start(bucket)
