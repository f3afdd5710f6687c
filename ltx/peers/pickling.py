"""Objects as messages: pickles with tensors in them, of every dtype and device, each signed by its sender.

torch's own pickles lose unsigned and float8 tensors, load a tensor of the sender's accelerator on the receiver's
accelerator of the same number, and keep each sparse tensor that they make until somebody calls ``torch.load``. The
backend's connections have no authentication, so an object's bytes travel with a keyed digest (HMAC, RFC 2104) of the
bytes, the sending rank, and the number of the issue on the axis. A rank unpickles only bytes with the right digest.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
import pickle
import sys
from functools import partial, reduce
from types import CodeType
from typing import Any, cast

import cloudpickle
import torch

from ltx.core.base.errors import AuthenticationError
from ltx.core.comm.axis_comm import AxisComm
from ltx.core.comm.backends import accelerator
from ltx.core.comm.operations import SUMMED, as_bytes, from_bytes

#: For each sparse layout, the methods that give a tensor's parts (rows, columns, values).
_SPARSE: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values", "is_coalesced"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


class TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler. Tensors of every dtype travel, and code keeps its file's name, for tracebacks."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.device.type not in ("cpu", "meta"):
            return _on_own_device, (obj.detach().cpu(), obj.device.type, type(obj), obj.requires_grad)
        plain = type(obj) is torch.Tensor
        if plain and obj.layout is torch.strided and obj.dtype not in SUMMED and not obj.is_quantized:
            return _of_bytes, (as_bytes(obj.detach()).contiguous(), obj.dtype, obj.requires_grad)
        if plain and obj.layout in _SPARSE:
            parts = [getattr(obj.detach(), name)() for name in _SPARSE[obj.layout]]
            return _sparse, (obj.layout, parts, obj.shape, obj.requires_grad)
        if type(obj) is CodeType:
            make, made_of = self.dispatch_table[CodeType](obj)
            return make, tuple([obj.co_filename if part == "<dynamic-code>" else part for part in made_of])
        return super().reducer_override(obj)


class _PeerPickler(TensorPickler):
    """For peers, which run the same program. A class of its ``__main__`` is their own of that name, if they have one:
    cloudpickle's copy isn't equal to it in enums and dataclasses. One that they have keeps what was set there since.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj.__module__ == "__main__" and named("__main__", obj.__qualname__) is obj:
            return _of_peer, (obj.__qualname__, _pickled(TensorPickler, obj))
        made = super().reducer_override(obj)
        by_value = isinstance(obj, type) and isinstance(made, tuple) and len(made) == 6
        return (*made[:5], partial(_filled, made[5])) if by_value else made


def named(module: str, name: str) -> Any:
    """What this process has under the qualified `name` in `module`; None if there is nothing."""
    return reduce(lambda part, step: getattr(part, step, None), name.split("."), cast(Any, sys.modules.get(module)))


def _of_peer(name: str, pickled: bytes) -> Any:
    return found if isinstance(found := named("__main__", name), type) else pickle.loads(pickled)


def _filled(fill: Any, cls: type, state: Any) -> Any:
    return cls if state[0].keys() <= vars(cls).keys() else fill(cls, state)


def _pickled(pickler: type[TensorPickler], obj: Any) -> bytes:
    stream = io.BytesIO()
    pickler(stream).dump(obj)
    return stream.getvalue()


#: An object's pickle, for a peer.
dumps = partial(_pickled, _PeerPickler)


def _on_own_device(values: torch.Tensor, device_type: str, kind: type, requires_grad: bool) -> torch.Tensor:
    """Load a tensor of an accelerator on this process' own accelerator."""
    own = values.to(device_type) if accelerator() == device_type else values
    return torch.nn.Parameter(own, requires_grad) if kind is torch.nn.Parameter else own.requires_grad_(requires_grad)


def _of_bytes(moved: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    return from_bytes(moved, dtype).requires_grad_(requires_grad)


def _sparse(layout: torch.layout, parts: list[Any], shape: torch.Size, requires_grad: bool) -> torch.Tensor:
    first, second, third = parts
    if layout is torch.sparse_coo:
        made = torch.sparse_coo_tensor(first, second, shape, is_coalesced=third, check_invariants=False)
    else:
        made = torch.sparse_compressed_tensor(first, second, third, shape, layout=layout, check_invariants=False)
    return made.requires_grad_(requires_grad)


#: The environment variable of the job's key, which must be the same on all ranks.
KEY = "LTX_KEY"

_BYTES = hashlib.sha256().digest_size


def sealed(axis_comm: AxisComm, data: bytes, issue: int) -> bytes:
    """This rank's `data`, sealed, for the `issue`-th collective of the axis' user channel."""
    return _seal(axis_comm, data, axis_comm.rank, issue) + data


def opened(axis_comm: AxisComm, received: bytes, rank: int, issue: int) -> bytes:
    """What `rank` sealed. Raises :class:`AuthenticationError` if another process did."""
    seal, data = received[:_BYTES], received[_BYTES:]
    if not hmac.compare_digest(seal, _seal(axis_comm, data, rank, issue)):
        known = f"This rank's {KEY} is {'set' if os.environ.get(KEY) else 'not set'}"
        raise AuthenticationError(
            f"rank {axis_comm.rank}: an object from rank {rank} on axis {axis_comm.name!r} isn't sealed with the key "
            f"of this job, so it isn't unpickled. {known}: give all ranks of a job the same one, or none."
        )
    return data


def _seal(axis_comm: AxisComm, data: bytes, rank: int, issue: int) -> bytes:
    # Without a job key the seal still proves that the sender can read the store.
    key = os.environ.get(KEY) or axis_comm.peers.world
    about = f"{axis_comm.name} {axis_comm.peers.world} {rank} {issue} "
    return hmac.digest(key.encode(), about.encode() + data, "sha256")
