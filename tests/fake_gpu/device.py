"""A device of Python's with real values behind it, which behaves towards its caller as CUDA does:

* Tensors of two devices don't mix, but for 0-dim CPU tensors in arithmetic, and CPU tensors as indices.
* What needs a value, or copies from or to memory that isn't pinned, waits for the device: :data:`waits` has the place.

From :func:`register` on it is an accelerator to torch, so only processes of its own have it.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ltx.core.base import private

DEVICE = torch.device("privateuseone", 0)
_ops: Any = torch.ops.aten

#: Where ltx waited for the device, and in what.
waits: Counter[str] = Counter()

#: What takes CPU tensors with dimensions beside those of the device.
_MIXES = (_ops.copy_.default, _ops._to_copy.default, _ops.index.Tensor, _ops.index_put_.default, _ops.index_put.default)
#: What takes no 0-dim CPU tensor beside those of the device either.
_LISTS = (_ops.stack.default, _ops.cat.default)
_READS = [x.default for x in (_ops._local_scalar_dense, _ops.is_nonzero, _ops.equal, _ops.nonzero, _ops.masked_select)]


def register() -> None:
    _setup_privateuseone_for_python_backend("fakegpu")


class OnDevice(torch.Tensor):
    """A tensor of the device; its values lie in `behind`, on the CPU."""

    behind: torch.Tensor

    @staticmethod
    def __new__(cls, behind: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            behind.size(),
            strides=behind.stride(),
            storage_offset=behind.storage_offset(),
            dtype=behind.dtype,
            layout=behind.layout,
            device=DEVICE,
        )
        made.behind = behind
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.behind.untyped_storage()

    def data_ptr(self) -> int:
        return self.behind.data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _note_wait(what: str) -> None:
    frames = [frame for frame in traceback.extract_stack() if "/ltx/" in frame.filename]
    place = f"{frames[-1].filename.rpartition('/ltx/')[2]}: {frames[-1].name}" if frames else "outside of ltx"
    waits[f"{place} ({what})"] += 1


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, OnDevice)]
    others = [x for x in tensors if not isinstance(x, OnDevice)]
    asked = kwargs.get("device")
    to = None if asked is None else torch.device(asked).type
    if not ours and to != DEVICE.type:
        return _on_the_host(func, args, kwargs)
    copies = func is _ops.copy_.default
    if ours and others and func not in _MIXES and (func in _LISTS or any(x.ndim for x in others)):
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {func} of {[list(x.shape) for x in others]}"
        )
    if ours and func._schema.is_mutable and not copies and not isinstance(args[0], list | tuple | OnDevice):
        raise RuntimeError(f"Expected all tensors to be on the same device: {func} writes to a CPU tensor")
    crosses = bool(others) if copies else func is _ops._to_copy.default and bool(ours) is (to == "cpu")
    if func in _READS:
        _note_wait(func.name())
    elif crosses:
        there = func is _ops._to_copy.default and bool(ours)  # memory of the host that torch itself takes is pinned
        ahead = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        if not ahead or not (there or all(getattr(x, "in_pinned_memory", False) for x in others)):
            _note_wait("a copy to or from the CPU")
    plain_args, plain = tree_map(lambda x: x.behind if isinstance(x, OnDevice) else x, (args, kwargs))
    if asked is not None:
        plain["device"] = "cpu"
        plain.pop("pin_memory", None)
    results = func(*plain_args, **plain)
    on_device = to == DEVICE.type if asked is not None else bool(ours)
    if copies:
        return args[0]
    if not on_device or not any(isinstance(x, torch.Tensor) for x in tree_leaves(results)):
        return results
    results = tree_map_only(torch.Tensor, OnDevice, results)
    return return_and_correct_aliasing(func, args, kwargs, results) if ours else results


def _on_the_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func`; memory that is pinned is marked, as torch has none without a GPU."""
    if func is _ops.is_pinned.default:
        return getattr(args[0], "in_pinned_memory", False)
    pinned = kwargs.pop("pin_memory", None)
    made = func(*args, **kwargs)
    if pinned:
        made.in_pinned_memory = True
    return made


@contextmanager
def device() -> Iterator[None]:
    """Factories know the device."""
    tensor = torch.tensor

    def copied(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != DEVICE.type:
            return tensor(data, dtype=dtype, device=device, **options)
        _note_wait("torch.tensor(device=)")  # from memory that isn't pinned
        return OnDevice(tensor(data, dtype=dtype, **options))

    has_memory = private.has_memory

    def holds(x: torch.Tensor) -> bool:
        return isinstance(x, OnDevice) or has_memory(x)

    torch.tensor = copied  # type: ignore[assignment]
    try:
        # The class and the mode aren't a user's: they are the device.
        with patch.object(private, "has_memory", holds), patch.object(private, "below_modes", nullcontext), _Mode():
            yield
    finally:
        torch.tensor = tensor


def put(values: Any) -> Any:
    return tree_map_only(torch.Tensor, OnDevice, values)


def got(values: Any) -> Any:
    """A tree's tensors on the CPU, none of which may have come off the device before."""

    def behind(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, OnDevice) and x.ndim:
            raise AssertionError(f"a result of shape {list(x.shape)} is on the CPU")
        return x.behind if isinstance(x, OnDevice) else x

    return tree_map_only(torch.Tensor, behind, values)
