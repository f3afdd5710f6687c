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
    caught: bool = False  # KeyboardInterrupt was raised in it, and it goes on all the same


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
_COUNTS = struct.Struct("<II?")  # buffers of storages, other buffers, whether they are in shared memory
_SIZE = struct.Struct("<q")


@dataclass(frozen=True)
class Message:
    """Pickled objects with their buffers: those of tensors' storages, and `others`. It can be sent more than once.

    Shared memory is made with it, not on the way: that there is no more is an OSError of who makes it, and no sign that
    the other end is gone.
    """

    pickled: bytes
    storages: Sequence[Any] = ()
    others: Sequence[Any] = ()
    _shared: list[io.FileIO] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        views = self._views()
        if _MAY_SHARE and sum(view.nbytes for view in views) > INLINE_BYTES:
            self._shared.append(_written(views))

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _views(self) -> list[memoryview]:
        return [*self.storages, *self.others, memoryview(self.pickled)]

    def send(self, connection: Connection) -> None:
        """Write it to `connection`. Raises OSError if the other end is closed."""
        views, shares = self._views(), bool(self._shared)
        sizes = [view.nbytes for view in views]
        head = [_COUNTS.pack(len(self.storages), len(self.others), shares), *map(_SIZE.pack, sizes)]
        connection.send_bytes(b"".join([*head, *([] if shares else views)]))
        if shares:
            reduction.send_handle(connection, self._shared[0].fileno(), 0)

    def close(self) -> None:
        """Let go of the shared memory; receivers keep theirs."""
        while self._shared:
            self._shared.pop().close()


def pack(value: Any) -> Message:
    """`value` as a message. Functions and classes of ``__main__`` and of the like travel by value (cloudpickle)."""
    pickler = Pickler()
    pickler.dump(value)
    return pickler.message()


def receive(connection: Connection) -> Callable[[], Any]:
    """Read a message; the result unpickles its next object. Raises EOFError or OSError if the sender is gone."""
    received = memoryview(connection.recv_bytes())
    storages, others, shared = _COUNTS.unpack_from(received)
    place = _COUNTS.size
    sizes = [_SIZE.unpack_from(received, place + _SIZE.size * i)[0] for i in range(storages + others + 1)]
    place += _SIZE.size * len(sizes)
    buffers: list[memoryview] = []
    if shared:
        handle = reduction.recv_handle(connection)
        try:
            offsets = _offsets(sizes)
            whole = memoryview(mmap.mmap(handle, offsets[-1], access=mmap.ACCESS_COPY))
        finally:
            os.close(handle)
        buffers += (whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False))
    else:
        for size in sizes:
            buffers.append(memoryview(bytearray(received[place : place + size])))
            place += size
    unpickler = _Unpickler(io.BytesIO(buffers.pop()), buffers=buffers[storages:])
    for buffer in buffers[:storages]:
        tensor = torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else torch.empty(0, dtype=torch.uint8)
        unpickler.storages.append(tensor.untyped_storage())
    return unpickler.load


class Pickler(TensorPickler):
    """cloudpickle's pickler, except that the memory of tensors and arrays becomes buffers of the message."""

    def __init__(self) -> None:
        self._stream = io.BytesIO()
        self._others: list[memoryview] = []
        self._storages: list[torch.UntypedStorage] = []
        self._places: dict[int, int] = {}
        super().__init__(self._stream, protocol=5, buffer_callback=lambda buffer: self._others.append(buffer.raw()))

    def persistent_id(self, obj: Any) -> Any:
        """A storage, which tensors may share, is pickled as its index among the message's storages."""
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, None
        else:
            return None
        if storage.device.type != "cpu":
            return None
        if storage._cdata not in self._places:
            self._places[storage._cdata] = len(self._storages)
            self._storages.append(storage)  # kept until the message is made, so that no other gets its address
        return self._places[storage._cdata], dtype

    def message(self) -> Message:
        flat: list[Any] = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in self._storages]
        return Message(self._stream.getvalue(), [memoryview(x.numpy()) for x in flat], self._others)

    @property
    def nbytes(self) -> int:
        buffers = sum(s.nbytes() for s in self._storages) + sum(view.nbytes for view in self._others)
        return self._stream.tell() + buffers


class _Unpickler(pickle.Unpickler):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.storages: list[torch.UntypedStorage] = []

    def persistent_load(self, pid: Any) -> Any:
        place, dtype = pid
        storage = self.storages[place]
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each buffer begins in the shared memory, and where the last one ends."""
    offsets = [0]
    for size in sizes:
        offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _written(views: Sequence[memoryview]) -> io.FileIO:
    """New shared memory that holds `views`; Python warns of what isn't closed."""
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
