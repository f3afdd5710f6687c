"""The table of operations: one row for each collective that a channel can issue.

A row says how the collective starts on a process group, how it starts in a compiled graph, the shape of its result,
and the bytes that a rank sends. The names are those of :mod:`ltx.core.collectives`.

Only this file calls a collective of torch.distributed, each asynchronous and on contiguous buffers made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.fx import has_side_effect

from ltx.core.base import private
from ltx.core.comm.backends import is_gloo

_VMAP_KNOWS_VIEW = torch._C._dispatch_has_kernel_for_dispatch_key("aten::view.dtype", "FuncTorchBatched")


class _View(torch.autograd.Function):
    """``x.view(dtype)``, also under vmap, which has no rule for it in torch 2.11."""

    @staticmethod
    def forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        return view_as(x.movedim(in_dims[0], 0).contiguous(), dtype), 0


def view_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x.view(dtype)`` for any `x`: the same bits as numbers of `dtype`, without a gradient."""
    if _VMAP_KNOWS_VIEW or not private.is_wrapped(x):
        return x.view(dtype)
    viewed: torch.Tensor = _View.apply(x, dtype)  # type: ignore[no-untyped-call]
    return viewed


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, in one more dimension at the end; a view."""
    return view_as(x.resolve_conj().resolve_neg().unsqueeze(-1), torch.uint8)


def from_bytes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return view_as(x, dtype).squeeze(-1)


# torch 2.13 has the pair *_single and warns about *_tensor; 2.11 has only *_tensor.
_gather_tensor: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


#: Static arguments of an operation.
Arguments = tuple[int, ...]
#: The started work, the buffer that the work fills, and the function from this buffer to the result.
Started = tuple[Any, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def as_it_is(completed: torch.Tensor) -> torch.Tensor:
    return completed


def summable(buffer: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """`buffer` in a dtype that every backend can sum, and a function that converts the sum to `buffer`'s dtype."""
    if buffer.dtype is torch.int16:  # gloo and NCCL have no int16
        return buffer.int(), torch.Tensor.short
    if buffer.is_complex():  # NCCL doesn't know complex numbers; their sum is the sum of their parts
        return torch.view_as_real(buffer.resolve_conj()), torch.view_as_complex
    return buffer, as_it_is


# gloo sends a message whole, and can't be relied on to receive at the same time: on a link of 100 Mbit/s exchanging 20
# MB each way took 1.8 times as long as an all-reduce of as much, 1.1 times in pieces of 4 MB, 0.98 in pieces of 512 kB.
_MESSAGE_BYTES = 1 << 19


class Works:
    """Several works of torch, waited for as one."""

    def __init__(self, works: list[Any]):
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, *timeout: timedelta) -> None:
        for work in self._works:
            work.wait(*timeout)

    def get_future(self) -> Any:
        """The last work's result: the works complete in order."""
        return self._works[-1].get_future()


def _messages(group: dist.ProcessGroup, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`x` in parts of nearly equal length along its last dimension; each part is one message to a peer."""
    length = x.shape[-1]
    count = -(-length * x.itemsize // _MESSAGE_BYTES) if is_gloo(group) else 1
    parts: tuple[torch.Tensor, ...] = x.split(-(-length // max(1, count)), -1)
    return parts


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Inverse of :func:`_messages`, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _all_gather(group: dist.ProcessGroup, buffer: torch.Tensor, _: Arguments) -> Started:
    size, given = group.size(), _messages(group, buffer.flatten())
    taken = [part.new_empty((size, part.numel())) for part in given]
    both = zip(taken, given, strict=True)
    works = [_gather_tensor(out.flatten(), part, group=group, async_op=True) for out, part in both]
    return Works(works), buffer, lambda buffer: _joined(taken).view(size, *buffer.shape)


def _psum_scatter(group: dist.ProcessGroup, buffer: torch.Tensor, arguments: Arguments) -> Started:
    if is_gloo(group):  # gloo's reduce-scatter would all-reduce everything
        work, rows, finish = _all_to_all(group, as_bytes(buffer), arguments)
        return work, rows, lambda rows: from_bytes(finish(rows), buffer.dtype).sum(0, dtype=buffer.dtype)
    given, restored = summable(buffer)
    out = given.new_empty(given.shape[1:])
    return _reduce_scatter(out.view(-1), given.view(-1), group=group, async_op=True), out, restored


def _all_to_all(group: dist.ProcessGroup, buffer: torch.Tensor, _: Arguments) -> Started:
    given = [part.contiguous() for part in _messages(group, buffer.reshape(group.size(), -1))]
    taken = [torch.empty_like(part) for part in given]
    both = zip(taken, given, strict=True)
    works = [dist.all_to_all_single(out, part, group=group, async_op=True) for out, part in both]
    return Works(works), buffer, lambda buffer: _joined(taken).view(buffer.shape)


def _routed(group: dist.ProcessGroup, given: torch.Tensor, routes: Routes, shape: tuple[int, ...]) -> Started:
    """Send `given`, or its row for each rank, along `routes`. What arrives has this `shape`; zeros if nothing does."""
    rank, size, parts, works = group.rank(), group.size(), _messages(group, given), []
    rows = sum((other, rank) in routes for other in range(size))
    out = given.new_empty(rows * given.shape[-1])
    taken = out.split([rows * part.shape[-1] for part in parts])
    for part, arriving in zip(parts, taken, strict=True):
        sent, received = _splits(routes, rank, size, part.shape[-1])
        flat = part.reshape(-1)[: sum(sent)]
        works.append(dist.all_to_all_single(arriving, flat, received, sent, group=group, async_op=True))

    def finish(out: torch.Tensor) -> torch.Tensor:
        if not rows:
            return out.new_zeros(shape)
        return (out if rows == 1 else _joined([part.view(rows, -1) for part in taken])).view(shape)

    return Works(works), out, finish


#: Pairs of ranks: (source, destination).
Routes = set[tuple[int, int]]


def _to_one(arguments: Arguments, size: int) -> Routes:
    return {(rank, arguments[0]) for rank in range(size)}


def _from_one(arguments: Arguments, size: int) -> Routes:
    return {(arguments[0], rank) for rank in range(size)}


def _pairs(arguments: Arguments) -> Routes:
    return set(zip(arguments[::2], arguments[1::2], strict=True))


def _splits(routes: Routes, rank: int, size: int, numel: int) -> tuple[list[int], list[int]]:
    """How many elements `rank` sends to, and gets from, each rank."""
    sent = [numel if (rank, other) in routes else 0 for other in range(size)]
    return sent, [numel if (other, rank) in routes else 0 for other in range(size)]


#: The dtypes that have sums, products and extrema on every backend. Operations that only move data take any dtype.
SUMMED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)

#: Collectives inside a compiled graph: functional ones, which Inductor sees and may reorder.
_functional: Any = torch.ops._c10d_functional
_group_called: Callable[[str], Any] = c10d._resolve_process_group  # type: ignore[attr-defined,assignment]

# A tracer mustn't drop a collective that peers wait for, nor fold it as a constant, since folding doesn't wait.
for _name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
    has_side_effect(getattr(_functional, _name).default)

# Does nothing but read. Inductor may not wait for what is read before, as a wait writes it. Without one that reads all
# buckets before the first wait, Inductor waits for each bucket as soon as it has started it, where that lowers its
# estimate of peak memory; with this one alone, it starts all of them just before it. So another one follows each start.
torch.library.define("ltx::started", "(Tensor[] under_way) -> Tensor")
torch.library.impl("ltx::started", "CompositeExplicitAutograd", lambda under_way: under_way[0].new_empty(0))
torch.library.register_fake("ltx::started", lambda under_way: under_way[0].new_empty(0))
has_side_effect(torch.ops.ltx.started.default)


def mark_started(under_way: list[torch.Tensor]) -> None:
    """Record ``ltx::started`` if torch.compile is recording; other tracers' graphs hold torch's operations alone."""
    if under_way and private.TracingContext.try_get() is not None and not torch.compiler.is_exporting():
        torch.ops.ltx.started(under_way)


def _wait(started: torch.Tensor) -> torch.Tensor:
    completed: torch.Tensor = _functional.wait_tensor(started)
    return completed


def _all_to_all_in_graph(x: torch.Tensor, n: int, group: str, _: Arguments) -> Any:
    parts = [x.shape[0] // n] * n
    return _functional.all_to_all_single(x, parts, parts, group)


def _routed_in_graph(given: list[torch.Tensor], group: str, routes: Routes, shape: tuple[int, ...]) -> torch.Tensor:
    """What arrives, of this `shape`, if ranks i on `routes` are sent ``given[i]``; zeros if nothing does."""
    sent, received = _splits(routes, _group_called(group).rank(), len(given), given[0].numel())
    filler = given[0].new_zeros(1)  # Inductor would remove an empty exchange, for which peers wait
    parts = [part if count else filler for part, count in zip(given, sent, strict=True)]
    lengths, sizes = [max(count, 1) for count in received], [part.numel() for part in parts]
    arrived = _wait(_functional.all_to_all_single(torch.cat(parts), lengths, sizes, group))
    first = next((place for place, count in enumerate(received) if count), None)
    if first is None:
        return filler.new_zeros(shape) * arrived[0]
    return arrived[first : first + sum(received)].reshape(shape)


@dataclass(frozen=True)
class Operation:
    """One kind of collective among n ranks, on a contiguous buffer."""

    name: str  # as in ltx.core.collectives
    #: Starts it on a process group: ``(group, buffer, arguments)``.
    start: Callable[[dist.ProcessGroup, torch.Tensor, Arguments], Started]
    #: Starts it inside a compiled graph: ``(buffer, n, group name, arguments)``.
    start_in_graph: Callable[[torch.Tensor, int, str, Arguments], torch.Tensor]
    #: ``(bytes of the buffer, n)`` -> the bytes that one rank sends in a ring. By default (n-1)/n of the buffer.
    bytes_sent: Callable[[int, int], int] = lambda nbytes, n: nbytes * (n - 1) // n
    messages: Callable[[int], int] = lambda n: n - 1  # the number of messages in sequence; by default one to each peer
    #: ``(shape of the buffer, n)`` -> the result's shape; None if it is the buffer's shape.
    result_shape: Callable[[tuple[int, ...], int], tuple[int, ...]] | None = None
    in_place: bool = False  # the result overwrites the buffer
    moves: bool = False  # the operation only moves data, so it takes every dtype

    def new_result(self, buffer: torch.Tensor, n: int) -> torch.Tensor:
        """Memory for the result: the buffer itself where the operation works in place, else uninitialised."""
        if self.in_place:
            return buffer
        return buffer.new_empty(buffer.shape if self.result_shape is None else self.result_shape(buffer.shape, n))

    def begin_in_graph(
        self, buffer: torch.Tensor, n: int, group_name: str, arguments: Arguments = ()
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Start inside a compiled graph; ranks compared it as it was traced. (What was started, what waits for it.)"""
        if buffer.dtype is torch.int16:  # gloo and NCCL have no int16
            started, wait = self.begin_in_graph(buffer.int(), n, group_name, arguments)
            return started, lambda x: wait(x).short()
        if self.result_shape is None:
            return self.start_in_graph(buffer.contiguous(), n, group_name, arguments), _wait
        # Functional collectives gather and scatter along dimension 0; ltx's have an extra dimension for the ranks.
        flat = buffer if self.name in ("all_gather", "gather") or buffer.ndim == 1 else buffer.flatten(0, 1)
        shape = self.result_shape(buffer.shape, n)
        flat = torch.atleast_1d(flat.contiguous())  # gloo can't gather numbers without a dimension
        return self.start_in_graph(flat, n, group_name, arguments), lambda x: _wait(x).reshape(shape)


def _reduction(name: str, op: Any, in_graph: str) -> Operation:
    def start(group: dist.ProcessGroup, buffer: torch.Tensor, _: Arguments) -> Started:
        given, restored = (buffer, as_it_is) if buffer.is_floating_point() else summable(buffer)
        return dist.all_reduce(given, op, group=group, async_op=True), given, restored

    return Operation(
        name,
        start,
        lambda x, n, group, _: _functional.all_reduce(x, in_graph, group),
        bytes_sent=lambda nbytes, n: 2 * nbytes * (n - 1) // n,
        messages=lambda n: 2 * (n - 1),
        in_place=True,
    )


_ROWS = (
    _reduction("psum", dist.ReduceOp.SUM, "sum"),
    _reduction("pmax", dist.ReduceOp.MAX, "max"),
    _reduction("pmin", dist.ReduceOp.MIN, "min"),
    Operation(
        "all_gather",
        _all_gather,
        lambda x, n, group, _: _functional.all_gather_into_tensor(x, n, group),
        bytes_sent=lambda nbytes, n: nbytes * (n - 1),
        result_shape=lambda shape, n: (n, *shape),
        moves=True,
    ),
    Operation(
        "psum_scatter",
        _psum_scatter,
        lambda x, n, group, _: _functional.reduce_scatter_tensor(x, "sum", n, group),
        result_shape=lambda shape, n: tuple(shape[1:]),
    ),
    Operation(
        "broadcast",
        lambda group, x, root: (dist.broadcast(x, group_src=root[0], group=group, async_op=True), x, as_it_is),
        lambda x, n, group, arguments: _functional.broadcast(x, arguments[0], group),
        in_place=True,
        moves=True,
    ),
    Operation(
        "gather",
        lambda group, x, to: _routed(group, x.flatten(), _to_one(to, group.size()), (group.size(), *x.shape)),
        lambda x, n, group, to: _routed_in_graph([x.flatten()] * n, group, _to_one(to, n), (n * x.numel(),)),
        bytes_sent=lambda nbytes, n: nbytes,
        result_shape=lambda shape, n: (n, *shape),
        moves=True,
    ),
    Operation(
        "scatter",
        lambda group, x, to: _routed(group, x.reshape(group.size(), -1), _from_one(to, group.size()), x.shape[1:]),
        lambda x, n, group, to: _routed_in_graph([*x.reshape(n, -1)], group, _from_one(to, n), (x.numel() // n,)),
        result_shape=lambda shape, n: tuple(shape[1:]),
        moves=True,
    ),
    Operation("all_to_all", _all_to_all, _all_to_all_in_graph, moves=True),
    Operation(
        "ppermute",
        lambda group, x, to: _routed(group, x.flatten(), _pairs(to), x.shape),
        lambda x, n, group, to: _routed_in_graph([x.flatten()] * n, group, _pairs(to), x.shape),
        bytes_sent=lambda nbytes, n: nbytes,
        messages=lambda n: 1,
        moves=True,
    ),
)

OPERATIONS: dict[str, Operation] = {row.name: row for row in _ROWS}


def bytes_sent(operation: str, buffer: torch.Tensor, size: int) -> int:
    """Bytes that one of `size` ranks sends for `operation` on `buffer`, by the ring's count; reads its shape alone."""
    return OPERATIONS[operation].bytes_sent(buffer.numel() * buffer.element_size(), size)
