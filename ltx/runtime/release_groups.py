"""Letting process groups go when a world ends."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import torch.distributed as dist

from ltx import comm
from ltx.axis import Axis
from ltx.comm import close_axis

# How long letting go of process groups may hold a rank up (see `let_go`).
_LET_GO_S = 2.0


def close_others(axes: tuple[Axis, ...], held: list[Any]) -> None:
    """Note what of every open axis has a process group in `held`, and close those axes that aren't among `axes`.

    Collectives that are given a process group or a DeviceMesh open an axis for it.
    """
    everything = comm.open_axes()
    held.extend(with_groups(everything))
    for axis in everything:
        if all(axis is not other for other in axes):
            _close(axis, dist.group.WORLD if dist.is_initialized() else None)


def with_groups(axes: tuple[Axis, ...]) -> list[Any]:
    """The communicators of `axes` and their channels, each with a process group of its own."""
    communicators = [axis.comm for axis in axes if axis.comm is not None]
    return [one for axis_comm in communicators for one in (axis_comm, *axis_comm.channels)]


def let_go(held: list[Any]) -> None:
    """Drop the process groups of closed communicators and channels, and wait until the groups' threads end.

    torch's ``destroy_process_group`` only forgets a group. Its threads end with the last reference to it, and those
    that are left when Python ends abort the process now and then. So each of `held` loses its group here, whatever
    still refers to it: a cache of what was planned for an axis, a reference cycle, or the traceback of the exception
    that ended the world.

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

    waiter = threading.Thread(target=drop, name="ltx-teardown", daemon=True)
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


def _destroy(group: Any) -> None:
    if dist.is_initialized() and dist.group.WORLD is group:  # else the user has destroyed it
        dist.destroy_process_group()


def _close(axis: Axis, world_group: Any) -> None:
    try:
        close_axis(axis)
    except ValueError:  # its process groups are gone: right if the user has destroyed them all
        if dist.is_initialized() and dist.group.WORLD is world_group:
            raise


def _destroy_subgroup(group: dist.ProcessGroup) -> None:
    if dist.is_initialized():
        dist.destroy_process_group(group)
