"""How each operation goes through shared memory: its buffer cut into chunks, with what a rank copies in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of a buffer.

    Attributes:
        numel, dtype: what it takes in a segment.
        give: copies this rank's input into its slot.
        take: copies this rank's part of the result out of all ranks' slots.
        reduce: combines two slots in a reduction: ``(a, b, out=)``.
    """

    numel: int
    dtype: torch.dtype
    give: Callable[[torch.Tensor], object]
    take: Callable[[list[torch.Tensor]], object]
    reduce: Callable[..., torch.Tensor] | None = None


Cut = Callable[[torch.Tensor, torch.Tensor, tuple[int, ...], int, int], Iterator[Chunk]]


def _spans(x: torch.Tensor, rows: int = 1) -> Iterator[slice]:
    """Parts of the last dimension of `x`, of which a chunk holds `rows`."""
    length, most = x.shape[-1], max(CHUNK_BYTES // (x.element_size() * rows), 1)
    return (slice(start, min(start + most, length)) for start in range(0, length, most))


def part(chunk: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The part of a chunk that `rank` reduces."""
    length = chunk.numel()
    return chunk[length * rank // size : length * (rank + 1) // size]


def sum_of(x: torch.Tensor) -> float:
    """The sum of a share's numbers, real and imaginary parts alike, which is finite if all of them are."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return float(x.sum(dtype=torch.float32 if x.dtype.itemsize < 4 else None).item())


def _giving(chunk: torch.Tensor) -> Callable[[torch.Tensor], object]:
    return lambda slot: slot.view(chunk.shape).copy_(chunk)


def _taking(source: int, to: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
    return lambda slots: to.copy_(slots[source])


def _nothing(_: object) -> None:
    pass


#: What a transport keeps in place of a chunk that is complete.
NO_CHUNK = Chunk(0, torch.uint8, _nothing, _nothing)


def all_reduce(reduce: Callable[..., torch.Tensor]) -> Cut:
    def chunks(
        buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
    ) -> Iterator[Chunk]:
        flat = buffer.view(-1)
        for at in _spans(flat):
            chunk = flat[at]

            def take(slots: list[torch.Tensor], chunk: torch.Tensor = chunk) -> None:
                for other, slot in enumerate(slots):
                    part(chunk, other, size).copy_(part(slot, other, size))

            yield Chunk(chunk.numel(), chunk.dtype, _giving(chunk), take, reduce)

    return chunks


def all_gather(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Chunk]:
    flat, rows = buffer.view(-1), out.view(size, -1)
    for at in _spans(flat):
        chunk = flat[at]

        def take(slots: list[torch.Tensor], at: slice = at) -> None:
            for row, slot in zip(rows, slots, strict=True):
                row[at].copy_(slot)

        yield Chunk(chunk.numel(), chunk.dtype, _giving(chunk), take)


def _sent(buffer: torch.Tensor, out: torch.Tensor, gives: bool, source: int | None) -> Iterator[Chunk]:
    """This rank copies its buffer in if it `gives`, and copies the buffer of `source` out."""
    flat, result = buffer.view(-1), out.view(-1)
    for at in _spans(flat):
        chunk, arrived = flat[at], result[at]
        give = _giving(chunk) if gives else _nothing
        take = _nothing if source is None else _taking(source, arrived)
        yield Chunk(chunk.numel(), chunk.dtype, give, take)


def broadcast(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Chunk]:
    return _sent(buffer, out, rank == arguments[0], None if rank == arguments[0] else arguments[0])


def ppermute(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Chunk]:
    source_of = dict(zip(arguments[1::2], arguments[::2], strict=True))
    if rank not in source_of:
        out.zero_()
    return _sent(buffer, out, rank in source_of.values(), source_of.get(rank))


def gather(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Chunk]:
    if rank == arguments[0]:
        return all_gather(buffer, out, arguments, rank, size)
    out.zero_()
    return _sent(buffer, buffer, True, None)


def scatter(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Chunk]:
    result = out.view(-1)
    for chunk in _rows(buffer, size, lambda rows, at: result[at].copy_(rows[arguments[0]]), rank):
        yield chunk if rank == arguments[0] else replace(chunk, give=_nothing)


def _rows(
    buffer: torch.Tensor, size: int, take: Callable[[list[torch.Tensor], slice], object], rank: int
) -> Iterator[Chunk]:
    """Every rank has a row for each rank; `take` gets the rows for this rank, and where they belong."""
    rows = buffer.view(size, -1)
    for at in _spans(rows, size):
        chunk = rows[:, at]

        def take_mine(slots: list[torch.Tensor], at: slice = at) -> None:
            take([slot.view(size, -1)[rank] for slot in slots], at)

        yield Chunk(chunk.numel(), chunk.dtype, _giving(chunk), take_mine)


def all_to_all(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Chunk]:
    result = out.view(size, -1)

    def take(rows: list[torch.Tensor], at: slice) -> None:
        for mine, row in zip(result, rows, strict=True):
            mine[at].copy_(row)

    return _rows(buffer, size, take, rank)


def psum_scatter(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Chunk]:
    result = out.view(-1)

    def take(rows: list[torch.Tensor], at: slice) -> None:
        total = torch.add(rows[0], rows[1], out=result[at])
        for row in rows[2:]:
            total += row

    return _rows(buffer, size, take, rank)
