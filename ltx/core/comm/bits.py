"""The bits of a tensor as another dtype's: what only moves travels as bytes."""

from __future__ import annotations

from typing import Any

import torch

_VMAP_KNOWS_VIEW = torch._C._dispatch_has_kernel_for_dispatch_key("aten::view.dtype", "FuncTorchBatched")


class _View(torch.autograd.Function):
    """``x.view(dtype)`` under vmap, which has no rule for it in torch 2.11."""

    @staticmethod
    def forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        return view_as(x.movedim(in_dims[0], 0).contiguous(), dtype), 0


def view_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of `x` as numbers of `dtype`, as ``x.view(dtype)`` has them; without a gradient."""
    if _VMAP_KNOWS_VIEW or not torch._C._functorch.is_functorch_wrapped_tensor(x):
        return x.view(dtype)
    viewed: torch.Tensor = _View.apply(x, dtype)  # type: ignore[no-untyped-call]
    return viewed


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, in one more dimension at the end; a view."""
    return view_as(x.resolve_conj().resolve_neg().unsqueeze(-1), torch.uint8)


def from_bytes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`as_bytes`."""
    return view_as(x, dtype).squeeze(-1)
