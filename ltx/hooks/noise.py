"""Random numbers as a pure function of a seed, the step, the place in the gradients and the rank.

They are hashes of a counter, so simulated ranks, processes, compiled graphs and all devices draw the same numbers, and
there is no generator state that a checkpoint could miss. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011. The hash is the 32-bit finaliser of MurmurHash3 (Appleby, public domain), applied twice.
"""

from __future__ import annotations

from typing import Any

import torch

_MASK = 0xFFFFFFFF


def _mixed(x: Any) -> Any:
    """The hash of a 32-bit number, an int or an int64 tensor."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def key_of(*parts: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Hash several numbers (ints or 0-dim tensors) into one 0-dim key. Ints before the first tensor are hashed on the
    host: a device would need fourteen kernels for each.
    """
    key: Any = 0
    for part in parts:
        key = _mixed((key * 31 + (part if isinstance(part, torch.Tensor) else part & _MASK) + 0x9E3779B9) & _MASK)
    return key if isinstance(key, torch.Tensor) else torch.full((), key, dtype=torch.int64, device=device)


def bits(key: torch.Tensor, count: int) -> torch.Tensor:
    """`count` random integers below 2^32, of shape ``(count,)`` and dtype int64."""
    mixed: torch.Tensor = _mixed(_mixed((torch.arange(count, device=key.device) + key) & _MASK) ^ key)
    return mixed


def uniform(key: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` numbers in [0, 1), multiples of 2^-24."""
    return (bits(key, count) >> 8).to(dtype) * 2.0**-24


def normal(key: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` standard normal numbers, by Box and Muller's transform."""
    u, v = uniform(key, 2 * count, dtype).view(2, count)
    return torch.sqrt(-2 * torch.log(1 - u)) * torch.cos(2 * torch.pi * v)
