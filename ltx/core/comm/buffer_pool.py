"""Memory for buckets, reused at the next step.

A step's buckets are as large as the last one's. The allocator would return their memory to the system, and the next
step would fault it in again page by page. So an axis keeps the memory of its last plan's buckets, and reuses it at the
next step if nothing else refers to it, by torch's reference count. A program that keeps a gradient, or an array or a
view of one, keeps its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from math import prod

import torch

from ltx.core.base.private import storage_uses

#: Of each bucket: what one step's gradients lie in while the next step's come.
_KEPT = 2


def _references_without_users() -> int:
    """References to an object that is in a list which is gone through, as :meth:`BufferPool.take` does.

    Counted where it is, and not in a function that is called with it: what such a call holds depends on whether
    something, as Dynamo does, runs Python's frames in its place.
    """
    for storage in [torch.empty(1).untyped_storage()]:
        found = sys.getrefcount(storage)
    return found


_UNUSED = _references_without_users()


class BufferPool:
    """What the buckets of one plan lay in. Tensors on the CPU alone: on GPUs torch's allocator does the same."""

    def __init__(self) -> None:
        self._plan: Hashable = None
        self._kept: dict[int, list[torch.UntypedStorage]] = {}

    def clear(self) -> None:
        """Give all of it back, but for what is in use."""
        self._plan, self._kept = None, {}

    def take(
        self, plan: Hashable, place: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """An uninitialised tensor for the bucket at `place` of `plan`; what other plans lay in is given back."""
        if storage_uses is None or device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        if self._plan is not plan and self._plan != plan:
            self._plan, self._kept = plan, {}
        kept, nbytes = self._kept.setdefault(place, []), prod(shape) * dtype.itemsize
        for storage in kept:
            # Tensors and arrays count as uses of the memory; a reference to a storage is one to this very object.
            if storage.nbytes() == nbytes and storage_uses(storage._cdata) == 1 and sys.getrefcount(storage) == _UNUSED:
                again: torch.Tensor = torch.empty(0, dtype=dtype).set_(storage)
                return again if len(shape) == 1 else again.view(shape)
        made = torch.empty(shape, dtype=dtype)
        kept[:] = [*(storage for storage in kept if storage.nbytes() == nbytes), made.untyped_storage()][-_KEPT:]
        return made
