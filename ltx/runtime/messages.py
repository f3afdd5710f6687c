"""What a pool's driver and its workers send each other, and how.

The driver sends one :class:`Setup`, then calls; the worker answers each with a :class:`Result` or a :class:`Failure`,
and may send what is to be seen meanwhile: anything with a method ``shown(rank, size)``, see :mod:`ltx.runtime.show`.

A message is pickles and the buffers that belong to them: the storages of tensors, the memory of arrays. Up to
:data:`INLINE_BYTES` of buffers are written to the socket. Larger buffers are written once into anonymous shared memory
(``memfd_create``: no name, no file, nothing that outlives its last user), and the socket carries its handle. The
receiver maps that memory copy on write: the buffers are its own, and cost no copy until they are written to. So few
bytes go through the socket that sending never waits for the receiver, which may have been stopped.

Only the two ends of an anonymous pair of sockets exchange messages, so bytes of other processes are never unpickled.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch

from ltx.core.comm.pickling import TensorPickler


@dataclass(frozen=True)
class Setup:
    """What a worker takes over from the driver before its first call."""

    search_path: list[str]
    threads: int
    shows_output: bool
    in_notebook: bool


@dataclass(frozen=True)
class Rendezvous:
    """The port of the store that rank 0's worker hosts: rank 0 tells the driver, the driver tells the others."""

    port: int


class Ready:
    """The worker's world is up."""


@dataclass(frozen=True)
class Call:
    """Do a call. The same message has the function, ``(args, kwargs)``, and the sources of :mod:`ltx.runtime.calls`."""

    number: int
    search_path: list[str] = field(default_factory=list)  # the driver's by now
    inherited: bool = False  # the message has nothing besides, since the worker is a fork that has all from the driver


@dataclass(frozen=True)
class Cancel:
    """Give that call up: KeyboardInterrupt is raised in it."""

    number: int


@dataclass(frozen=True)
class At:
    """Where a call was when it was asked to give up, ahead of its answer: for one that doesn't."""

    where: str
    raised: bool | None = None  # once it has had its time: whether KeyboardInterrupt was raised in it


@dataclass(frozen=True)
class Renew:
    """Take the world down and make a new one, the `count`-th: a call failed in the old one."""

    count: int


class Stop:
    """End."""


class Idle(str):
    """How a process ended that had no call to do, in words."""


@dataclass(frozen=True)
class Result:
    """A call returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """A call raised. What matters is text, so that it arrives whatever the exception is made of."""

    type_name: str
    message: str
    traceback_text: str  # of the user's own frames, if there are any, without those of ltx and of the worker
    at_s: float  # on the monotonic clock, which a machine's processes share: the driver can tell which rank was first
    where: str = ""  # the innermost frame, in words
    pickled: bytes | None = None  # the exception itself where it pickles
    cancelled: bool = False  # given up because the driver asked for it


#: A message with more bytes of buffers than these sends them through shared memory.
INLINE_BYTES = 1 << 16
_ALIGNMENT = 64
_MAY_SHARE = hasattr(os, "memfd_create")
_HEAD = struct.Struct("<I?")  # how many buffers, and whether they are in shared memory; their sizes follow


class Message:
    """Pickled objects, and buffers with the memory of their tensors and arrays. It can be sent more than once.

    Shared memory is made with it, not on the way: that there is no more is an OSError of who makes it, and no sign that
    the other end is gone.
    """

    def __init__(self, pickled: bytes, buffers: Sequence[memoryview] = ()):
        self.pickled = pickled
        self._views = [*buffers, memoryview(pickled)]
        through_memory = _MAY_SHARE and sum(view.nbytes for view in self._views) > INLINE_BYTES
        self._shared = _written(self._views) if through_memory else None

    def send(self, connection: Connection) -> None:
        """Write it to `connection`. Raises OSError if the other end is closed."""
        sizes = struct.pack(f"<{len(self._views)}q", *(view.nbytes for view in self._views))
        head = [_HEAD.pack(len(self._views), self._shared is not None), sizes]
        connection.send_bytes(b"".join([*head, *(self._views if self._shared is None else ())]))
        if self._shared is not None:
            reduction.send_handle(connection, self._shared.fileno(), 0)

    def close(self) -> None:
        """Let go of the shared memory; receivers keep theirs."""
        if self._shared is not None:
            self._shared.close()


def pack(value: Any) -> Message:
    """`value` as a message. Functions and classes of ``__main__`` and of the like travel by value (cloudpickle)."""
    pickler = Pickler()
    pickler.dump(value)
    return pickler.message()


def receive(connection: Connection) -> Callable[[], Any]:
    """Read a message; the result unpickles its next object. Raises EOFError or OSError if the sender is gone."""
    received = memoryview(connection.recv_bytes())
    count, shared = _HEAD.unpack_from(received)
    sizes = struct.unpack_from(f"<{count}q", received, _HEAD.size)
    buffers: list[Any]
    if shared:
        handle, offsets = reduction.recv_handle(connection), _offsets(sizes)
        try:
            whole = memoryview(mmap.mmap(handle, offsets[-1], access=mmap.ACCESS_COPY))
        finally:
            os.close(handle)
        buffers = [whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)]
    else:
        ends = accumulate(sizes, initial=_HEAD.size + 8 * count)
        buffers = [bytearray(received[begin:end]) for begin, end in pairwise(ends)]
    return pickle.Unpickler(io.BytesIO(buffers.pop()), buffers=buffers).load


class Pickler(TensorPickler):
    """cloudpickle's pickler, except that the memory of tensors and arrays becomes buffers of the message."""

    def __init__(self) -> None:
        self._stream, self._buffers = io.BytesIO(), list[memoryview]()
        super().__init__(self._stream, protocol=5, buffer_callback=lambda buffer: self._buffers.append(buffer.raw()))

    def reducer_override(self, obj: Any) -> Any:
        """A storage is one object, whichever tensors share it, and so it is a buffer once."""
        if isinstance(obj, torch.storage.TypedStorage):
            return _typed, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            flat: Any = torch.empty(0, dtype=torch.uint8).set_(obj)
            return _storage, (pickle.PickleBuffer(flat.numpy()),)
        return super().reducer_override(obj)

    def message(self) -> Message:
        return Message(self._stream.getvalue(), self._buffers)

    @property
    def nbytes(self) -> int:
        return self._stream.tell() + sum(view.nbytes for view in self._buffers)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _storage(buffer: Any) -> torch.UntypedStorage:
    flat = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
    return flat.untyped_storage()


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each buffer begins in the shared memory, and where the last one ends."""
    offsets = [0]
    for size in sizes:
        offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _written(views: Sequence[memoryview]) -> io.FileIO:
    """New shared memory that holds `views`; Python warns where the memory isn't closed."""
    offsets = _offsets([view.nbytes for view in views])
    file = io.FileIO(os.memfd_create("ltx-message", os.MFD_CLOEXEC), "r+")
    try:
        file.truncate(offsets[-1])
        for view, offset in zip(views, offsets, strict=False):
            done = 0
            while done < view.nbytes:
                done += os.pwrite(file.fileno(), view[done:], offset + done)
    except BaseException:
        file.close()
        raise
    return file
