"""Process groups: how they are opened over ranks that nobody else waits for, and given up."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# How long letting go of process groups may hold a rank up (see `let_go`).
_LET_GO_S = 2.0


def open_group(
    ranks: list[int],
    name: str,
    backend: str,
    timeout: timedelta,
    description: str,
    in_turn: bool = False,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """A process group of the global `ranks`, opened by these alone and called `name` on all of them.

    `in_turn`: its collectives move one after the other. Otherwise two operations of a gloo group share the link, and
    the first takes as long as both. `device`: it is connected at once for tensors on that device, so that no rank
    connects in the middle of a step.

    ``dist.new_group(..., use_local_synchronization=True)`` derives names from the number of groups that a process has
    at the moment. So ranks that differ in their other groups wait for each other forever, and a name is used again
    after its group was destroyed, while its addresses are still in the store.
    """
    make: Any = c10d._new_process_group_helper
    store: Any = c10d._get_default_store()
    limit = connect_limit(store, backend, timeout)
    if in_turn and backend == "gloo":
        _register_in_turn()
        backend = _IN_TURN
    set_error_handling()
    # If the world is bound to a device, torch makes groups by splitting it, for which all of its ranks are needed.
    world: Any = c10d._get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        own = ranks.index(dist.get_rank()), ranks, c10d.Backend(backend)
        group: dist.ProcessGroup = make(len(ranks), *own, store, name, timeout=limit, group_desc=description)[0]
    finally:
        world.bound_device_id = bound
    if limit < timeout:
        c10d._set_pg_timeout(timeout, group)
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    if device is not None and type(group) is dist.ProcessGroup:
        connect: Any = group._get_backend(device)
        group.bound_device_id = device
        if getattr(connect, "supports_splitting", False):  # those that can split can connect ahead, too
            connect.eager_connect_single_device(device)
    return group


_IN_TURN = "ltx_gloo_in_turn"


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether its collectives are gloo's."""
    return group.name() == "gloo" or dist.get_backend(group) == _IN_TURN


def abort(group: dist.ProcessGroup) -> None:
    """Give up what is under way on a stream-ordered group: kernels that wait for a peer end, and the stream goes on."""
    stop = getattr(group, "abort", None)
    if stop is not None:
        stop()


@cache
def _register_in_turn() -> None:
    """Register gloo with one thread as a backend, which torch doesn't offer by name."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        interfaces = [part for part in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if part]
        options._devices = [gloo.create_device(interface=part) for part in interfaces] or [gloo.create_default_device()]
        options._timeout, options._threads = timeout, 1
        return gloo(store, rank, size, options)

    dist.Backend.register_backend(_IN_TURN, make, devices=dist.Backend.backend_capability["gloo"])


def set_error_handling() -> None:
    """Have NCCL's watchdog end collectives that have failed, and not the process: waits here raise what is wrong.

    Read when a group is made. What the user has set stays.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # clean up only


def connect_limit(store: Any, backend: str, timeout: timedelta) -> timedelta:
    """How long ranks may take to connect when they make a group in `store`: `timeout`, or the store's if less."""
    return min(timeout, store.timeout) if "gloo" in backend or "nccl" in backend else timeout


def drop_groups(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Destroy groups that are no longer used.

    A group ends with its last reference, and waits then for its pending collectives: forever, if a peer never joins
    them. So a thread drops it.
    """
    dropped = list({id(group): group for group in groups if group is not None}.values())
    for group in dropped:
        dist.destroy_process_group(group)
    Thread(target=dropped.clear, name="ltx-let-go", daemon=True).start()


def let_go(held: list[Any]) -> None:
    """Drop the process groups of closed communicators and channels, and wait until the groups' threads end.

    torch's ``destroy_process_group`` only forgets a group. Its threads end with the last reference to it, and those
    that are left when Python ends abort the process now and then. So each of `held` loses its group here, whatever
    still refers to it: a cache of what was planned for an axis, a reference cycle, or the traceback of the exception
    that ended the axis or the world.

    A gloo group with an operation under way waits in its destructor until the peers have joined in, up to the
    operation's timeout, and gloo can't be told to give up. A rank that failed between issuing and waiting must not
    hang in that. So a thread waits, and is left behind after a few seconds; the end of this process then breaks the
    connections, which the peers see at once.
    """
    groups = []
    while held:
        one = held.pop()
        groups.extend(one.release())
    one = None
    if not groups:
        return

    def drop() -> None:
        known = [weakref.ref(group) for group in groups]
        groups.clear()
        if any(group() is not None for group in known):
            gc.collect()  # not without need: it keeps all threads waiting, those too that show signs of life

    waiter = Thread(target=drop, name="ltx-teardown", daemon=True)
    try:
        waiter.start()
    except RuntimeError:  # some versions of Python start no threads while they end
        drop()
        return
    waiter.join(_LET_GO_S)
    if waiter.is_alive():
        print(
            "ltx: a collective is still under way that a peer hasn't joined. It is abandoned; peers that wait in it "
            "get an error when this process ends.",
            file=sys.stderr,
        )


def unregister(group: dist.ProcessGroup) -> None:
    """Make compiled graphs, which find a group by its name, raise from now on."""
    forget: Any = c10d._unregister_process_group  # type: ignore[attr-defined]
    forget(group.group_name)
