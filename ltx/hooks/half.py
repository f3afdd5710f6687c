"""FP16 and BF16: the mean in half precision. Shares are rounded after the division by n, then summed as they are.

    ḡ = sum_r round16(g_r / n)

Dividing first keeps fp16 (largest number 65504) from overflowing where the mean itself doesn't; what does overflow
arrives as inf on every rank. bf16 has float32's range and 8 bits of precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ltx.hooks.allreduce import AllReduce


@dataclass(frozen=True)
class FP16(AllReduce):
    """The mean over ranks, sent as float16: half the bytes of float32. Works on CPU and CUDA.

    Gradients narrower than 32 bits travel as they are. Relative error of the sum: at most n rounding errors of 2^-11.

    Source: ``fp16_compress_hook`` of torch.distributed, which rounds before it divides.
    """

    exact: ClassVar[bool] = False

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16 if dtype in (torch.float32, torch.float64) else dtype


@dataclass(frozen=True)
class BF16(AllReduce):
    """The mean over ranks, sent as bfloat16: half the bytes of float32. Works on CPU and CUDA.

    Gradients narrower than 32 bits travel as they are. Relative error of the sum: at most n rounding errors of 2^-8.

    Source: ``bf16_compress_hook`` of torch.distributed, which refuses CPUs.
    """

    exact: ClassVar[bool] = False

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if dtype in (torch.float32, torch.float64) else dtype
