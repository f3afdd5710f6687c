"""Bucket programs: what a step does to one bucket, as a generator of collective requests.

A program yields a :class:`CollectiveRequest` wherever it needs the network and is sent the result; it returns the
bucket's results. The reduction of a communication hook is one; a training step whose ranks communicate after the
optimizer has programs with the optimizer inside. The same program runs on every kind of axis, since drivers differ only
in how they answer requests: asynchronously between processes (:mod:`ltx.gradients.pending`), as nodes of a compiled
graph (:mod:`ltx.gradients.graph_schedule`), or at once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ltx.axis import Axis
from ltx.collectives.linear import Static, apply
from ltx.gradients.buckets import Bucket
from ltx.gradients.reduction import BucketInput, CollectiveRequest, LeafState, Reduced, Reducer, Reduction


class Program(NamedTuple):
    """The program of a bucket.

    Attributes:
        requests: the generator.
        reads: the tensors that it reads; they are kept until it is complete.
    """

    requests: Reduction
    reads: Sequence[torch.Tensor]


#: ``(bucket, gradients, states)`` -> the program of that bucket, which has packed the gradients.
ProgramOf = Callable[[Bucket, Sequence[torch.Tensor], Sequence[LeafState]], Program]


def program_of(hook: Reducer, inputs: BucketInput) -> Program:
    """The reduction of one bucket by `hook`."""
    return Program(hook.reduce(inputs), [inputs.flat, *(x for state in inputs.states for x in state.values())])


def advance(program: Generator[CollectiveRequest, torch.Tensor, Any], result: torch.Tensor | None = None) -> Any:
    """Run `program` up to its next request; return that, or what the program returns at its end.

    `result`: the answer to its last request; None at the beginning.
    """
    try:
        return next(program) if result is None else program.send(result)
    except StopIteration as end:
        return end.value


def drive(program: Reduction, answer: Callable[[CollectiveRequest], torch.Tensor]) -> Reduced:
    """Run `program` to its end, each request answered at once."""
    request = advance(program)
    while isinstance(request, CollectiveRequest):
        request = advance(program, answer(request))
    reduced: Reduced = request
    return reduced


def drive_within(
    program: Generator[CollectiveRequest, torch.Tensor, Any],
    answer: Callable[[CollectiveRequest], Generator[CollectiveRequest, torch.Tensor, torch.Tensor]],
) -> Generator[CollectiveRequest, torch.Tensor, Any]:
    """Run `program` inside another one: `answer` is a part of a program too, which may send requests on."""
    request = advance(program)
    while isinstance(request, CollectiveRequest):
        request = advance(program, (yield from answer(request)))
    return request


def reduce_at_once(hook: Reducer, axis: Axis, inputs: BucketInput) -> Reduced:
    """Drive one reduction to its end with differentiable collectives: the readable reference for the schedules."""
    return drive(hook.reduce(inputs), lambda request: _collective(request, axis))


def _collective(request: CollectiveRequest, axis: Axis) -> torch.Tensor:
    axis = request.axis or axis
    if axis.meta:
        return axis.meta.answer(request.operation, request.buffer, request.arguments, axis.size)
    static = request.arguments if request.operation == "ppermute" else _STATIC[request.operation]
    return apply(request.operation, static, axis, [request.buffer])[0]


def collective_alone(request: CollectiveRequest) -> torch.Tensor:
    """What a collective among one rank gives."""
    return _collective(replace(request, axis=Axis("alone", 1)), Axis("alone", 1))


_STATIC: dict[str, Static] = {"psum": (), "all_gather": (0, 0), "psum_scatter": (0, 0), "all_to_all": (0, 0)}
