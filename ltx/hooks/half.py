"""FP16 and BF16: the mean in half precision. Gradients are divided by n, rounded, and summed in half precision.

    ḡ = sum_r round16(g_r / n)

Dividing first keeps fp16 (largest number 65504) from overflowing unless the mean itself does; an overflow arrives as
inf on every rank. bf16 has float32's range and 8 bits of precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ltx.extend import BucketInput, CollectiveRequest, Packing
from ltx.hooks.lossy import CompressedAllReduce, Compression, CompressionResult, from_message, to_message

_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class HalfHook(CompressedAllReduce):
    """The sum over ranks of numbers rounded to `short`; with error feedback, of messages that are summed in their own
    dtype, since no rank could feed back what a sum in half precision rounds off.
    """

    reach: ClassVar[str] = "element"
    sums: ClassVar[bool] = True
    short: ClassVar[torch.dtype]

    @property
    def phases(self) -> int:  # type: ignore[override]
        return 2 if self.error_feedback else 1

    def encode(self, rows: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
        return to_message(rows.to(self.short))

    def decode(self, messages: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        return from_message(messages, 0, m, self.short)[0].to(dtype)

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        if self.error_feedback:
            return super().packing(dtype, axis_size)
        return Packing(self.short if dtype in _WIDE else dtype, 1.0 / axis_size, 1.0 / axis_size)

    def send(self, inputs: BucketInput) -> Compression:
        if self.error_feedback:
            return (yield from super().send(inputs))
        total = yield CollectiveRequest("psum", inputs.flat)
        return CompressionResult(total, lambda: inputs.flat, inputs.states)


@dataclass(frozen=True)
class FP16(HalfHook):
    """The mean over ranks, sent as float16: half the bytes of float32. Works on CPU and CUDA.

    Gradients narrower than 32 bits are sent unchanged. Relative error of the sum: at most n rounding errors of 2^-11. A
    gradient that, divided by n, is below 3e-8 arrives as 0, and one above 65504 as inf; use :class:`BF16` for these.

    Args:
        error_feedback: keep what rounding loses for the next step.

    Source: ``fp16_compress_hook`` of torch.distributed, which rounds before it divides.
    """

    short: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class BF16(HalfHook):
    """The mean over ranks, sent as bfloat16: half the bytes of float32. Works on CPU and CUDA.

    Gradients narrower than 32 bits are sent unchanged. Relative error of the sum: at most n rounding errors of 2^-8.

    Args:
        error_feedback: keep what rounding loses for the next step.

    Source: ``bf16_compress_hook`` of torch.distributed, which refuses CPUs.
    """

    short: ClassVar[torch.dtype] = torch.bfloat16
