"""Digests of tensors, fast enough to be taken now and then in training: 42 MB in some 6 ms on one thread."""

from __future__ import annotations

import ctypes
import hashlib

import torch

from ltx.placements import local
from ltx.transforms.sync_state import plain_values

_COLUMNS = 512
#: Below so many words of 8 bytes a cryptographic digest of everything costs as little.
_SMALL = 8 * _COLUMNS


def values(x: torch.Tensor) -> torch.Tensor:
    """`x` below all wrappers, its elements one after another in memory; of a DTensor this rank's part."""
    return plain_values(local(x)).resolve_conj().resolve_neg().contiguous()


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that :func:`values` gave."""
    return x.view(-1).view(torch.uint8)


def digest(x: torch.Tensor) -> str:
    """Equal for equal bits, and different for others as good as always; "" for no elements.

    Sums of 64-bit words, modulo 2^64, over rows and over columns: changes that leave all of these as they were come by
    fours at least, at the corners of rectangles. (``torch.hash_tensor``, an exclusive or, is the same for elements in
    another order.)
    """
    data = bits(x)
    if not data.numel():
        return ""
    found, words = hashlib.blake2b(digest_size=16), data.numel() // (8 * _COLUMNS) * _COLUMNS
    if words >= _SMALL:
        head = data[: 8 * words]
        table = (head if head.storage_offset() % 8 == 0 else head.clone()).view(torch.int64).view(-1, _COLUMNS)
        found.update(_bytes(table.sum(1)))
        found.update(_bytes(table.sum(0)))
        data = data[8 * words :]
    if data.numel():
        found.update(_bytes(data))
    return found.hexdigest()


def _bytes(x: torch.Tensor) -> bytes:
    x = x.cpu()
    return ctypes.string_at(x.data_ptr(), x.numel() * x.itemsize)
