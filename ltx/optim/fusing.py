"""Which leaves may take torch's fused kernels, and how they have to lie in memory.

The fused CPU kernels walk through memory by number of elements and ignore strides (torch 2.13): a transposed or
expanded gradient, as ``torch.func.grad`` may well return, gives wrong parameters without a word, or reads past the end.
So a leaf whose tensors don't all lie in memory alike is run on copies that do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

Run = Callable[[list[Tensor], list[dict[str, Tensor]], list[Tensor]], None]


def fusable(cls: type[torch.optim.Optimizer], params: Sequence[Tensor]) -> list[bool]:
    """For each parameter, whether torch has a fused kernel of `cls` that works for its dtype and device."""
    kinds = [(param.dtype, param.device) for param in params]
    answers = {kind: _fusable(cls, *kind) for kind in set(kinds)}
    return [answers[kind] for kind in kinds]


def _fusable(cls: type[torch.optim.Optimizer], dtype: torch.dtype, device: torch.device) -> bool:
    # Fused SGD on CPU leaves half-precision parameters as they are and fills momentum with garbage, where a vector
    # lane is full (torch issue 191763, in 2.13 and before).
    if issubclass(cls, torch.optim.SGD) and device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        return False
    return dtype.is_floating_point and device.type in _get_fused_kernels_supported_devices()


def run_aligned(run: Run, grads: list[Tensor], states: list[dict[str, Tensor]], params: list[Tensor]) -> None:
    """``run(grads, states, params)``, in place, for a `run` that supposes that the tensors of a leaf lie alike."""
    in_states = chain.from_iterable(state.values() for state in states)
    if all(map(Tensor.is_contiguous, chain(grads, params, in_states))):
        run(grads, states, params)
        return
    leaves = [_aligned(*leaf) for leaf in zip(grads, states, params, strict=True)]
    run([leaf[0] for leaf in leaves], [leaf[1] for leaf in leaves], [leaf[2] for leaf in leaves])
    with torch.no_grad():
        for (_, new_state, new_param), state, param in zip(leaves, states, params, strict=True):
            for new, old in ((new_param, param), *((new_state[key], state[key]) for key in state)):
                if new is not old:
                    old.copy_(new)


def _aligned(grad: Tensor, state: dict[str, Tensor], param: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The leaf's tensors in one dense layout: the very tensors where they have it, else contiguous copies."""
    strides = param.stride()
    like_param: list[Any] = [tensor for tensor in state.values() if tensor.shape == param.shape]
    dense = torch.empty_like(param, device="meta").stride() == strides  # preserve_format keeps only dense strides
    if dense and all(tensor.stride() == strides for tensor in like_param):
        return grad if grad.stride() == strides else torch.empty_like(param).copy_(grad), state, param
    return grad.contiguous(), {key: tensor.contiguous() for key, tensor in state.items()}, param.contiguous()
