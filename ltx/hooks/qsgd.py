"""QSGD: stochastic rounding to a few levels of a block's norm, unbiased.

    Q(x_i) = |x| * sign(x_i) * l_i / s,   l_i = floor(s |x_i| / |x| + u_i),  u_i uniform in [0, 1),  |x| a block's norm

Alistarh et al., "QSGD: Communication-efficient SGD via gradient quantization and encoding", NeurIPS 2017, section 3.1:
E Q(x) = x and E|Q(x) - x|^2 <= min(d / s^2, sqrt(d) / s) |x|^2 for a block of d numbers (lemma 3.1). Levels travel as
bytes; the paper's Elias code isn't used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ltx.arguments import check_whole
from ltx.comm.process_groups import view_as
from ltx.errors import StrategyError
from ltx.gradients.reduction import BucketInput
from ltx.hooks.compressed_all_reduce import CompressedAllReduce, as_bytes, from_bytes
from ltx.hooks.noise import key_of, uniform


@dataclass(frozen=True)
class QSGD(CompressedAllReduce):
    """Stochastic eight-bit quantization whose expectation is the mean: a quarter of float32's bytes.

    Args:
        levels: s, at most 127.
        block: d, numbers that share a norm.
        seed: of the randomness, which is a function of seed, step, place and rank.
        error_feedback: keep what rounding loses for the next step; then the result isn't unbiased step by step.

    Source: see the head of this file.

    Example:
        >>> import ltx
        >>> ltx.hooks.QSGD(levels=15)
        QSGD(levels=15)
    """

    reads_step: ClassVar[bool] = True

    levels: int = 127
    block: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, 1, "levels", "block", most=2**24)
        if self.levels > 127:
            raise StrategyError(f"QSGD.levels must be at most 127, got {self.levels}.")

    def multiple(self) -> int:
        return self.block

    def keys(self, inputs: BucketInput) -> tuple[torch.Tensor, torch.Tensor]:
        place = (self.seed, inputs.step, inputs.bucket.index)
        first, second = (key_of(*place, turn, inputs.rank, device=inputs.flat.device) for turn in (0, 1))
        return first, second

    def encode(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        assert key is not None
        k, m = rows.shape
        blocks = rows.view(k, -1, self.block)
        norms = torch.linalg.vector_norm(blocks, dim=-1)
        scaled = blocks.abs() * (self.levels / torch.where(norms == 0, 1, norms))[..., None]
        drawn = uniform(key, rows.numel(), rows.dtype).view_as(blocks)
        levels = torch.floor(scaled + drawn).clamp(max=self.levels).copysign(blocks)
        return torch.cat([as_bytes(norms), view_as(levels.to(torch.int8), torch.uint8).view(k, m)], 1)

    def decode(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        norms, start = from_bytes(messages, 0, m // self.block, dtype)
        levels = view_as(messages[:, start:], torch.int8).to(dtype).view(-1, m // self.block, self.block)
        return (levels * (norms / self.levels)[..., None]).view(-1, m)
