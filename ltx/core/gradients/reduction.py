"""Buckets (gradients that are sent together) and their programs: generators that reduce a bucket.

A program, such as a hook's reduction, yields a :class:`CollectiveRequest` wherever it needs the network and is sent the
result; it returns the bucket's results. The same program runs on every kind of axis. Drivers differ in how they answer:
asynchronously between processes (``pending.py``), as nodes of a compiled graph (``schedule.py``), or at once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import GeneratorType
from typing import Any, ClassVar, NamedTuple

import torch

from ltx.core.base.arguments import brief
from ltx.core.base.errors import StrategyError
from ltx.core.collectives.linear import Static, apply
from ltx.core.ranks.axis import Axis

#: Up to this many elements, calling a copy costs more than copying.
_SMALL = 1 << 13


class Leaf(NamedTuple):
    """The properties of a gradient on which a plan depends."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Gradients of one dtype on one device that are reduced as one flat buffer.

    Attributes:
        index: the bucket's place in the order of launches. members: the indices of its leaves among all reduced leaves.
            leaves: the leaves' shapes, in the order of the flat buffer.
    """

    index: int
    members: tuple[int, ...]
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, index: int, tensors: Sequence[torch.Tensor]) -> Bucket:
        return cls(index, tuple(range(len(tensors))), tuple(Leaf(t.shape, t.dtype, t.device) for t in tensors))

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.leaves[0].dtype

    @cached_property
    def device(self) -> torch.device:
        return self.leaves[0].device

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each leaf."""
        return [leaf.numel for leaf in self.leaves]

    @cached_property
    def folded(self) -> list[int]:
        """The indices of the leaves that aren't 1-D."""
        return [place for place, leaf in enumerate(self.leaves) if len(leaf.shape) != 1]

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(first leaf, end) of runs of leaves that are copied together: several small ones, or one large one."""
        runs: list[tuple[int, int]] = []
        for place, size in enumerate(self.sizes):
            if size <= _SMALL and runs and self.sizes[runs[-1][0]] <= _SMALL:
                runs[-1] = (runs[-1][0], place + 1)
            else:
                runs.append((place, place + 1))
        return runs


#: One parameter's communication state: tensors by name.
LeafState = dict[str, torch.Tensor]

#: The terms of a sum: tensors, each with its factor.
Terms = Sequence[tuple[torch.Tensor, float]]


class Packing(NamedTuple):
    """How gradients become what :meth:`CommHook.reduce` gets, and what its result is of them.

    Attributes:
        dtype: the dtype in which they are packed.
        scale: they are multiplied by this number when they are packed. The step gets the sum over ranks.
        counts_as: the result is their sum over ranks times this number, or close to it: derivatives of a step, and of
            derivatives, take it for that. None: it isn't, and has no derivative.
        terms: ``terms(state)``, the tensors of a parameter's state that are added to its gradient as it is packed, with
            their factors.
        proportional: the result scales with the gradients, as a mean of them does. A step whose loss is a
            :class:`ltx.Weighted` divides the result by the sum of the weights, which comes later; a loss scale divides
            it too.
        bucket_factor: a bucket, the first excepted, holds this many times the bytes that the strategy says. It is more
            than 1 for hooks that send far less than the gradients: fewer and longer buffers cost them less.
    """

    dtype: torch.dtype
    scale: float
    counts_as: float | None
    terms: Callable[[LeafState], Terms] = lambda state: ()
    proportional: bool = True
    bucket_factor: int = 1


#: The collectives that a reduction may ask for, and the static arguments of their rules.
REQUESTS = {"psum": (), "all_gather": (0, 0), "psum_scatter": (0, 0), "all_to_all": (0, 0, 1), "ppermute": ()}
#: The collectives whose buffer has a row for each rank.
_BY_ROWS = ("psum_scatter", "all_to_all")


@dataclass(eq=False)
class CollectiveRequest:
    """A collective that a reduction waits for.

    Attributes:
        operation: "psum", "all_gather" (gives a new first dimension), "psum_scatter" (takes the first dimension, which
            has a row for each rank), "all_to_all" (row i of the first dimension goes to rank i, and row i comes from
            rank i), "ppermute" (as `arguments` say; zeros come where no rank sends).
        buffer: contiguous; the driver may overwrite it.
        arguments: of a permutation: source, destination, source, ..., the same on all ranks.
        axis: the ranks of the collective, if only a part of the input's axis, named in the hook's `axes`.
        sent: set by a hook that answers a sum inexactly: a function that returns what it sent of `buffer`.

    Raises:
        StrategyError: no such operation, or no tensor.
    """

    operation: str
    buffer: torch.Tensor
    arguments: Static = ()
    axis: Axis | None = None
    sent: Callable[[], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if self.operation not in REQUESTS:
            known = ", ".join(map(repr, REQUESTS))
            raise StrategyError(f"CollectiveRequest({brief(self.operation)}, ...): expected one of {known}.")
        if not isinstance(self.buffer, torch.Tensor):
            raise StrategyError(
                f"CollectiveRequest({self.operation!r}, a {type(self.buffer).__name__}): expected a tensor to send."
            )

    def check(self, axis_size: int) -> None:
        """Raise unless a buffer that is sent by rows has a row for each rank, and a permutation is one of these."""
        if self.operation == "ppermute":
            ranks, sources, there = self.arguments, self.arguments[::2], self.arguments[1::2]
            once = len({*sources}) == len(sources) == len(there) == len({*there}) > 0
            if not (once and {*map(type, ranks)} == {int} and 0 <= min(ranks) <= max(ranks) < axis_size):
                raise StrategyError(
                    f"CollectiveRequest('ppermute', ..., {brief(ranks)}): expected arguments source, destination, "
                    f"source, ..., of ranks 0 to {axis_size - 1}, each once as a source at most, and once as a "
                    "destination."
                )
        if self.operation in _BY_ROWS and (self.buffer.ndim == 0 or self.buffer.shape[0] != axis_size):
            raise StrategyError(
                f"CollectiveRequest({self.operation!r}, a buffer of shape {list(self.buffer.shape)}): expected a first "
                f"dimension of {axis_size}, a row for each rank. Pad the bucket to a multiple of inputs.axis_size, and "
                "reshape it to (inputs.axis_size, -1)."
            )


@dataclass(eq=False)
class StartedWork:
    """Communication that a reduction has started by other means than ltx's, such as another engine's all-reduce.

    A reduction yields it to get `result` back when `work` is complete. It isn't waited for before that has to be: in a
    backward pass other buckets go out meanwhile. It counts as a phase, and reductions come to their phases in bucket
    order, so all peers of that engine start it in the same order.

    Attributes:
        work: has ``wait()``, as a ``torch.distributed.Work``.
        result: the tensor that holds the result after that.
    """

    work: Any
    result: torch.Tensor
    #: As of an :class:`ltx.core.comm.Work`: whether it is complete isn't asked, and no sum is taken.
    done: ClassVar[bool] = False
    total: ClassVar[float | None] = None

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.result


#: What a reduction may yield.
Request = CollectiveRequest | StartedWork
#: From reduced gradients, which may be overwritten, to the parameters that this rank's optimizer makes.
UpdateShared = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class BucketInput:
    """A bucket's gradients on this rank, divided by the number of ranks: the sum over ranks is the mean gradient.

    Attributes:
        flat: all of them, in the dtype that the hook sends, plus the hook's extra terms; the hook may overwrite it.
        bucket: shapes and sizes of the parameters in it.
        axis_size: the number of ranks.
        rank: this rank's place among them; on simulated ranks a 0-dim tensor.
        states: the state of each parameter of the bucket, in the bucket's order.
        known_step: the value of `step`; None for a hook without ``reads_step``.
        last: whether no bucket comes after this one.
        axis: the ranks; None in a reduction on its own.
        update: for a hook that updates parameters in its reduction
            (:class:`ltx.core.transforms.strategy.PostUpdateHook`): a function from reduced gradients to the
            parameters that this rank's optimizer makes.
    """

    flat: torch.Tensor
    bucket: Bucket
    axis_size: int
    rank: int | torch.Tensor = 0
    states: Sequence[LeafState] = ()
    known_step: int | torch.Tensor | None = None
    last: bool = True
    axis: Axis | None = None
    update: UpdateShared | None = None

    @property
    def step(self) -> int | torch.Tensor:
        """The number of synchronised steps before this one; in compiled graphs a 0-dim tensor.

        Raises:
            StrategyError: in a hook that doesn't set ``reads_step``.
        """
        if self.known_step is None:
            raise StrategyError(
                "a hook without state reads inputs.step, which isn't counted. Set reads_step = True in its class."
            )
        return self.known_step


#: (reduced flat buffer, next states)
Reduced = tuple[torch.Tensor, Sequence[LeafState]]

#: Yields requests, is sent their results, and returns the reduced buffer and the next states; or something else.
Reduction = Generator[Request, torch.Tensor, Reduced]
Requests = Generator[Request, torch.Tensor, Any]


@dataclass(eq=False)
class Program:
    """The program of a bucket, and how far it is (:class:`ltx.core.gradients.pending.Pending`)."""

    requests: Reduction
    reads: Sequence[torch.Tensor]  # what it reads, kept until it is complete
    hook: Any  # named in errors
    phases: int = 0  # how many collectives it may ask for
    then: Callable[[Reduced], None] | None = None  # is given the result as soon as it is complete
    work: Any = None  # the collective that it waits for
    phase: int = 0  # how many it has asked for
    completed: Reduced | None = None
    total: float | None = None  # the sum of the result's elements, if the transport knows it
    fence: Callable[..., None] | None = None  # None once the waiting stream is behind the result
    samples: Sequence[int] = ()  # under vmap, the shape of the batch of gradients


#: ``(bucket, gradients, states)`` -> the program of that bucket, which has packed the gradients.
ProgramOf = Callable[[Bucket, Sequence[torch.Tensor], Sequence[LeafState]], Program]


def advance(program: Requests, result: torch.Tensor | None = None) -> Any:
    """Run `program` up to its next request, or its result. `result` answers the last request; None at the beginning."""
    if type(program) is not GeneratorType and not isinstance(program, Generator):
        raise StrategyError(
            f"a hook's reduce returned a {type(program).__name__} and has no yield. Ask for what other ranks have: "
            'total = yield CollectiveRequest("psum", inputs.flat).'
        )
    try:
        request = next(program) if result is None else program.send(result)
    except StopIteration as end:
        if not isinstance(end.value, tuple):
            raise StrategyError(
                f"a hook's reduce returned a {type(end.value).__name__}: expected the reduced buffer and the next "
                "states of its parameters, as in return total, inputs.states."
            ) from None
        return end.value
    if not isinstance(request, Request):
        raise StrategyError(
            f"a hook's reduce yields a {type(request).__name__}: expected a request, such as "
            'CollectiveRequest("psum", inputs.flat).'
        )
    return request


def drive_within(
    program: Requests, answer: Callable[[CollectiveRequest], Requests]
) -> Generator[Any, torch.Tensor, Any]:
    """Run `program` inside another program: `answer` is a generator too, which may yield requests of its own."""
    request = advance(program)
    while isinstance(request, Request):
        answered = (yield request) if isinstance(request, StartedWork) else (yield from answer(request))
        request = advance(program, answered)
    return request


def answer_at_once(request: CollectiveRequest, axis: Axis) -> torch.Tensor:
    """The result of a request, computed by a differentiable collective on `axis`."""
    axis = request.axis or axis
    request.check(axis.size)
    static = request.arguments or REQUESTS[request.operation]
    return apply(request.operation, static, axis, [request.buffer])[0]
