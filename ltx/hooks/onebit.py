"""OneBit: a sign for each number and one size for each block.

    C(x) = mean|x| * sign(x)    for each block of x; sign(0) = 1, sign(-0) = -1

Seide et al., "1-bit stochastic gradient descent", 2014, with the scale of Bernstein et al., "signSGD", 2018, and
Karimireddy et al., "Error feedback fixes SignSGD", 2019: with it |C(x) - x|^2 = (1 - |x|_1^2 / (d |x|^2)) |x|^2 for a
block of d numbers, so that C is a contraction and error feedback converges. Tang et al., "1-bit Adam", 2021, for the
two encodings, each with its error fed back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ltx.errors import StrategyError
from ltx.extend import CHUNK, arguments, chunks, is_plain
from ltx.hooks.lossy import CompressedAllReduce, from_message, to_message

#: Of the dtypes that numbers travel in: integers of their width, the bit of the sign, the bits of 1.
_BITS = {
    torch.float32: (torch.int32, -(1 << 31), 0x3F800000),
    torch.float64: (torch.int64, -(1 << 63), 0x3FF0000000000000),
}


@dataclass(frozen=True)
class OneBit(CompressedAllReduce):
    """One bit a gradient: about a thirtieth of float32's bytes. Meant to come after some exact steps.

    Args:
        block: numbers that share a size; a multiple of 8.
        error_feedback: keep what isn't sent for the next step. Without it training stalls far from its goal.

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
        return _mean_size(last.flatten())  # which leaves the block's size as it is

    def encode(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        if is_plain(rows):
            return self._in_chunks(rows, keep=False)
        sizes = _mean_size(rows.view(rows.shape[0], -1, self.block))
        return torch.cat([to_message(sizes), packed(torch.signbit(rows))], 1)

    def encode_and_keep(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        return self._in_chunks(rows, keep=True)

    def _in_chunks(self, rows: torch.Tensor, keep: bool) -> torch.Tensor:
        """:meth:`encode` chunk by chunk; to `keep` is to leave in `rows` what isn't sent."""
        k, count = rows.shape[0], rows.shape[1] // self.block
        head, word = count * rows.element_size(), self.block // 8
        messages = torch.empty((k, head + count * word), dtype=torch.uint8)
        most = min(max(CHUNK, self.block), rows.shape[1])
        memory, bytes_of = rows.new_empty(most), torch.empty(most, dtype=torch.int8)
        part, (whole, minus, one) = 2.0 ** -self.block.bit_length(), _BITS[rows.dtype]
        for row, message in zip(rows.view(k, count, self.block), messages, strict=True):
            sizes, bits = rows.new_empty(count, 1), message[head:].view(count, word)
            for some in chunks(count, self.block):
                chunk = row[some]
                signs, signs_short = (m[: chunk.numel()].view(chunk.shape) for m in (memory, bytes_of))
                torch.sum(torch.abs(chunk, out=signs).mul_(part), 1, keepdim=True, out=sizes[some])
                sizes[some].div_(self.block * part)
                # copysign of 1, in two passes that take two thirds of its time.
                torch.bitwise_and(chunk.view(whole), minus, out=signs.view(whole)).bitwise_or_(one)
                # torch converts to int8 five times as fast as it makes booleans.
                words = signs_short.copy_(signs).view(torch.int64)
                # Of eight bytes that are 1 or -1, bit 1 tells; the product has them side by side in its highest byte.
                gathered = words.bitwise_and_(0x0202020202020202).mul_(0x0081020408102040)
                bits[some].copy_(gathered.view(torch.uint8)[:, 7::8])
                if keep:
                    chunk.addcmul_(signs, sizes[some], value=-1)
            message[:head].copy_(to_message(sizes.view(-1)))
        return messages

    def decode(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        sizes, start = from_message(messages, 0, m // self.block, dtype)
        if is_plain(messages):
            table = _signs(messages.device, dtype)
            rows = torch.empty((len(messages), m // self.block, self.block), dtype=dtype)
            for row, message, size in zip(rows, messages, sizes, strict=True):
                bits = message[start:].view(-1, self.block // 8)
                for some in chunks(*row.shape):
                    chunk = row[some]
                    torch.index_select(table, 0, bits[some].reshape(-1).int(), out=chunk.view(-1, 8))
                    chunk.mul_(size[some, None])
            return rows.view(-1, m)
        signs = _signs(messages.device, dtype).index_select(0, messages[:, start:].reshape(-1).int())
        return signs.view(-1, m // self.block, self.block).mul_(sizes[..., None]).view(-1, m)


def _mean_size(x: torch.Tensor) -> torch.Tensor:
    part = 2.0 ** -x.shape[-1].bit_length()  # which rounds nothing, and the sum of so many parts doesn't overflow
    return (x.abs() * part).sum(-1) / (x.shape[-1] * part)


def packed(bits: torch.Tensor) -> torch.Tensor:
    """Eight booleans of the last dimension in a byte, the first in the lowest bit."""
    weights = (1 << torch.arange(8, device=bits.device)).to(torch.uint8)
    return (bits.reshape(*bits.shape[:-1], -1, 8) * weights).sum(-1, dtype=torch.uint8)


def _signs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The signs that each of the 256 bytes stands for, of shape (256, 8): a bit is set for a minus."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return (1 - 2 * bits).to(dtype)
