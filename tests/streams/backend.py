"""A backend of torch.distributed that behaves like a stream, over gloo: what NCCL does to the host, without a GPU.

* A collective is done by a thread, the "device": after those before it on its communicator, and a random while later.
* ``wait()`` only notes that the host has ordered its stream behind the collective; the host goes on at once.
* ``is_completed()`` tells how far the device is. A future is complete when it is made, as NCCL's are on the host.
* A collective that a peer doesn't join never ends, and nothing behind it begins. ``abort()`` ends it, with garbage.
* A watchdog as NCCL's gives a communicator up when a collective has been enqueued for the group's timeout.

On the CPU the host computes itself, so it has to stand still where a value is first used that the device hasn't made
yet. :class:`Host` does that, for every operation of torch while it is active. A value that is used without a wait
before is a race on a GPU: it raises. What waits for a peer that is gone will never be there: on a GPU the host would
have gone on long ago, so here it goes on with garbage, and so is all that it makes of it. Where the host reads a number
(``.item()``, ``bool(x)``) it stands still on a GPU as well: that is written down, with the line that reads, and has no
limit.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ltx.core.base import private

NAME = "streamed"
#: How long the device may take for one collective.
LONGEST_S = 0.004
#: What takes so long will never end, though its connections stand: longer than a loaded machine keeps a peer waiting.
HUNG_S = 5.0
#: Where no peer is gone everything ends.
PATIENT_S = 60.0
#: After so long nobody will abort what a host reads.
_DEAF_S = 60.0

Done = Callable[[], None]


class Log:
    """What this process' ranks have done: issues in order, and host reads."""

    def __init__(self) -> None:
        self.issues: list[str] = []
        self.reads: list[str] = []
        self.fired: list[str] = []  # what watchdogs have given up
        self.groups = 0

    def clear(self) -> None:
        self.issues, self.reads, self.fired = [], [], []


LOG = Log()


def log() -> Log:
    return LOG


# Storages that the device hasn't written yet, by their address: who writes them.
_pending: dict[int, StreamWork] = {}
_changes = threading.Lock()


class StreamWork:
    hung_s = HUNG_S

    def __init__(self, what: str, tensors: list[torch.Tensor], hung: threading.Event):
        self.what, self.tensors, self.enqueued_s, self._hung = what, tensors, time.monotonic(), hung
        self.done = threading.Event()
        self.waited = False
        self.error: str | None = None
        self._storages: list[torch.UntypedStorage] = []
        self.spoil(tensors)

    def spoil(self, tensors: list[torch.Tensor]) -> None:
        """They hold garbage until it has ended."""
        storages = [t.untyped_storage() for t in tensors]
        with _changes:
            self._storages += storages
            _pending.update({storage._cdata: self for storage in storages})

    def end(self) -> None:
        """It writes no more. A later collective on the same memory stays pending."""
        with _changes:
            for storage in self._storages:
                if _pending.get(storage._cdata) is self:
                    del _pending[storage._cdata]
            self._storages = []
        self.done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waited = True
        if self.error is not None:
            raise dist.DistBackendError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set() or self.error is not None

    def get_future(self) -> Any:
        """Complete at once: what is done with its value is ordered behind the collective."""
        value = self.tensors[:1]
        self.wait()
        future = torch._C.Future([])
        future.set_result(value)
        return future

    def force(self, reads: bool = True) -> bool:
        """The host stands still until the device has come so far; returns whether it has."""
        if not self.waited and not self.done.is_set():
            raise AssertionError("a value was used that the stream hasn't waited for: a race on a GPU")
        if reads and not self.done.wait(_DEAF_S):
            raise AssertionError(f"the host reads what waits for {self.what}, which nobody has aborted")
        end_s = time.monotonic() + self.hung_s
        while not (self.done.wait(0.01) or self._hung.is_set()):
            if time.monotonic() > end_s:
                self._hung.set()  # and so is all that is enqueued behind it
        return self.done.is_set()


class StreamGroup(dist.ProcessGroup):
    """A communicator: a queue of collectives, a thread that does them, and one that watches."""

    def __init__(self, inner: Any, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._inner = inner
        self._queue: SimpleQueue[tuple[StreamWork, Done] | None] = SimpleQueue()
        self._enqueued: list[StreamWork] = []
        self._aborted, self._hung, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._delays = random.Random(rank)
        self._timeout_s = timeout.total_seconds()
        LOG.groups += 1
        for body in (self._run, self._watch):
            threading.Thread(target=body, name="device", daemon=True).start()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, do = entry
            time.sleep(self._delays.random() * LONGEST_S)
            try:
                if not self._aborted.is_set():
                    with torch.no_grad():
                        do()
            except BaseException as error:
                print(f"device: {error!r}", file=sys.stderr)
                self._hung.set()
                self._aborted.wait()  # a kernel whose peer is gone never ends: only this lets the stream go on
            work.end()

    def _watch(self) -> None:
        """As torch's ProcessGroupNCCL::Watchdog, with TORCH_NCCL_ASYNC_ERROR_HANDLING=2."""
        while not self._ended.wait(0.05):
            self._enqueued = [work for work in self._enqueued if not work.done.is_set()]
            late = [w for w in self._enqueued if time.monotonic() - w.enqueued_s > self._timeout_s]
            if late and not self._aborted.is_set():
                LOG.fired.append(late[0].what)
                for work in late:
                    work.error = f"Watchdog caught collective operation timeout: {work.what}"
                self.abort()

    def _issue(
        self, what: str, tensors: list[torch.Tensor], do: Callable[[], Any], given: list[torch.Tensor] | None = None
    ) -> StreamWork:
        if self._aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        LOG.issues.append(f"{what} {[tuple(t.shape) for t in tensors]}")
        # The stream that it is ordered behind has these of other communicators before it.
        before = [_pending.get(t.untyped_storage()._cdata) for t in given or tensors]
        work = StreamWork(what, tensors, self._hung)

        def run() -> None:
            for other in before:
                while other is not None and not self._aborted.is_set() and not other.done.wait(0.02):
                    pass
            joined = do()
            while not self._aborted.is_set() and not _is_there(joined):
                pass

        self._begin(work, run, given or tensors)
        return work

    def _begin(self, work: StreamWork, run: Done, given: list[torch.Tensor]) -> None:
        self._enqueued.append(work)
        self._queue.put((work, run))

    # `.data`: a device doesn't tell autograd, a while later, that it has written.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> StreamWork:
        return self._issue("allreduce", tensors, lambda: self._inner.allreduce([t.data for t in tensors], opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> StreamWork:
        return self._issue("broadcast", tensors, lambda: self._inner.broadcast([t.data for t in tensors], opts))

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> StreamWork:
        rows = list(output.data.chunk(self.size()))
        return self._issue("allgather", [output], lambda: self._inner.allgather([rows], [given]), [given])

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> StreamWork:
        rows = list(given.chunk(self.size()))
        return self._issue(
            "reduce_scatter", [output], lambda: self._inner.reduce_scatter([output.data], [rows], opts), [given]
        )

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, got: list[int], sent: list[int], opts: Any = None
    ) -> StreamWork:
        return self._issue(
            "alltoall", [output], lambda: self._inner.alltoall_base(output.data, given, got, sent), [given]
        )

    all_to_all_single = alltoall_base

    def abort(self) -> None:
        self._aborted.set()
        self._inner.abort()

    def shutdown(self) -> None:
        """In good order: it waits for all that is under way."""
        self._queue.put(None)
        for work in self._enqueued:
            work.done.wait()
        self._ended.set()

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        return NAME


def _is_there(given: Any) -> bool:
    """Whether a work of gloo's completes within a tick. Some of them don't say that they have."""
    try:
        given.wait(timedelta(milliseconds=20))
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        return False
    return True


class Host(TorchDispatchMode):
    """The host: it stands still where it uses what the device hasn't made, and notes where it reads numbers.

    hung_s: as :data:`HUNG_S`. Where no peer is gone it is long, as peers come late on a loaded machine.
    """

    def __init__(self, hung_s: float = HUNG_S):
        super().__init__()
        self._hung_s = hung_s

    def __enter__(self) -> Any:
        # On the CPU these read memory without asking the dispatcher.
        self._patch = pytest.MonkeyPatch()
        for name in ("tolist", "cpu", "numpy"):
            self._patch.setattr(torch.Tensor, name, self._reading(getattr(torch.Tensor, name)))
        self._patch.setattr(StreamWork, "hung_s", self._hung_s)
        self._patch.setattr(private, "below_modes", nullcontext)  # this mode isn't a user's: it is the device
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for work in [] if error[0] else list(_pending.values()):  # whoever takes the results has them on the host
            work.done.wait(self._hung_s)
        self._patch.undo()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, spoiled = kwargs or {}, None
        for x in strided((args, kwargs)) if _pending else ():
            work = _pending.get(x.untyped_storage()._cdata)
            if work is not None and not is_view(func) and not work.force(func in READS):
                spoiled = work
        if func in READS:
            LOG.reads.append(reader())
        result = func(*args, **kwargs)
        if spoiled is not None:
            spoiled.spoil([*strided(result), *written(func, args, kwargs)])
        return result

    def read(self, x: torch.Tensor) -> None:
        """The host reads it, by something else than an operation of torch's."""
        work = _pending.get(x.untyped_storage()._cdata)
        if work is not None:
            work.force()
        LOG.reads.append(reader())

    def _reading(self, method: Any) -> Any:
        def reads(x: torch.Tensor, *args: Any) -> Any:
            self.read(x)
            return method(x, *args)

        return reads


def strided(values: Any) -> list[torch.Tensor]:
    """The tensors with memory among `values`."""
    leaves = tree_leaves(values)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_meta]


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments of an operation that it writes to."""
    by_name = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    writes = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return strided([by_name.get(name) for name in writes])


READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


_MAKES = ("empty", "new_empty", "detach", "alias", "record_stream", "zeros_like", "ones_like", "full_like", "new_zeros")


def is_view(func: Any) -> bool:
    """Whether `func` reads no values: views, and what makes uninitialised memory of the same kind."""
    aliases = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
    return (bool(aliases) and all(aliases)) or func._schema.name.removeprefix("aten::").startswith(_MAKES)


def reader() -> str:
    """The innermost lines outside of torch and this file."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < 4:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "/tests/streams/backend" not in name and "/tests/streams/clocks" not in name:
            lines.append(f"{name.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_qualname}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


def register() -> None:
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> StreamGroup:
        return StreamGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, timeout)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make, devices=["cpu"])
