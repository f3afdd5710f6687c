"""OneBit: a sign for each number and one size for each block.

    C(x) = mean|x| * sign(x)    for each block of x; sign(0) = 1

Seide et al., "1-bit stochastic gradient descent", 2014, with the scale of Bernstein et al., "signSGD", 2018, and
Karimireddy et al., "Error feedback fixes SignSGD", 2019: with it |C(x) - x|^2 = (1 - |x|_1^2 / (d |x|^2)) |x|^2 for a
block of d numbers, so that C is a contraction and error feedback converges. Tang et al., "1-bit Adam", 2021, for the
two encodings, each with its error fed back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ltx.errors import StrategyError
from ltx.hooks.base import check_whole
from ltx.hooks.scattered import ScatteredHook, as_bytes, from_bytes
from ltx.sync.reduction import is_plain


@dataclass(frozen=True)
class OneBit(ScatteredHook):
    """One bit a gradient: about a thirtieth of float32's bytes. Meant to come after some exact steps.

    Args:
        block: numbers that share a size; a multiple of 8.
        error_feedback: keep what isn't sent for the next step. Without it training stalls far from its goal.

    Source: see the head of this file.

    Example:
        >>> import ltx
        >>> ltx.hooks.after(100, ltx.hooks.OneBit())
        After(step=100, hook=OneBit())
    """

    block: int = 512
    error_feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_whole(self, 1, "block")
        if self.block % 8:
            raise StrategyError(f"OneBit.block must be a multiple of 8, got {self.block}.")

    def multiple(self) -> int:
        return self.block

    def encode(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        sizes = rows.view(rows.shape[0], -1, self.block).abs().mean(-1)
        return torch.cat([as_bytes(sizes), packed(_positive(rows))], 1)

    def decode(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        sizes, start = from_bytes(messages, 0, m // self.block, dtype)
        signs = _signs(messages.device, dtype).index_select(0, messages[:, start:].reshape(-1).int())
        return signs.view(-1, m // self.block, self.block).mul_(sizes[..., None]).view(-1, m)


def _positive(x: torch.Tensor) -> torch.Tensor:
    """1 where x >= 0, else 0, in x' dtype."""
    if is_plain(x):  # without the booleans between
        return torch.ge(x, 0, out=torch.empty_like(x))
    return (x >= 0).to(x.dtype)


def packed(bits: torch.Tensor) -> torch.Tensor:
    """Eight floating zeros and ones of the last dimension in a byte, the first in the lowest bit."""
    weights = (1 << torch.arange(8, device=bits.device)).to(bits.dtype)
    return torch.mv(bits.reshape(-1, 8), weights).to(torch.int16).to(torch.uint8).view(*bits.shape[:-1], -1)


def _signs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The signs that each of the 256 bytes stands for, of shape (256, 8)."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return (2 * bits - 1).to(dtype)
