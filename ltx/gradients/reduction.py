"""Reductions: what a communication hook does with a bucket, written once for every kind of axis.

A reduction is a generator. It yields a :class:`CollectiveRequest` wherever it needs the network and is sent the result;
it returns the reduced buffer and the next state. Its driver decides how: asynchronously between processes with other
buckets in between, at once on simulated ranks, or as nodes of a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ltx.axis import Axis
from ltx.collectives.linear import Static
from ltx.gradients.buckets import Bucket

#: One parameter's communication state: tensors by name.
LeafState = dict[str, torch.Tensor]

#: Tensors, and what each is multiplied by in a sum.
Terms = Sequence[tuple[torch.Tensor, float]]


@dataclass(eq=False)
class CollectiveRequest:
    """A collective that a reduction waits for.

    Attributes:
        operation: "psum", "all_gather" (gives a new first dimension), "psum_scatter" (takes the first dimension),
            "all_to_all" (row i of the first dimension goes to rank i, and row i comes from rank i), "ppermute" (as
            `arguments` say; zeros come where no rank sends).
        buffer: contiguous; the driver may overwrite it.
        arguments: of a permutation: source, destination, source, ...
        axis: the ranks of the collective, if not all: a part of the input's axis, which the hook names in its `axes`.
        sent: set by a hook that answers a sum with less than the sum: returns what it took of `buffer`.
    """

    operation: str
    buffer: torch.Tensor
    sent: Callable[[], torch.Tensor] | None = None
    arguments: Static = ()
    axis: Axis | None = None


@dataclass(frozen=True)
class BucketInput:
    """A bucket's gradients on this rank, divided by the number of ranks: the sum over ranks is the mean gradient.

    Attributes:
        flat: all of them, in the hook's wire dtype, with the hook's extra terms added; the hook may overwrite it.
        bucket: shapes and sizes of the parameters in it.
        axis_size: the number of ranks.
        rank: this rank's place among them; on simulated ranks a 0-dim tensor.
        states: the state of each parameter of the bucket, in the bucket's order.
        step: the number of synchronised steps before this one; in compiled graphs a 0-dim tensor.
        last: whether no bucket comes after this one.
        axis: the ranks; None in a reduction on its own.
        update: for a hook that updates parameters in its reduction
            (:class:`ltx.strategies.post_update.PostUpdateHook`): from reduced gradients to what this rank's optimizer
            makes of the parameters.
    """

    flat: torch.Tensor
    bucket: Bucket
    axis_size: int
    rank: int | torch.Tensor = 0
    states: Sequence[LeafState] = ()
    step: int | torch.Tensor = 0
    last: bool = True
    axis: Axis | None = None
    update: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None


#: (reduced flat buffer, next states)
Reduced = tuple[torch.Tensor, Sequence[LeafState]]

#: Yields requests, is sent their results, returns the reduced buffer and the next states.
Reduction = Generator[CollectiveRequest, torch.Tensor, Reduced]


def sum_of_shares(inputs: BucketInput) -> Reduction:
    """The exact mean: the sum of all ranks' inputs."""
    total = yield CollectiveRequest("psum", inputs.flat)
    return total, inputs.states


class Reducer(Protocol):
    """What a schedule needs of a communication hook; :class:`ltx.hooks.CommHook` is the full contract."""

    def __hash__(self) -> int: ...

    @property
    def exact(self) -> bool:
        """Whether the result is the sum of the inputs up to rounding in their own dtype."""
        ...

    @property
    def elementwise(self) -> bool:
        """Whether each element's result depends on that element alone, so that samples may share a buffer."""
        ...

    @property
    def stateful(self) -> bool:
        """Whether a reduction reads states or the step."""
        ...

    @property
    def bucket_factor(self) -> int:
        """What a strategy's bytes of a bucket, the first excepted, are multiplied by."""
        ...

    def axes(self, axis: Axis) -> tuple[Axis, ...]:
        """The parts of `axis` on which a reduction requests collectives."""
        ...

    def within(self, axis: Axis) -> Axis | None:
        """The part of `axis` that a reduction stays in; None for all ranks."""
        ...

    def phases_on(self, axis_size: int) -> int:
        """The largest number of requests that a reduction yields."""
        ...

    def scale(self, axis_size: int) -> float:
        """The factor of gradients when they are packed: 1 / axis_size for a mean."""
        ...

    def derivative_scale(self, axis_size: int) -> float:
        """The factor of the sum over ranks in derivatives of the result: 1 / axis_size for a mean."""
        ...

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are packed."""
        ...

    def extra_terms(self, state: LeafState, axis_size: int) -> Terms:
        """Tensors of a parameter's state that are added to its gradient as it is packed, with their factors."""
        ...

    def output_bucket(self, bucket: Bucket, axis_size: int) -> Bucket:
        """The shapes that come out of an exchange of `bucket`."""
        ...

    def reduce(self, inputs: BucketInput) -> Reduction:
        """The reduction of one bucket."""
        ...


@dataclass(frozen=True)
class ExactSum:
    """The sum over ranks times `factor`: what a hook counts as in second derivatives, for most hooks the mean."""

    factor: float

    exact = True
    elementwise = True
    stateful = False
    bucket_factor = 1

    def axes(self, axis: Axis) -> tuple[Axis, ...]:
        """All ranks at once."""
        return ()

    def within(self, axis: Axis) -> None:
        """All ranks."""

    def scale(self, axis_size: int) -> float:
        """Shares of the sum."""
        return self.factor

    def phases_on(self, axis_size: int) -> int:
        """One sum."""
        return 1

    def derivative_scale(self, axis_size: int) -> float:
        """Itself."""
        return self.factor

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Gradients travel as they are."""
        return dtype

    def extra_terms(self, state: LeafState, axis_size: int) -> Terms:
        """Nothing."""
        return ()

    def output_bucket(self, bucket: Bucket, axis_size: int) -> Bucket:
        """The shapes that came in."""
        return bucket

    def reduce(self, inputs: BucketInput) -> Reduction:
        """Sum the shares."""
        return sum_of_shares(inputs)
