"""Backends: how a process group moves data, as far as callers must know, and how the host runs ahead.

There are two kinds. On **host-blocking** backends (gloo, MPI, UCC) a wait returns when the data is there, and groups
progress independently of each other, each in threads of its own. On **stream-ordered** backends (NCCL and other
vendors' libraries) a wait only makes the current stream wait: the host runs ahead, kernels of all communicators share
the device, and so their order must be the same on all ranks. A group may have both, for CPU and the device's tensors.

On the CPU, where a backend may order streams too, as the tests' do, :class:`CommStream` and :class:`HostCopy` hand
values on.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ltx.core.base import private, traced
from ltx.core.base.errors import PeerLostError
from ltx.core.comm import ledger
from ltx.core.comm.transport import poll_until

#: The backends whose waits block the host. A user may add others. All other backends order streams.
HOST_BLOCKING = {"gloo", "mpi", "ucc"}


class Backends(NamedTuple):
    """The backends of a process group, by the type of the device that a tensor is on."""

    host: str = "gloo"  # the backend for tensors on the host; gloo where the group has none whose waits block
    stream: str | None = None  # the stream-ordered backend; None if there is none
    device_type: str | None = None  # the type of device whose tensors the stream-ordered backend takes


def backends_of(group: dist.ProcessGroup) -> Backends:
    """The backends of `group`, whatever it was made with: "nccl", "cpu:gloo,cuda:nccl", or nothing at all."""
    config = c10d.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    by_device: Mapping[str, str] = config.get_device_backend_map()
    host = by_device.get("cpu", "gloo")
    ordered = {device: name for device, name in by_device.items() if name not in HOST_BLOCKING}
    # A group for several kinds of accelerators is used on the kind that this process has.
    used = next((device for device in ordered if device in (accelerator(), "cpu")), None)
    return Backends(host if host in HOST_BLOCKING else "gloo", None if used is None else ordered[used], used)


def default_backend(device: torch.device) -> str:
    """The backends of a world whose ranks compute on `device`: torch's choice for it, and gloo on the host."""
    if device.type == "cpu":
        return "gloo"
    name = dist.get_default_backend_for_device(device.type)
    return name if name in HOST_BLOCKING else f"cpu:gloo,{device.type}:{name}"


def accelerator() -> str | None:
    return getattr(torch.accelerator.current_accelerator(check_available=True), "type", None)


class CommStream:
    """The stream of one device on which an axis communicates, beside the stream that computes."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device, priority=-1)
        self._behind: Any = None  # the stream that it was put behind last

    # Streams are asked for by the device's number: by the device that takes twice as many calls of Python.

    def behind_current(self) -> AbstractContextManager[Any]:
        """A context on this stream, behind the current one. Keep what it uses until :meth:`fence` was waited for."""
        if self._stream is None:
            return ledger.NOTHING
        self._behind = torch.accelerator.current_stream(self._device.index)
        self._stream.wait_stream(self._behind)
        return self._stream

    def fence(self) -> Callable[..., None]:
        """A function of ``(made, used=())`` that makes the stream on which it is called wait for what is on this one
        now; given tensors that this stream made for others, and used of the one before it.
        """
        if self._stream is None:
            return lambda made, used=(): None
        return partial(self._wait, self._stream.record_event(), self._behind)

    def _wait(self, done: torch.Event, began_on: Any, made: private.Tensors, used: private.Tensors = ()) -> None:
        current: Any = torch.accelerator.current_stream(self._device.index)
        began = ledger.mark(self._device) if ledger.recordings else None
        current.wait_event(done)
        if began is not None:
            ledger.note_device_wait(began, self._device)
        for tensor in made:
            tensor.record_stream(current)
        # Their memory belongs to the stream that made them, which may reuse it before this stream is done.
        for tensor in used if current != began_on else ():
            tensor.record_stream(self._stream)  # type: ignore[arg-type]


class HostCopy:
    """A small tensor that is copied to the host, which continues meanwhile."""

    def __init__(self, tensor: torch.Tensor, after: Callable[[], bool] = lambda: True):
        self._done: torch.Event | None = None
        self._after = after  # tells whether the copy is complete
        if tensor.device.type == "cpu":
            self._value = tensor
        else:
            self._value = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._done = torch.accelerator.current_stream(tensor.device).record_event()

    def ready(self) -> bool:
        return self._after() and (self._done is None or self._done.query())

    def read(self) -> torch.Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._value


def to_device(made: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Copy what the host has made to `device` (None: don't) without waiting for its earlier work, as ``.to`` does."""
    if device is None or device == made.device:
        return made
    plain = type(made) is torch.Tensor and made.layout is torch.strided and not made.requires_grad
    wrapped = traced.recording() or private.in_transform()
    if wrapped or not plain or made.device.type != "cpu" or device.type in ("cpu", "meta"):
        return made.to(device)
    # torch reuses this memory only when the copy is done.
    pinned = made if made.is_pinned() else torch.empty_like(made, pin_memory=True).copy_(made)
    return pinned.to(device, non_blocking=True)


def is_of_network(error: RuntimeError) -> bool:
    """Whether a backend raised `error` because of its peers, and not for want of memory, of a dtype or of a device."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo/", "Gloo", "Timed out"))


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


# How ranks connect when they make a process group: the network interface, and checks for peers that won't come. gloo
# connects in C++, where neither Ctrl-C nor the end of a peer interrupts it, for five times the time limit. So a thread
# connects, and the rank that waits for the thread checks meanwhile, as in every wait while a world is made.

#: Time limits of groups are this much longer than ltx's own, so that waits of ltx raise first. The clock of NCCL's
#: watchdog begins when a collective is enqueued, the clock of ltx when the host waits, up to a step later.
LATER = timedelta(minutes=5)

_TICK_S = 0.05

_lookouts: list[Callable[[], object]] = []


@contextmanager
def looking_out(look: Callable[[], object]) -> Iterator[None]:
    """A context in which waits for peers call `look`, which raises if a peer won't come."""
    _lookouts.append(look)
    try:
        yield
    finally:
        _lookouts.remove(look)


def look_out() -> None:
    """Raise if a peer won't come. Waits call it now and then while a world, an axis or a group is made."""
    for look in _lookouts:
        look()


def connect(store: Any, rank: int, size: int, timeout: timedelta, threads: int | None = None) -> Any:
    """The gloo group of ranks that meet in `store`; PeerLostError if one can't be reached. `threads`: gloo's."""
    gloo: Any = dist.ProcessGroupGloo
    limit = min(timeout - LATER, timedelta(seconds=60.0 + 0.5 * size))  # the ranks have met in the store already
    options = gloo._Options()
    interfaces = [part for part in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if part]
    options._devices = [gloo.create_device(interface=part) for part in interfaces] or [gloo.create_default_device()]
    options._timeout, options._threads = limit, threads or options._threads
    before = store.timeout  # ltx doesn't use this connection of the store meanwhile
    store.set_timeout(limit)
    made: Future[Any] = Future()

    def make() -> None:
        try:
            made.set_result(gloo(store, rank, size, options))
        except BaseException as error:
            made.set_exception(error)
        finally:
            store.set_timeout(before)

    Thread(target=make, name="ltx-connects", daemon=True).start()
    why = f"it hasn't come about within {limit.total_seconds():g} s"
    if poll_until(lambda: bool(wait([made], _TICK_S).done), limit.total_seconds(), look_out):
        try:
            group = made.result()
            group._set_default_timeout(timeout)
            return group
        except (RuntimeError, ValueError) as error:
            look_out()
            why = str(error)
    raise PeerLostError(
        f"rank {rank} of {size}: a connection of gloo with a peer that has come to make a process group failed: {why}. "
        "Peers connect to the address of a rank's network interface: set GLOO_SOCKET_IFNAME on each node to the name "
        "of the interface (eth0, for example) that the other nodes reach, and let firewalls pass what they say there."
    )


class _WithLookout(type(dist.ProcessGroupGloo)):  # type: ignore[misc]
    """Replaces torch's ProcessGroupGloo within :func:`connecting`."""

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False) -> Any:
        # torch 2.14 always passes `enable_reconfigure`; ltx never sets it.
        return connect(store, rank, size, timeout)

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, dist.ProcessGroupGloo)


@contextmanager
def connecting(look: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A context in which ranks of torch's new process groups connect by :func:`connect`; `look` is called meanwhile."""
    torchs: Any = c10d
    plain = torchs.ProcessGroupGloo
    torchs.ProcessGroupGloo = _WithLookout("ProcessGroupGloo", (plain,), {})
    try:
        with looking_out(look):
            yield
    finally:
        torchs.ProcessGroupGloo = plain


def open_group(
    ranks: list[int],
    name: str,
    backend: str,
    timeout: timedelta,
    about: str,
    look: Callable[[], object],
    in_turn: bool = False,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """A process group of the global `ranks`, opened by these alone and called `name` on all of them. `look`: called
    while ranks connect; raises if a peer won't. `in_turn`: collectives move one after the other, where two of a gloo
    group would share the link, and the first take as long as both. `device`: the group connects at once for tensors
    there, and not in the middle of a step. Not ``dist.new_group(..., use_local_synchronization=True)``, whose names
    depend on a process' other groups, and come again while addresses of destroyed groups are in the store.
    """
    make: Any = c10d._new_process_group_helper
    store: Any = c10d._get_default_store()
    if in_turn and backend == "gloo":
        backend = _IN_TURN
        if backend not in dist.Backend.backend_list:  # gloo with one thread, which torch doesn't offer by name
            devices = dist.Backend.backend_capability["gloo"]
            dist.Backend.register_backend(backend, partial(connect, threads=1), devices=devices)
    set_up_watchdog()
    # If the world is bound to a device, torch makes groups by splitting it, for which all of its ranks are needed.
    world: Any = c10d._get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        own = ranks.index(dist.get_rank()), ranks, c10d.Backend(backend)
        with connecting(look):
            group: dist.ProcessGroup = make(len(ranks), *own, store, name, timeout=timeout + LATER, group_desc=about)[0]
    finally:
        world.bound_device_id = bound
    if group.name() == "undefined":  # torch has named none of several backends; without a name it warns at the end
        kinds: Any = dist.ProcessGroup.BackendType
        group._set_default_backend(kinds.GLOO if "gloo" in backend else kinds.CUSTOM)
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    if device is not None and type(group) is dist.ProcessGroup:
        ahead: Any = group._get_backend(device)
        group.bound_device_id = device
        if getattr(ahead, "supports_splitting", False):  # backends that can split groups can connect ahead, too
            ahead.eager_connect_single_device(device)
    return group


_IN_TURN = "ltx_gloo_in_turn"


def is_gloo(group: dist.ProcessGroup) -> bool:
    return group.name() == "gloo" or dist.get_backend(group) == _IN_TURN


class StreamGroup:
    """The one communicator of an axis for tensors on the device. Its collectives complete in the order of issue."""

    def __init__(self, group: dist.ProcessGroup):
        self.group: Any = group
        self.last: Any = None  # the last issued work
        self.issue: tuple[str, int] | None = None  # the address of that work's channel, and its number there
        self.aborted = False
        self.cut_off = False  # the work under way was given up: its results are garbage
        self.of_last_pass: Any = None  # the last work of the last pass from which the host went on without it
        self.has_lost_pass = False  # that pass was cut off too, so what was made of its results is garbage

    @property
    def outstanding(self) -> bool:
        """Whether the device still has work of the group. Capturing a CUDA graph forbids to ask."""
        return self.last is not None and not self.aborted and (self.failed or not self.last.is_completed())

    @property
    def failed(self) -> bool:
        """Whether torch's watchdog has found an error. Work then counts as completed, but kernels may still run."""
        bound = self.group.bound_device_id
        get_error = getattr(self.group if bound is None else self.group._get_backend(bound), "get_error", None)
        return get_error is not None and get_error().name != "SUCCESS"

    def abort(self) -> None:
        """Give up the collectives under way: kernels that wait for a peer end, and the stream goes on, with garbage.

        Any thread may call it, again too, also while another is in ``cudaStreamSynchronize`` or ``Tensor.item``, which
        hold no lock of the group. ``ProcessGroupNCCL::abort`` calls ``ncclCommAbort`` in a thread of its own.
        """
        self.cut_off = self.cut_off or self.outstanding
        if not self.aborted and self.of_last_pass is not None:
            self.has_lost_pass = self.failed or not self.of_last_pass.is_completed()
        self.aborted = True  # before streams go on
        self.group.abort()


def set_up_watchdog() -> None:
    """Have NCCL's watchdog only give collectives up: waits of ltx raise the errors. The user's values stay."""
    for name, value in {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # only clean up: the process goes on
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # otherwise ranks write a dump of their work, and end themselves
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # the watchdog gives up after four times this: 15 s by default
        "TORCH_NCCL_ENABLE_MONITORING": "0",  # otherwise a thread ends a process whose watchdog is delayed
    }.items():
        os.environ.setdefault(name, value)


def let_go(held: list[Any]) -> None:
    """Drop the process groups of closed communicators, and wait until the groups' threads end.

    They end with the last reference to a group, which ``destroy_process_group`` only forgets; threads left when Python
    ends may abort the process. So each of `held` loses its groups, whatever still refers to it. A gloo group waits in
    its destructor for the peers to join in what is under way, and can't be told to give up. So a thread waits, and is
    abandoned after a few seconds: a rank that failed between issuing and waiting mustn't hang there.
    """
    groups = [group for one in held for group in one.release()]
    if not groups:
        return

    known = [weakref.ref(group) for group in groups]
    for collected in (False, True):
        if collected:  # only if needed: collecting blocks all threads, also those that send heartbeats
            gc.collect()  # here, where `groups` are still held: it may take longer than peers may
        waiter = Thread(target=groups.clear, name="ltx-teardown", daemon=True)
        try:
            waiter.start()
        except RuntimeError:  # some versions of Python start no threads while they end
            groups.clear()
        else:
            waiter.join(2.0)
        if waiter.is_alive():
            print(
                "ltx: a collective is still under way that a peer hasn't joined. It is abandoned; peers that wait in "
                "it get an error when this process ends.",
                file=sys.stderr,
            )
            return
        if not (groups := [group for ref in known if (group := ref()) is not None]):
            return


def unregister(group: dist.ProcessGroup) -> None:
    """Make compiled graphs, which find a group by its name, raise from now on."""
    forget: Any = c10d._unregister_process_group  # type: ignore[attr-defined]
    forget(group.group_name)
