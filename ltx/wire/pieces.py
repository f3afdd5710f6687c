"""How each operation goes through shared memory: its buffer cut in pieces, each with what a rank gives and takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a buffer.

    Attributes:
        numel, dtype: what it takes in an arena.
        give: copies this rank's share into its slot.
        take: copies this rank's share of the result out of all ranks' slots.
        reduce: how two slots are combined in a reduction: ``(a, b, out=)``.
    """

    numel: int
    dtype: torch.dtype
    give: Callable[[torch.Tensor], object]
    take: Callable[[list[torch.Tensor]], object]
    reduce: Callable[..., torch.Tensor] | None = None


Cut = Callable[[torch.Tensor, torch.Tensor, tuple[int, ...], int, int], Iterator[Piece]]


def _spans(length: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, length)) for start in range(0, length, most))


def part(piece: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The part of a piece that `rank` reduces."""
    length = piece.numel()
    return piece[length * rank // size : length * (rank + 1) // size]


def _giving(piece: torch.Tensor) -> Callable[[torch.Tensor], object]:
    return lambda slot: slot.view(piece.shape).copy_(piece)


def _taking(source: int, to: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
    return lambda slots: to.copy_(slots[source])


def _nothing(_: object) -> None:
    pass


#: What a lane keeps in place of a piece that has been through it.
NO_PIECE = Piece(0, torch.uint8, _nothing, _nothing)


def _reduced(reduce: Callable[..., torch.Tensor]) -> Cut:
    def pieces(
        buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
    ) -> Iterator[Piece]:
        flat = buffer.view(-1)
        for at in _spans(flat.numel(), PIECE_BYTES // flat.element_size()):
            piece = flat[at]

            def take(slots: list[torch.Tensor], piece: torch.Tensor = piece) -> None:
                for other, slot in enumerate(slots):
                    part(piece, other, size).copy_(part(slot, other, size))

            yield Piece(piece.numel(), piece.dtype, _giving(piece), take, reduce)

    return pieces


def _gathered(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Piece]:
    flat, rows = buffer.view(-1), out.view(size, -1)
    for at in _spans(flat.numel(), PIECE_BYTES // flat.element_size()):
        piece = flat[at]

        def take(slots: list[torch.Tensor], at: slice = at) -> None:
            for row, slot in zip(rows, slots, strict=True):
                row[at].copy_(slot)

        yield Piece(piece.numel(), piece.dtype, _giving(piece), take)


def _sent(buffer: torch.Tensor, out: torch.Tensor, gives: bool, source: int | None) -> Iterator[Piece]:
    """This rank gives its buffer if it `gives`, and takes that of `source`."""
    flat, result = buffer.view(-1), out.view(-1)
    for at in _spans(flat.numel(), PIECE_BYTES // flat.element_size()):
        piece, arrived = flat[at], result[at]
        give = _giving(piece) if gives else _nothing
        take = _nothing if source is None else _taking(source, arrived)
        yield Piece(piece.numel(), piece.dtype, give, take)


def _broadcast(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Piece]:
    return _sent(buffer, out, rank == arguments[0], None if rank == arguments[0] else arguments[0])


def _permuted(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Piece]:
    source_of = dict(zip(arguments[1::2], arguments[::2], strict=True))
    return _sent(buffer, out, rank in source_of.values(), source_of.get(rank))


def _rows(
    buffer: torch.Tensor, size: int, take: Callable[[list[torch.Tensor], slice], object], rank: int
) -> Iterator[Piece]:
    """Every rank gives a row to each; `take` is handed the rows for this rank and where they belong."""
    rows = buffer.view(size, -1)
    for at in _spans(rows.shape[1], max(PIECE_BYTES // (rows.element_size() * size), 1)):
        piece = rows[:, at]

        def take_mine(slots: list[torch.Tensor], at: slice = at) -> None:
            take([slot.view(size, -1)[rank] for slot in slots], at)

        yield Piece(piece.numel(), piece.dtype, _giving(piece), take_mine)


def _exchanged(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Piece]:
    result = out.view(size, -1)

    def take(rows: list[torch.Tensor], at: slice) -> None:
        for mine, row in zip(result, rows, strict=True):
            mine[at].copy_(row)

    return _rows(buffer, size, take, rank)


def _scattered(
    buffer: torch.Tensor, out: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int
) -> Iterator[Piece]:
    result = out.view(-1)

    def take(rows: list[torch.Tensor], at: slice) -> None:
        total = torch.add(rows[0], rows[1], out=result[at])
        for row in rows[2:]:
            total += row

    return _rows(buffer, size, take, rank)


#: The operations of :mod:`ltx.wire.operations`: ``(buffer, out, arguments, rank, size)`` -> pieces.
CUTS: dict[str, Cut] = {
    "sum": _reduced(torch.add),
    "max": _reduced(torch.maximum),
    "min": _reduced(torch.minimum),
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
    "broadcast": _broadcast,
    "exchange": _exchanged,
    "permute": _permuted,
}


def memory_for(operation: str, buffer: torch.Tensor, arguments: tuple[int, ...], rank: int, size: int) -> torch.Tensor:
    """Memory for the value: the buffer itself where the operation works in place."""
    match operation:
        case "all_gather":
            return buffer.new_empty((size, *buffer.shape))
        case "reduce_scatter":
            return buffer.new_empty(buffer.shape[1:])
        case "exchange":
            return torch.empty_like(buffer)
        case "permute":
            return torch.empty_like(buffer) if rank in arguments[1::2] else torch.zeros_like(buffer)
        case _:
            return buffer
