"""How ranks connect when they make a process group: over which interface, and with an eye on peers that won't come.

gloo connects in C++, deaf to Ctrl-C and to the end of a peer, for five times as long as it is told. So it does that in
a thread, and who waits for the thread looks out meanwhile, as in every wait while a world is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ltx.core.base.errors import PeerLostError

#: How much longer than ltx's own the time limits of groups are: waits of ltx raise what is wrong. The clock of NCCL's
#: watchdog begins with the enqueuing of a collective, that of ltx where the host waits for it, up to a step later.
LATER = timedelta(minutes=5)

_TICK_S = 0.05
# How long ranks that have met in the store may take to connect; and a little more for each of them.
_CONNECT_S, _CONNECT_RANK_S = 60.0, 0.5

_lookouts: list[Callable[[], object]] = []


@contextmanager
def looking_out(look: Callable[[], object]) -> Iterator[None]:
    """Within, waits for peers that are to come call `look`, which raises if one won't."""
    _lookouts.append(look)
    try:
        yield
    finally:
        _lookouts.remove(look)


def look_out() -> None:
    """Called now and then by who waits while a world, an axis or a group is made: raises if a peer won't come."""
    for look in _lookouts:
        look()


def connect(store: Any, rank: int, size: int, timeout: timedelta, threads: int | None = None) -> Any:
    """gloo's part of a process group of ranks that have met in `store`. `threads`: of its own; None for gloo's default.

    Raises:
        PeerLostError: a peer is gone, or can't be reached.
    """
    gloo: Any = dist.ProcessGroupGloo
    limit = min(timeout - LATER, timedelta(seconds=_CONNECT_S + _CONNECT_RANK_S * size))
    options = gloo._Options()
    interfaces = [part for part in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if part]
    options._devices = [gloo.create_device(interface=part) for part in interfaces] or [gloo.create_default_device()]
    options._timeout, options._threads = limit, threads or options._threads
    before = store.timeout  # of its connection, which ltx asks nothing on meanwhile
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
    why, waited_s = f"it hasn't come about within {limit.total_seconds():g} s", 0.0
    while not wait([made], _TICK_S).done and waited_s < limit.total_seconds():
        look_out()
        waited_s += _TICK_S
    if made.done():
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
    """Of what torch takes for its class of gloo's groups within :func:`connecting`."""

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return connect(store, rank, size, timeout)

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, dist.ProcessGroupGloo)


@contextmanager
def connecting(look: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Within, torch makes process groups whose ranks connect by :func:`connect`, and `look` too is called meanwhile."""
    torchs: Any = c10d
    plain = torchs.ProcessGroupGloo
    torchs.ProcessGroupGloo = _WithLookout("ProcessGroupGloo", (plain,), {})
    try:
        with looking_out(look):
            yield
    finally:
        torchs.ProcessGroupGloo = plain
