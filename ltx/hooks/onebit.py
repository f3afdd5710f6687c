"""OneBit: sends a sign for each number, and one magnitude for each block.

    C(x) = mean|x| * sign(x)    for each block of x; sign(0) = 1, sign(-0) = -1

The scale is that of Karimireddy et al., "Error feedback fixes SignSGD", 2019. With it, for a block of d numbers,
|C(x) - x|^2 = (1 - |x|_1^2 / (d |x|^2)) |x|^2, so C is a contraction and error feedback converges.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ltx.errors import StrategyError
from ltx.extend import arguments, buffers
from ltx.hooks.lossy import CompressedAllReduce, from_message, to_message

#: For each dtype in which numbers are sent: (integer dtype of the same width, the sign's bit, the bits of 1.0).
_BITS = {
    torch.float32: (torch.int32, -(1 << 31), 0x3F800000),
    torch.float64: (torch.int64, -(1 << 63), 0x3FF0000000000000),
}


@dataclass(frozen=True)
class OneBit(CompressedAllReduce):
    """One bit a number, about a thirtieth of float32's bytes. Use it after some steps with exact gradients.

    Args:
        block: the number of numbers that share a magnitude; a multiple of 8.
        error_feedback: keep what isn't sent for the next step. Without it training stops improving early.

    Source: Seide et al., 2014; Bernstein et al., "signSGD", 2018; Tang et al., "1-bit Adam", ICML 2021.

    Example:
        >>> import ltx
        >>> ltx.hooks.after(100, ltx.hooks.OneBit())
        After(step=100, hook=OneBit())
    """

    block: int = 512
    error_feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "block", most=2**24)
        if self.block % 8:
            raise StrategyError(f"OneBit.block must be a multiple of 8, got {self.block}.")

    def multiple(self) -> int:
        return self.block

    def filling(self, last: torch.Tensor) -> torch.Tensor:
        return _mean_size(last.flatten())  # padding with the mean doesn't change the block's mean

    def encode(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        if buffers.is_plain(rows):
            return self._in_chunks(rows, keep=False)
        sizes = _mean_size(rows.view(rows.shape[0], -1, self.block))
        return torch.cat([to_message(sizes), packed(torch.signbit(rows))], 1)

    def encode_and_keep(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        return self._in_chunks(rows, keep=True)

    def _in_chunks(self, rows: torch.Tensor, keep: bool) -> torch.Tensor:
        """:meth:`encode` chunk by chunk. With `keep`, `rows` hold what isn't sent afterwards."""
        k, count = rows.shape[0], rows.shape[1] // self.block
        head, word = count * rows.element_size(), self.block // 8
        messages = torch.empty((k, head + count * word), dtype=torch.uint8, device="cpu")
        most = min(max(buffers.CHUNK, self.block), rows.shape[1])
        memory, bytes_of = rows.new_empty(most), torch.empty(most, dtype=torch.int8, device="cpu")
        part, (whole, minus, one) = 2.0 ** -self.block.bit_length(), _BITS[rows.dtype]
        for row, message in zip(rows.view(k, count, self.block), messages, strict=True):
            sizes, bits = rows.new_empty(count, 1), message[head:].view(count, word)
            for some in buffers.chunks(count, self.block):
                chunk = row[some]
                signs, signs_short = (m[: chunk.numel()].view(chunk.shape) for m in (memory, bytes_of))
                torch.sum(torch.abs(chunk, out=signs).mul_(part), 1, keepdim=True, out=sizes[some])
                sizes[some].div_(self.block * part)
                # As torch.copysign of 1, but in two passes that take two thirds of its time.
                torch.bitwise_and(chunk.view(whole), minus, out=signs.view(whole)).bitwise_or_(one)
                # torch converts to int8 five times faster than it computes booleans.
                words = signs_short.copy_(signs).view(torch.int64)
                # Bit 1 tells a byte of 1 from one of -1; the product puts these bits of 8 bytes into its highest byte.
                gathered = words.bitwise_and_(0x0202020202020202).mul_(0x0081020408102040)
                bits[some].copy_(gathered.view(torch.uint8)[:, 7::8])
                if keep:
                    chunk.addcmul_(signs, sizes[some], value=-1)
            message[:head].copy_(to_message(sizes.view(-1)))
        return messages

    def decode(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        sizes, start = from_message(messages, 0, m // self.block, dtype)
        if buffers.is_plain(messages):
            table = _signs(messages.device, dtype)
            rows = torch.empty((len(messages), m // self.block, self.block), dtype=dtype, device="cpu")
            for row, message, size in zip(rows, messages, sizes, strict=True):
                bits = message[start:].view(-1, self.block // 8)
                for some in buffers.chunks(*row.shape):
                    chunk = row[some]
                    torch.index_select(table, 0, bits[some].reshape(-1).int(), out=chunk.view(-1, 8))
                    chunk.mul_(size[some, None])
            return rows.view(-1, m)
        signs = _signs(messages.device, dtype).index_select(0, messages[:, start:].reshape(-1).int())
        return signs.view(-1, m // self.block, self.block).mul_(sizes[..., None]).view(-1, m)


def _mean_size(x: torch.Tensor) -> torch.Tensor:
    part = 2.0 ** -x.shape[-1].bit_length()  # a power of two rounds nothing, and keeps the sum from overflowing
    return (x.abs() * part).sum(-1) / (x.shape[-1] * part)


def packed(bits: torch.Tensor) -> torch.Tensor:
    """Pack each eight booleans along the last dimension into a byte, the first into the lowest bit."""
    weights = (1 << torch.arange(8, device=bits.device)).to(torch.uint8)
    return (bits.reshape(*bits.shape[:-1], -1, 8) * weights).sum(-1, dtype=torch.uint8)


def _signs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A table of shape (256, 8): the eight signs of each byte. A set bit means minus."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return (1 - 2 * bits).to(dtype)
