"""Pickles of objects with tensors in them, of every dtype and device.

torch's own lose unsigned and float8 ones, and bring a tensor of the sender's accelerator to the one of that number.
"""

from __future__ import annotations

import io
from typing import Any

import cloudpickle
import torch

from ltx.comm.operations import SUMMED
from ltx.comm.process_groups import as_bytes, from_bytes


class TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, for which a tensor that has no typed storage in torch is its bytes."""

    def reducer_override(self, obj: Any) -> Any:
        """As in :class:`pickle.Pickler`."""
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.device.type not in ("cpu", "meta"):
            return _on_own_device, (obj.detach().cpu(), obj.device.type, type(obj), obj.requires_grad)
        if (
            type(obj) is torch.Tensor
            and obj.layout is torch.strided
            and obj.dtype not in SUMMED
            and not obj.is_quantized
        ):
            return _of_bytes, (as_bytes(obj.detach()).contiguous(), obj.dtype, obj.requires_grad)
        return super().reducer_override(obj)


def dumps(obj: Any) -> bytes:
    """`obj` by cloudpickle."""
    stream = io.BytesIO()
    TensorPickler(stream).dump(obj)
    return stream.getvalue()


def _on_own_device(
    values: torch.Tensor, device_type: str, kind: type[torch.Tensor], requires_grad: bool
) -> torch.Tensor:
    """A tensor of an accelerator, on this process' own."""
    found = torch.accelerator.current_accelerator(check_available=True)
    moved = values.to(device_type) if found is not None and found.type == device_type else values
    return (
        torch.nn.Parameter(moved, requires_grad) if kind is torch.nn.Parameter else moved.requires_grad_(requires_grad)
    )


def _of_bytes(moved: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    return from_bytes(moved, dtype).requires_grad_(requires_grad)
