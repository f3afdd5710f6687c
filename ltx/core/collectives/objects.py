"""Objects between ranks: broadcast_object, all_gather_object, barrier.

They have no gradient, and but for the barrier no form under :func:`ltx.vmap`.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any, TypeVar

import torch

from ltx.core import comm
from ltx.core.base.arguments import checked
from ltx.core.base.errors import AxisError
from ltx.core.collectives.calls import check_index
from ltx.core.collectives.uneven import told
from ltx.core.comm.pickling import dumps
from ltx.core.ranks.axis import Axis

T = TypeVar("T")


@checked("src")
def broadcast_object(obj: T, src: int = 0, axis: Any = None) -> T:
    """Rank `src`'s object, on every rank.

    The object travels by cloudpickle between the processes of one job, which trust each other. It is sealed with the
    job's key, ``LTX_KEY`` in the environment: ``ltx run`` on one machine, :func:`ltx.launch` and :class:`ltx.Pool`
    make one. Without, with one that the ranks agree on through their store.

    Args:
        obj: anything cloudpickle can carry; only `src`'s matters. Tensors of an accelerator come to the receiver's own.
        src: an index on the axis (not a rank of the world), 0 to n - 1.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: a copy of `src`'s object; on `src` the object itself.

    Raises:
        AxisError: `axis` isn't in scope or is one of ``ltx.vmap``, or `src` isn't on it.
        AuthenticationError: the object isn't from a rank of this job.
        TypeError: `src`'s object can't be pickled; on every rank, so that nobody waits.

    Example:
        >>> import ltx
        >>> ltx.broadcast_object({"lr": 0.1})  # a world of one
        {'lr': 0.1}
    """
    found = comm.resolve(axis)
    check_index("broadcast_object", "src", src, found.size)
    among: Any = found.threads or _axis_comm("broadcast_object", found)
    if among is None:
        return obj
    if found.threads:
        mine = _dumped(obj) if among.rank == src else None
        data, failed = among.exchange(comm.Signature("broadcast_object", (), f"src={src}"), mine)[src]
    else:
        data, failed = _broadcast(obj, src, among)
    if failed:
        raise _unpicklable("broadcast_object", src, data)
    return obj if among.rank == src else pickle.loads(data)


def all_gather_object(obj: T, axis: Any = None) -> list[T]:
    """Every rank's object, on every rank.

    Args:
        obj: anything cloudpickle can carry, of any size on each rank. Tensors of an accelerator arrive
            on the receiver's own.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: a list of the ranks' objects by rank: copies, and at its own place the object itself.

    Raises:
        AxisError: `axis` isn't in scope or is one of ``ltx.vmap``.
        AuthenticationError: as for :func:`broadcast_object`.
        TypeError: a rank's object can't be pickled; on every rank, so that nobody waits.

    Example:
        >>> import ltx
        >>> ltx.all_gather_object("here")  # a world of one
        ['here']
    """
    found = comm.resolve(axis)
    among: Any = found.threads or _axis_comm("all_gather_object", found)
    if among is None:
        return [obj]
    if found.threads:
        rows = among.exchange(comm.Signature("all_gather_object", ()), _dumped(obj))
    else:
        rows = _gathered(obj, found, among)
    for rank, (text, broken) in enumerate(rows):
        if broken:
            raise _unpicklable("all_gather_object", rank, text)
    return [obj if rank == among.rank else pickle.loads(text) for rank, (text, _) in enumerate(rows)]


def _broadcast(obj: Any, src: int, axis_comm: comm.AxisComm) -> tuple[bytes, bool]:
    """Rank `src`'s object as bytes, or what went wrong, and True."""
    issue = axis_comm.user.issued
    payload, broken = _pickled(obj, axis_comm, issue) if axis_comm.rank == src else (b"", False)
    axis_comm.negotiate_issue(
        axis_comm.user, ("broadcast_object", src), lambda: comm.Signature("broadcast_object", (), f"src={src}")
    )
    told_of = torch.tensor([len(payload), broken])
    header = axis_comm.user.issue("broadcast", told_of, "broadcast_object", (src,), on_host=True).wait()
    length, failed = int(header[0]), bool(header[1])
    body = torch.empty(length, dtype=torch.uint8, device=axis_comm.device)
    if axis_comm.rank == src and length:
        body.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    if length:
        body = axis_comm.user.issue("broadcast", body, "broadcast_object", (src,)).wait()
    data = _bytes_of(body.cpu())
    return (data if failed or axis_comm.rank == src else comm.opened(axis_comm, data, src, issue)), failed


def _gathered(obj: Any, axis: Axis, axis_comm: comm.AxisComm) -> list[tuple[bytes, bool]]:
    """By rank: its object as bytes, or what went wrong, and True."""
    issue = axis_comm.user.issued
    payload, failed = _pickled(obj, axis_comm, issue)
    sizes = told("all_gather_object", [len(payload), int(failed)], axis)
    most = max(length for length, _ in sizes)
    body = torch.zeros(most, dtype=torch.uint8)
    if payload:
        body[: len(payload)].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    rows = axis_comm.user.issue("all_gather", body, "all_gather_object", on_host=True).wait()
    texts = [_bytes_of(row[:length]) for row, (length, _) in zip(rows, sizes, strict=True)]
    return [
        (text if broken or rank == axis_comm.rank else comm.opened(axis_comm, text, rank, issue), bool(broken))
        for rank, (text, (_, broken)) in enumerate(zip(texts, sizes, strict=True))
    ]


def _pickled(obj: Any, axis_comm: comm.AxisComm, issue: int) -> tuple[bytes, bool]:
    """The object as sealed bytes, or what went wrong, which must reach every rank."""
    payload, failed = _dumped(obj)
    return payload if failed else comm.sealed(axis_comm, payload, issue), failed


def _dumped(obj: Any) -> tuple[bytes, bool]:
    """The object as bytes; or what went wrong, and True."""
    try:
        return dumps(obj), False
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}".encode(), True


def _unpicklable(what: str, rank: int, text: bytes) -> TypeError:
    return TypeError(f"{what}: rank {rank}'s object can't be pickled: {text.decode()}")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    # Without NumPy, which torch can do without.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""


@checked("name")
def barrier(name: str | None = None, axis: Any = None) -> None:
    """Return once every rank of the axis has come here, and its accelerator has done what was enqueued before.

    Args:
        name: what errors call it; ranks must give the same one.
        axis: as in :func:`ltx.psum`. On the ranks of :func:`ltx.vmap`, which run in lockstep, it does nothing.

    Raises:
        RankMismatchError: ranks stand at barriers of different names, or at something else.

    Example:
        >>> import ltx
        >>> ltx.barrier("before evaluation")
    """
    found = comm.resolve(axis)
    label = f"barrier {name!r}" if name else "barrier"
    if found.threads:
        found.threads.exchange(comm.Signature(label, ()))
    if found.comm is None:
        return
    axis_comm: comm.AxisComm = found.comm
    axis_comm.negotiate_issue(axis_comm.user, label, lambda: comm.Signature(label, ()))
    if axis_comm.device.type != "cpu":
        axis_comm.read(torch.zeros(1, device=axis_comm.device), label)
    axis_comm.user.issue("psum", torch.zeros(1), label, on_host=True).wait()


def _axis_comm(what: str, axis: Axis) -> comm.AxisComm | None:
    if axis.simulated:
        raise AxisError(
            f"{what} has no form under ltx.vmap: the ranks of axis {axis.name!r} share all objects. Use the object "
            "itself, or ltx.broadcast for tensors; or give each rank its own with ltx.simulate."
        )
    found: comm.AxisComm | None = axis.comm
    return found
