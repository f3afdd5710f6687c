"""Memory for buckets, reused at the next step.

The allocator would return it to the system, and the next step would fault it in again page by page. So an axis keeps
the memory of its last plan's buckets, and reuses it if nothing else refers to it, by torch's reference count. A program
that keeps a gradient, or an array or a view of one, keeps its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from math import prod

import torch

from ltx.core.base.private import storage_uses
from ltx.core.comm.transport import Transport

_KEPT = 2  # buffers of each bucket: one holds a step's gradients while the next step fills another


def _without_users() -> tuple[int, int]:
    """Of a tensor's storage, in a loop over a list: uses, and references, which in a call would depend on Dynamo."""
    for storage, _ in [((whole := torch.empty(1, device="cpu")).untyped_storage(), whole)]:
        found = storage_uses(storage._cdata) if storage_uses else 0, sys.getrefcount(storage)
    return found


_USES, _UNUSED = _without_users()


class BufferPool:
    """The memory of the buckets of one plan. It holds CPU tensors alone: on GPUs torch's allocator does the same."""

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport  # new memory for sums, which are read in place there, comes from it if it has room
        self._plan: Hashable = None
        self._kept: dict[tuple[int, bool], list[tuple[torch.UntypedStorage, torch.Tensor]]] = {}

    def clear(self) -> None:
        """Give the memory back, except buffers in use."""
        self._plan, self._kept = None, {}

    def take(
        self, plan: Hashable, place: int, summed: bool, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """An uninitialised tensor for the bucket at `place` of `plan`; memory of other plans is given back. `summed`:
        it is for a sum of all ranks; others may be resized, as torch's batched PowerSGD does: no shared memory.
        """
        if storage_uses is None or device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        if self._plan is not plan and self._plan != plan:
            self._plan, self._kept = plan, {}
        kept, nbytes = self._kept.setdefault((place, summed), []), prod(shape) * dtype.itemsize
        for storage, whole in kept:
            if whole.shape != shape or whole.dtype != dtype or storage.nbytes() != nbytes:
                continue
            # `storage_uses` counts tensors (`whole`) and arrays; `getrefcount` counts references to the storage object.
            if storage_uses(storage._cdata) == _USES and sys.getrefcount(storage) == _UNUSED:
                return whole.detach()  # faster than a new tensor on the storage
        new = self._transport.room(nbytes) if summed and self._transport is not None else None
        storage = new or torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        with torch.inference_mode(False):
            whole = torch.empty(0, dtype=dtype, device="cpu").set_(storage).resize_(shape)
        kept[:] = [*(other for other in kept if other[0].nbytes() == nbytes), (storage, whole)][-_KEPT:]
        return whole.detach()
