"""The table of operations: one row for each collective that a channel can issue.

A row says how the collective starts on a process group, how it starts in a compiled graph, how a shared-memory
transport cuts it into chunks, the shape of its result, and what a rank sends for it. The names are those of
:mod:`ltx.core.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.fx import has_side_effect

from ltx.core.comm import chunks, group_collectives
from ltx.core.comm.group_collectives import Arguments, Started, gathered_splits, permuted_splits

#: The dtypes that have sums, products and extrema on every backend. Operations that only move data take any dtype,
#: since the data travels as bytes.
SUMMED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)


#: Collectives inside a compiled graph: functional ones, which Inductor sees and may reorder.
_functional: Any = torch.ops._c10d_functional
_group_called: Callable[[str], Any] = c10d._resolve_process_group  # type: ignore[attr-defined,assignment]

# A tracer may neither drop a collective that peers wait for nor run it while it folds constants, as it does not wait.
for _name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
    has_side_effect(getattr(_functional, _name).default)


def _wait(started: torch.Tensor) -> torch.Tensor:
    completed: torch.Tensor = _functional.wait_tensor(started)
    return completed


def _all_to_all(x: torch.Tensor, n: int, group: str, _: Arguments) -> Any:
    parts = [x.shape[0] // n] * n
    return _functional.all_to_all_single(x, parts, parts, group)


def _ppermute(x: torch.Tensor, n: int, group: str, arguments: Arguments) -> torch.Tensor:
    rank, numel = _group_called(group).rank(), x.numel()
    sent, received = permuted_splits(arguments, rank, n, numel)
    arrived = _exchanged([x.flatten() if count else None for count in sent], received, x, group)
    source = next((other for other, count in enumerate(received) if count), None)
    if source is None:
        return torch.zeros_like(x) * arrived[0]
    return arrived[source : source + numel].reshape(x.shape)


def _gather(x: torch.Tensor, n: int, group: str, arguments: Arguments) -> torch.Tensor:
    rank, numel = _group_called(group).rank(), x.numel()
    sent, received = gathered_splits(arguments[0], rank, n, numel)
    arrived = _exchanged([x.flatten() if count else None for count in sent], received, x, group)
    return arrived if rank == arguments[0] else x.new_zeros(n * numel) * arrived[0]


def _scatter(x: torch.Tensor, n: int, group: str, arguments: Arguments) -> torch.Tensor:
    rank, numel = _group_called(group).rank(), x.numel() // n
    received, sent = gathered_splits(arguments[0], rank, n, numel)
    parts = [part if count else None for part, count in zip(x.reshape(n, -1).unbind(), sent, strict=True)]
    arrived = _exchanged(list(parts), received, x, group)
    return arrived[arguments[0] : arguments[0] + numel]


def _exchanged(given: list[torch.Tensor | None], received: list[int], like: torch.Tensor, group: str) -> torch.Tensor:
    """What arrives where rank i is given ``given[i]``, one part after the other, with one element for nothing.

    A filler goes to each rank that gets nothing: Inductor takes empty buffers out of the graph, and with them the
    exchange that peers wait for.
    """
    filler = like.new_zeros(1)
    parts = [filler if part is None else part for part in given]
    lengths = [max(count, 1) for count in received]
    return _wait(_functional.all_to_all_single(torch.cat(parts), lengths, [part.numel() for part in parts], group))


def _row_for_each(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    return n, *shape


def _own_row(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    return tuple(shape[1:])


@dataclass(frozen=True)
class Operation:
    """One kind of collective among n ranks, on a contiguous buffer."""

    name: str  # as in ltx.core.collectives
    #: On a process group: ``(group, buffer, arguments)``.
    start: Callable[[dist.ProcessGroup, torch.Tensor, Arguments], Started]
    #: Inside a compiled graph: ``(buffer, n, group name, arguments)``.
    start_in_graph: Callable[[torch.Tensor, int, str, Arguments], torch.Tensor]
    chunks: chunks.Cut
    #: By the ring's count what one rank sends: ``(bytes of the buffer, n)``. By default all but one part of n.
    bytes_sent: Callable[[int, int], int] = lambda nbytes, n: nbytes * (n - 1) // n
    messages: Callable[[int], int] = lambda n: n - 1  # that follow one another; by default one to each peer
    #: ``(shape of the buffer, n)``; None where the result has the buffer's shape.
    result_shape: Callable[[tuple[int, ...], int], tuple[int, ...]] | None = None
    in_place: bool = False  # the result overwrites the buffer
    moves: bool = False  # it only moves data, so it takes every dtype

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
        if buffer.dtype is torch.int16:  # which neither gloo nor NCCL knows
            wait = self.begin_in_graph(buffer.int(), n, group_name, arguments)
            return lambda: wait().short()
        if self.result_shape is None:
            started = self.start_in_graph(buffer.contiguous(), n, group_name, arguments)
            return partial(_wait, started)
        # Functional collectives gather and scatter along dimension 0; a channel's have a dimension for the ranks.
        flat = buffer if self.name in ("all_gather", "gather") or buffer.ndim == 1 else buffer.flatten(0, 1)
        shape = self.result_shape(buffer.shape, n)
        started = self.start_in_graph(flat.contiguous(), n, group_name, arguments)
        return lambda: _wait(started).reshape(shape)


def _all_reduce(
    name: str, op: dist.ReduceOp.RedOpType, in_graph: str, combine: Callable[..., torch.Tensor]
) -> Operation:
    return Operation(
        name,
        group_collectives.all_reduce(op),
        lambda x, n, group, _: _functional.all_reduce(x, in_graph, group),
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
        lambda x, n, group, _: _functional.all_gather_into_tensor(x, n, group),
        chunks.all_gather,
        bytes_sent=lambda nbytes, n: nbytes * (n - 1),
        result_shape=_row_for_each,
        moves=True,
    ),
    Operation(
        "psum_scatter",
        group_collectives.psum_scatter,
        lambda x, n, group, _: _functional.reduce_scatter_tensor(x, "sum", n, group),
        chunks.psum_scatter,
        result_shape=_own_row,
    ),
    Operation(
        "broadcast",
        group_collectives.broadcast,
        lambda x, n, group, arguments: _functional.broadcast(x, arguments[0], group),
        chunks.broadcast,
        in_place=True,
        moves=True,
    ),
    Operation(
        "gather",
        group_collectives.gather,
        _gather,
        chunks.gather,
        bytes_sent=lambda nbytes, n: nbytes,
        result_shape=_row_for_each,
        moves=True,
    ),
    Operation("scatter", group_collectives.scatter, _scatter, chunks.scatter, result_shape=_own_row, moves=True),
    Operation("all_to_all", group_collectives.all_to_all, _all_to_all, chunks.all_to_all, moves=True),
    Operation(
        "ppermute",
        group_collectives.ppermute,
        _ppermute,
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
