"""Reducing gradients that are at hand, in the same way as the marker's backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltx.collectives.linear import Function
from ltx.gradients.peeled import (
    Peeled,
    _counted,
    _index,
    _views,
    _zeros_later,
)
from ltx.gradients.schedule import Dims, Schedule


class Begin(Function):
    """``Begin.apply(schedule)``: begins a backward pass.

    It is a Function so that it runs below every transform: what is made under a transform is wrapped in its levels.
    """

    @staticmethod
    def forward(schedule: Schedule) -> torch.Tensor:
        schedule.begin()
        return torch.zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], schedule: Schedule) -> tuple[Any, Any]:
        return Begin.apply(schedule), None  # torch wants to see a rule; without tensors it never calls it


class Launch(Peeled):
    """``Launch.apply(schedule, bucket, dims, index, link, *gradients, *states)``: start a bucket's reduction."""

    @staticmethod
    def forward(
        schedule: Schedule, bucket: int, dims: Dims, index: Any, link: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[Any, ...]:
        started = schedule.start(bucket, dims, tensors)
        return started if schedule.threaded else _views(started)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count = len(inputs[0].plan.buckets[inputs[1]].members)
        ctx.mark_non_differentiable(*output[ctx.count :])
        ctx.zeros = [_zeros_later(t) for t in output[: ctx.count]]
        ctx.states = len(output) - ctx.count

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, None, None, None, *cotangents[: ctx.count], *(None,) * ctx.states)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        given = tangents[5 : 5 + ctx.count]
        return (*(z() if t is None else t for t, z in zip(given, ctx.zeros, strict=True)), *(None,) * ctx.states)


class Land(Peeled):
    """``Land.apply(schedule, None, dims, index, *started)``: waits for all reduced gradients and next states."""

    @staticmethod
    def forward(schedule: Schedule, bucket: None, dims: Dims, index: Any, *started: torch.Tensor) -> tuple[Any, ...]:
        return schedule.wait(started)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.schedule, _, ctx.dims, *_ = inputs
        ctx.zeros = [_zeros_later(t) for t in output]
        ctx.mark_non_differentiable(*(t for t, state in zip(output, ctx.schedule.plan.is_state, strict=True) if state))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        # This pass goes on to the markers, which from here on reduce gradients of gradients.
        ctx.schedule.again = True
        return (None, None, None, None, *_counted(ctx.schedule, ctx.dims, cotangents))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        filled = [z() if t is None else t for t, z in zip(tangents[4:], ctx.zeros, strict=True)]
        return tuple(_counted(ctx.schedule, ctx.dims, filled))


def reduce_gradients(
    schedule: Schedule, grads: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Reduce gradients: (reduced, next states). Differentiable, as the marker's backward pass is."""
    plan, index = schedule.plan, _index(schedule.plan.axis)
    Begin.apply(schedule)
    link = torch.zeros(())
    started: list[torch.Tensor] = []
    for bucket in plan.buckets:
        tensors = [*(grads[m] for m in bucket.members), *(t for m in bucket.members for t in states[m])]
        started.extend(Launch.apply(schedule, bucket.index, (), index, link, *tensors))
    results = iter(Land.apply(schedule, None, (), index, *started))
    reduced: dict[int, torch.Tensor] = {}
    advanced: dict[int, list[torch.Tensor]] = {}
    for bucket in plan.buckets:
        reduced.update((m, next(results)) for m in bucket.members)
        advanced.update((m, [next(results) for _ in states[m]]) for m in bucket.members)
    return [reduced[m] for m in range(len(grads))], [advanced[m] for m in range(len(grads))]
