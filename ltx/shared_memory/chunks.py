"""Operations through shared memory: buffers are cut into chunks, and functions copy each rank's part in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

CHUNK_BYTES = (1 << 20) + (1 << 12)  # a bucket of 4 MiB in eight bits a number, and the head of its message
SMALL_BYTES = 1 << 16  #: so small a buffer each rank reduces as a whole: one more wait would take longer


class Chunk(NamedTuple):
    """A part of a buffer."""

    numel: int
    dtype: torch.dtype
    given: torch.Tensor | None  # this rank's input
    take: Callable[[list[torch.Tensor]], Any]  # copies this rank's result out of all ranks' slots; returns a reduction
    reduce: Callable[..., torch.Tensor] | None = None  # combines two slots in a reduction: (a, b, out=)


class Job(NamedTuple):
    """One rank's part in an operation among `size` ranks: its buffer, memory for the result, and static arguments."""

    buffer: torch.Tensor
    out: torch.Tensor
    arguments: tuple[int, ...]
    rank: int
    size: int


Cut = Callable[[Job], Iterator[Chunk]]  #: cuts an operation into chunks
Take = Callable[[slice, list[torch.Tensor]], Any]  #: copies the part of a result at a place out of all slots


def part(chunk: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The part of a chunk that `rank` reduces."""
    length = chunk.numel()
    return chunk[length * rank // size : length * (rank + 1) // size]


def sum_of(x: torch.Tensor) -> float:
    """The sum of a share's numbers, real and imaginary parts alike; if a number isn't finite, the sum isn't."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return float(x.sum(dtype=torch.float32 if x.dtype.itemsize < 4 else None).item())


def _nothing(*_: object) -> None:
    pass


NO_CHUNK = Chunk(0, torch.uint8, None, _nothing)  #: a transport puts this in place of a completed chunk


def _cut(
    x: torch.Tensor, take: Take, gives: bool = True, reduce: Callable[..., torch.Tensor] | None = None
) -> Iterator[Chunk]:
    """Chunks of `x` along its last dimension; if `x` has rows, a chunk covers all rows."""
    length, column_bytes = x.shape[-1], x[..., :1].nbytes
    most = max(CHUNK_BYTES // max(column_bytes, 1), 1)
    for start in range(0, length, most):
        at = slice(start, min(start + most, length))
        chunk = x[..., at]
        yield Chunk(chunk.numel(), chunk.dtype, chunk if gives else None, partial(take, at), reduce)


def in_rank_order(reduce: Callable[..., torch.Tensor], parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Put the reduction of all ranks' `parts` into `out`, which may be one of them: `out` is written to last."""
    total = parts[0]
    for other in parts[1:-1]:
        total = reduce(total, other)
    return reduce(total, parts[-1], out=out)


def all_reduce(reduce: Callable[..., torch.Tensor]) -> Cut:
    def chunks(job: Job) -> Iterator[Chunk]:
        flat = job.buffer.view(-1)
        if flat.nbytes <= SMALL_BYTES:
            return _cut(flat, lambda at, slots: in_rank_order(reduce, slots, flat[at]))

        def take(at: slice, slots: list[torch.Tensor]) -> None:
            result = flat[at]
            for other, slot in enumerate(slots):
                part(result, other, job.size).copy_(part(slot, other, job.size))

        return _cut(flat, take, reduce=reduce)

    return chunks


def all_gather(job: Job) -> Iterator[Chunk]:
    return _cut(job.buffer.view(-1), partial(_take_rows, job.out.view(job.size, -1)))


def _take_rows(to: torch.Tensor, at: slice, rows: list[torch.Tensor]) -> None:
    for mine, row in zip(to, rows, strict=True):
        mine[at].copy_(row)


def _sent(job: Job, gives: bool, source: int | None) -> Iterator[Chunk]:
    """The rank copies its buffer in if `gives` is true, and copies the buffer of rank `source` out."""
    take = _nothing if source is None else lambda at, slots: job.out.view(-1)[at].copy_(slots[source])
    return _cut(job.buffer.view(-1), take, gives)


def broadcast(job: Job) -> Iterator[Chunk]:
    root = job.arguments[0]
    return _sent(job, job.rank == root, None if job.rank == root else root)


def ppermute(job: Job) -> Iterator[Chunk]:
    source_of = dict(zip(job.arguments[1::2], job.arguments[::2], strict=True))
    if job.rank not in source_of:
        job.out.zero_()
    return _sent(job, job.rank in source_of.values(), source_of.get(job.rank))


def gather(job: Job) -> Iterator[Chunk]:
    if job.rank == job.arguments[0]:
        return all_gather(job)
    job.out.zero_()
    return _sent(job, True, None)


def _rows(job: Job, take: Take, gives: bool = True) -> Iterator[Chunk]:
    """Every rank has a row for each rank; `take` gets the rows for this rank."""

    def take_mine(at: slice, slots: list[torch.Tensor]) -> None:
        take(at, [slot.view(job.size, -1)[job.rank] for slot in slots])

    return _cut(job.buffer.view(job.size, -1), take_mine, gives)


def scatter(job: Job) -> Iterator[Chunk]:
    root, out = job.arguments[0], job.out.view(-1)
    return _rows(job, lambda at, rows: out[at].copy_(rows[root]), job.rank == root)


def all_to_all(job: Job) -> Iterator[Chunk]:
    return _rows(job, partial(_take_rows, job.out.view(job.size, -1)))


def psum_scatter(job: Job) -> Iterator[Chunk]:
    out = job.out.view(-1)
    return _rows(job, lambda at, rows: in_rank_order(torch.add, rows, out[at]))


#: How each operation is cut, by its name in :mod:`ltx.core.comm.operations`.
CUTS: dict[str, Cut] = {
    "psum": all_reduce(torch.add),
    "pmax": all_reduce(torch.maximum),
    "pmin": all_reduce(torch.minimum),
    **{cut.__name__: cut for cut in (all_gather, psum_scatter, broadcast, gather, scatter, all_to_all, ppermute)},
}
