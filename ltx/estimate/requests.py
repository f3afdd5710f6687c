"""What a training step sends, as values: collectives, buckets, exchanges, in the order of their issue.

:mod:`ltx.estimate.dry_run` finds it, :func:`ltx.profile.explain` shows it, :func:`ltx.profile.plan` takes the time of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from ltx import hooks
from ltx.core import comm
from ltx.core.base import tree
from ltx.core.comm.operations import OPERATIONS
from ltx.core.gradients.pending import Exchange
from ltx.core.gradients.reduction import REQUESTS, Bucket
from ltx.core.ranks.axis import Axis
from ltx.errors import StrategyError


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


def collective(operation: str, buffer: torch.Tensor, axis: Axis) -> Collective:
    """The collective of a buffer, of which the shape is read."""
    part = axis.meta.part if axis.meta else ()
    between = (part[0], part[-1]) if part else (0, axis.size - 1)
    nbytes = comm.bytes_sent(operation, buffer, axis.size)
    return Collective(operation, tree.describe(buffer), nbytes, axis.size, between)


def summary(axis: Axis) -> Collective:
    """The small sum that goes ahead of gradients, and of exchanges in the foreground."""
    return collective("psum", meta((comm.SUMMARY_BYTES // 8,), torch.float64), axis)


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

    def answer(self, operation: str, buffer: torch.Tensor, axis: Axis) -> torch.Tensor:
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
        self.found.append(collective(operation, buffer, axis))
        return OPERATIONS[operation].new_result(buffer, axis.size)
