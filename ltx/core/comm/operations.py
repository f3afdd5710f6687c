"""The table of operations: one row for each collective that a channel can issue.

A row says how the collective starts on a process group, how it starts in a compiled graph, how a shared-memory
transport cuts it into chunks, the shape of its result, and what a rank sends for it. The names are those of
:mod:`ltx.core.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ltx.core.comm import chunks, functional, group_collectives
from ltx.core.comm.group_collectives import Arguments, Started

#: The dtypes that have sums, products and extrema on every backend. Operations that only move data take any dtype,
#: since the data travels as bytes.
SUMMED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)


def _a_part(nbytes: int, n: int) -> int:
    return nbytes * (n - 1) // n


def _row_for_each(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    return n, *shape


def _own_row(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    return tuple(shape[1:])


@dataclass(frozen=True)
class Operation:
    """One kind of collective among n ranks, on a contiguous buffer.

    Attributes:
        name: as in :mod:`ltx.core.collectives`.
        start: starts it on a process group: ``(group, buffer, arguments)``.
        start_in_graph: starts it inside a compiled graph: ``(buffer, n, group name, arguments)``.
        chunks: how a shared-memory transport cuts it.
        bytes_sent: bytes that one rank sends, by the ring's count: ``(bytes of the buffer, n)``; by default all but one
            part of n.
        messages: messages that follow one another: ``n``; by default one to each peer.
        result_shape: ``(shape of the buffer, n)``; None where the result has the buffer's shape.
        in_place: the result overwrites the buffer.
        moves: it only moves data, so it takes every dtype.
    """

    name: str
    start: Callable[[dist.ProcessGroup, torch.Tensor, Arguments], Started]
    start_in_graph: functional.Start
    chunks: chunks.Cut
    bytes_sent: Callable[[int, int], int] = _a_part
    messages: Callable[[int], int] = lambda n: n - 1
    result_shape: Callable[[tuple[int, ...], int], tuple[int, ...]] | None = None
    in_place: bool = False
    moves: bool = False

    def new_result(self, buffer: torch.Tensor, n: int) -> torch.Tensor:
        """Memory for the result: the buffer itself where the operation works in place, else uninitialised."""
        if self.in_place:
            return buffer
        return buffer.new_empty(buffer.shape if self.result_shape is None else self.result_shape(buffer.shape, n))

    def begin_in_graph(
        self, buffer: torch.Tensor, n: int, group_name: str, arguments: Arguments = ()
    ) -> Callable[[], torch.Tensor]:
        """Start inside a compiled graph; the function that comes back waits for the result.

        Nothing compares or counts these collectives, because Python doesn't run in a compiled step. The ranks compared
        them when the step was traced.
        """
        if self.result_shape is None:
            started = self.start_in_graph(buffer.contiguous(), n, group_name, arguments)
            return partial(functional.wait, started)
        # Functional collectives gather and scatter along dimension 0; a channel's have a dimension for the ranks.
        flat = buffer if self.name in ("all_gather", "gather") or buffer.ndim == 1 else buffer.flatten(0, 1)
        shape = self.result_shape(buffer.shape, n)
        started = self.start_in_graph(flat.contiguous(), n, group_name, arguments)
        return lambda: functional.wait(started).reshape(shape)


def _all_reduce(
    name: str, op: dist.ReduceOp.RedOpType, in_graph: str, combine: Callable[..., torch.Tensor]
) -> Operation:
    return Operation(
        name,
        group_collectives.all_reduce(op),
        functional.all_reduce(in_graph),
        chunks.all_reduce(combine),
        bytes_sent=lambda nbytes, n: 2 * nbytes * (n - 1) // n,
        messages=lambda n: 2 * (n - 1),
        in_place=True,
    )


_ROWS = (
    _all_reduce("psum", dist.ReduceOp.SUM, "sum", torch.add),
    _all_reduce("pmax", dist.ReduceOp.MAX, "max", torch.maximum),
    _all_reduce("pmin", dist.ReduceOp.MIN, "min", torch.minimum),
    Operation(
        "all_gather",
        group_collectives.all_gather,
        functional.all_gather,
        chunks.all_gather,
        bytes_sent=lambda nbytes, n: nbytes * (n - 1),
        result_shape=_row_for_each,
        moves=True,
    ),
    Operation(
        "psum_scatter",
        group_collectives.psum_scatter,
        functional.psum_scatter,
        chunks.psum_scatter,
        result_shape=_own_row,
    ),
    Operation(
        "broadcast", group_collectives.broadcast, functional.broadcast, chunks.broadcast, in_place=True, moves=True
    ),
    Operation(
        "gather",
        group_collectives.gather,
        functional.gather,
        chunks.gather,
        bytes_sent=lambda nbytes, n: nbytes,
        result_shape=_row_for_each,
        moves=True,
    ),
    Operation(
        "scatter", group_collectives.scatter, functional.scatter, chunks.scatter, result_shape=_own_row, moves=True
    ),
    Operation(
        "all_to_all",
        group_collectives.all_to_all,
        functional.all_to_all,
        chunks.all_to_all,
        moves=True,
    ),
    Operation(
        "ppermute",
        group_collectives.ppermute,
        functional.ppermute,
        chunks.ppermute,
        bytes_sent=lambda nbytes, n: nbytes,
        messages=lambda n: 1,
        moves=True,
    ),
)

OPERATIONS: dict[str, Operation] = {row.name: row for row in _ROWS}


def bytes_sent(operation: str, buffer: torch.Tensor, size: int) -> int:
    """Bytes that one of `size` ranks sends for `operation` on `buffer`, by the ring's count; reads its shape alone."""
    return OPERATIONS[operation].bytes_sent(buffer.numel() * buffer.element_size(), size)
