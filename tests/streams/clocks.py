"""Whether what streams do to the same memory is ordered, on the CPU: a vector clock a stream, and one for the host.

:class:`Clocks` has ltx communicate on streams as on a GPU. Nothing runs late here: a collective is done when it is
issued, and everything else as Python comes to it. What counts is what orders it. An access is a fault if its stream
isn't behind the accesses before it that it has to come after; so is the end of memory that a stream still uses, unless
``record_stream`` has said so, for the allocator gives it away behind the stream that it was made on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ltx.core.comm import backends, buffer_pool
from tests.streams.backend import READS, Host, StreamGroup, StreamWork, is_view, reader, strided, written

Clock = dict[str, int]


def _join(clock: Clock, other: Clock) -> None:
    for name, at in other.items():
        clock[name] = max(at, clock.get(name, 0))


@dataclass
class Event:
    """What a stream had come to when it was recorded."""

    clocks: Clocks
    clock: Clock

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        _join(self.clocks.host, self.clock)


class Stream:
    """A stream of the device, of which ltx knows as of one of torch's."""

    def __init__(self, clocks: Clocks, name: str):
        self.name, self._clocks, self.clock = name, clocks, {name: 0}
        self._around: list[Stream] = []

    def tick(self) -> int:
        """Something is enqueued, behind what the host has waited for."""
        _join(self.clock, self._clocks.host)
        self.clock[self.name] += 1
        return self.clock[self.name]

    def wait(self, clock: Clock) -> None:
        if self is self._clocks.compute and torch._C._current_graph_task_id() >= 0:
            self._clocks.held_up.append(reader())
        _join(self.clock, clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait(other.clock)

    def wait_event(self, event: Event) -> None:
        self.wait(event.clock)

    def record_event(self) -> Event:
        return Event(self._clocks, dict(self.clock))

    def __enter__(self) -> None:
        self._around.append(self._clocks.current)
        self._clocks.current = self

    def __exit__(self, *_: object) -> None:
        self._clocks.current = self._around.pop()


@dataclass
class Memory:
    """What was done to one storage, by stream: when last."""

    made_on: Stream
    written: Clock = field(default_factory=dict)
    read: Clock = field(default_factory=dict)
    recorded: list[Stream] = field(default_factory=list)


class Clocks(Host):
    """The host and its streams. `faults` is what isn't ordered, `held_up` where a backward pass had to wait."""

    def __init__(self, hung_s: float):
        super().__init__(hung_s)
        self.host: Clock = {}
        self.compute = self.current = Stream(self, "compute")
        self.streams = [self.compute]
        self.faults: list[str] = []
        self.held_up: list[str] = []
        self._memory: dict[int, Memory] = {}

    def stream(self, name: str) -> Stream:
        self.streams.append(Stream(self, f"{name} {len(self.streams)}"))
        return self.streams[-1]

    def __enter__(self) -> Any:
        entered = super().__enter__()
        patch, clocks = self._patch, self

        def begin(stream: Any, device: torch.device) -> None:
            stream._device, stream._stream = device, clocks.stream("communication")

        def copy(copied: Any, tensor: torch.Tensor, after: Any = lambda: True) -> None:
            copied._after, copied._value = after, tensor.clone()
            copied._done = clocks.current.record_event()

        patch.setattr(backends.CommStream, "__init__", begin)
        patch.setattr(backends.HostCopy, "__init__", copy)
        patch.setattr(torch.accelerator, "current_stream", lambda *_: self.current)
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: self._of(x).recorded.append(stream))
        patch.setattr(buffer_pool, "storage_uses", None)  # on a GPU buckets are the allocator's
        patch.setattr(StreamGroup, "_begin", lambda *args: self._begin(*args))
        patch.setattr(StreamWork, "wait", lambda *args: self._wait(*args))
        patch.setattr(StreamWork, "is_completed", lambda work: work.event.query())
        return entered

    def _begin(self, group: Any, work: Any, do: Any, given: list[torch.Tensor]) -> None:
        """A collective, on the communicator's own stream, which keeps what it is given until somebody waits."""
        if not hasattr(group, "stream"):
            group.stream = self.stream("communicator")
        group.stream.wait(self.current.clock)
        self._use(group.stream, given, work.tensors)
        work.tensors, work.event = [*work.tensors, *given], group.stream.record_event()
        done = threading.Thread(target=do)  # where no mode is
        done.start()
        done.join()
        work.end()

    def _wait(self, work: Any, timeout: Any = None) -> bool:
        self.current.wait(work.event.clock)
        work.tensors = []
        return True

    def _of(self, x: torch.Tensor) -> Memory:
        storage = x.untyped_storage()
        known = self._memory.get(storage._cdata)
        if known is None:
            known = self._memory[storage._cdata] = Memory(self.current)
            weakref.finalize(storage, self._end, storage._cdata)
        return known

    def _end(self, key: int) -> None:
        """The memory ends, and is given away behind the stream that it was made on."""
        memory = self._memory.pop(key)
        for uses in (memory.written, memory.read):
            for name, at in uses.items():
                behind = [memory.made_on.clock, self.host, *(stream.clock for stream in memory.recorded)]
                if all(clock.get(name, 0) < at for clock in behind):
                    self.faults.append(f"memory of {memory.made_on.name} ends that {name} uses: {reader()}")

    def _use(self, stream: Stream, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        at = stream.tick()
        for x in read:
            memory = self._of(x)
            self._check(stream, memory.written, "reads what isn't written by")
            memory.read[stream.name] = at
        for x in written:
            memory = self._of(x)
            self._check(stream, memory.written, "writes again what isn't written by")
            self._check(stream, memory.read, "writes what isn't read by")
            memory.written, memory.read = {stream.name: at}, {}

    def _check(self, stream: Stream, uses: Clock, what: str) -> None:
        self.faults += [
            f"{stream.name} {what} {name}: {reader()}" for name, at in uses.items() if stream.clock.get(name, 0) < at
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = strided((args, kwargs))
        for x in given:
            self._of(x)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = [x for x in strided(result) if x.untyped_storage()._cdata not in self._memory]
        if made or not is_view(func):
            self._use(self.current, [] if is_view(func) else given, [*written(func, args, kwargs), *made])
        if func in READS:
            _join(self.host, self.current.clock)
        return result

    def read(self, x: torch.Tensor) -> None:
        super().read(x)
        self._use(self.current, [x], [])
        _join(self.host, self.current.clock)
