"""``ltx.init``: set up process groups and axes once, and always tear them down again.

A process has at most one world at a time. Each step of the setup pushes its teardown on a stack, so that a failure
halfway, an exception in a ``with`` block, ``shutdown()`` and the end of the process all undo exactly these steps.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ltx.core import comm
from ltx.core.base import kernel
from ltx.core.base.arguments import brief, checked, seconds, shown
from ltx.core.base.errors import PeerLostError, WorldError
from ltx.core.base.handed_in import HandedIn
from ltx.core.comm.backends import let_go, looking_out
from ltx.core.ranks.axis import DEFAULT_NAME, Axis, set_world_axes
from ltx.core.transforms.strategy import Strategy
from ltx.core.world import world as worlds
from ltx.core.world.groups import adopted_world, check_mesh, close_ended, make_group, open_axes
from ltx.core.world.world import Placement, World, process, shutdown, world_of

DEFAULT_TIMEOUT = timedelta(seconds=1800)
DEFAULT_HEARTBEAT = timedelta(seconds=comm.DEFAULT_HEARTBEAT_S)


@checked("backend")
def init(
    strategy: Strategy | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    mesh: Mapping[str, int] | None = None,
    heartbeat_timeout: timedelta | float = DEFAULT_HEARTBEAT,
    rank: int | None = None,
    size: int | None = None,
    master: str | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
) -> World:
    """Set up this process' part of the world that its launcher describes, and put the world's axes in scope.

    Distributed training runs one program in several processes at once, most often one for each GPU. A launcher
    (``ltx run``, torchrun) starts the processes and gives each a number, its rank. ``with ltx.init():`` at the top of
    the program connects them. Without a launcher the same program runs as a single process, rank 0 of 1.

    Launchers are torchrun, srun of SLURM, mpirun of Open MPI, MPICH, Intel MPI and MVAPICH2, and :class:`ltx.Pool`;
    ``World.launcher`` says which one was found. Without a launcher there is a world of one, without a process group. An
    existing process group of torch.distributed is adopted, and kept at the end. Call it on every rank, equally often.

    As a context manager it takes everything down at the end of the block, also after an exception. As a plain call it
    lasts until :func:`shutdown` or the end of the process. A second call gives the same world; an inner
    ``with ltx.init()`` then doesn't end the world of an outer call. After an exception has ended the world, a call on
    every rank begins a new one with the same settings, which the ``with`` blocks of the old one close.

    Args:
        strategy: a strategy whose fields ``process_group_backend`` and ``timeout`` replace arguments that are left out.
        backend: the backend of torch.distributed; by default NCCL on CUDA and gloo on the CPU.
        timeout: how long setting up and each operation on a process group may take: a timedelta, or a number of
            seconds, as all durations.
        mesh: the sizes of the world's axes by name, outermost first, ``{"node": 2, "data": 4}`` for example. Rank
            ``r`` is at ``divmod(r, 4)`` then. Their product must be the world's size. By default there is one axis,
            ``{"data": size}``. With several axes, calls name one: ``axis="data"`` for one, ``axis=("node", "data")``
            for the ranks of both; ``axis=None`` raises.
        heartbeat_timeout: a rank raises :class:`ltx.errors.PeerLostError` if a peer that it waits for shows no sign of
            life for this long (its process or machine has stopped). `timeout` is for peers that live and don't come.
        rank: this process' rank, with `size` and `master`, for processes that were started by hand; a launcher's
            variables are then ignored. ``rank=0, size=1`` is a process alone.
        size: the number of ranks.
        master: where ranks meet, ``"host:port"``: the name or address of rank 0's node and a free port there.
        local_rank: this rank's index among those of its node.
        local_size: the number of ranks on this node, the same on each node; by default all ranks are on one node.

    Returns:
        The world, which is a context manager too.

    Raises:
        WorldError: `strategy` isn't a strategy, the environment is malformed, the ranks can't meet, the mesh doesn't
            fit, a world with other arguments is up already, or this process is a fork of a rank's.

    Example:
        >>> import torch, ltx
        >>> with ltx.init() as world:
        ...     world.size, ltx.psum(torch.tensor(3.0))
        (1, tensor(3.))
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise WorldError(
            f"ltx.init: strategy must be an ltx.Strategy or None, got {shown(strategy)}. Name other arguments: "
            'backend="gloo", mesh={"node": 2, "data": 4}, timeout=60.'
        )
    if timeout is DEFAULT_TIMEOUT:  # left out; the same duration written out is a request
        timeout = getattr(strategy, "timeout", None) or DEFAULT_TIMEOUT
    if mesh is not None and not isinstance(mesh, Mapping):
        raise WorldError(f"mesh={brief(mesh)}: expected axis names and sizes, such as {{'node': 2, 'data': 4}}.")
    named: dict[str, Any] = {
        "backend": backend or getattr(strategy, "process_group_backend", None),
        "timeout": _duration("timeout", timeout, DEFAULT_TIMEOUT),
        "heartbeat_timeout": _duration("heartbeat_timeout", heartbeat_timeout, DEFAULT_HEARTBEAT),
        "mesh": None if mesh is None else tuple(mesh.items()),
        "placement": HandedIn.launchers.placement_from_arguments(rank, size, master, local_rank, local_size),
    }
    asked = {name: value for name, value in named.items() if value is not None}  # what was left out agrees with any
    session = process.session
    if session is not None and session.pid != os.getpid():
        if dist.is_initialized():
            raise WorldError(
                f"rank {session.world.rank}: this process ({os.getpid()}) is a fork of the rank's own "
                f"({session.pid}), whose world isn't its own. Start ranks with ltx.launch, or before ltx.init."
            )
        session = None
        worlds.forget()
    if session is None:
        process.session = start(asked)
        HandedIn.launchers.note_uncaught()
        atexit.unregister(shutdown)  # register it once; it runs before handlers that were registered earlier
        atexit.register(shutdown)
        return process.session.world
    # The user may have destroyed the default group, which other libraries expect after ltx.init.
    own = session.world.launcher != "user" and session.settings["placement"].master is not None
    has_failed = comm.has_failed(of_peers=True) or (own and not dist.is_initialized())
    if has_failed:
        session = again(session)
    for name, new in asked.items():
        old = session.settings[name]
        if name == "placement":
            name, old, new = "(rank, size, master)", _place(old), _place(new)
        if new != old:
            old, new = (dict(value) if name == "mesh" else value for value in (old, new))
            raise WorldError(
                f"rank {session.world.rank}: ltx.init was called before with {name}={old!r} and now with {name}={new!r}"
                f". Call ltx.shutdown() on every rank first, or use the same {name}."
            )
    session.holds += not has_failed
    return session.world


def again(old: worlds.Session) -> worlds.Session:
    """Make a new world as `old`, which an exception has ended. Who holds the old one holds the new one."""
    if old.world.launcher == "user":
        raise WorldError(
            f"rank {old.world.rank}: an exception has ended this world, whose process group was initialised before "
            "ltx.init and may be out of step. On all ranks: ltx.shutdown(), torch.distributed.destroy_process_group(), "
            "initialise it again, and call ltx.init()."
        )
    processes = {rank: known for peers in comm.all_peers() for rank, known in peers.processes().items()}

    def look() -> None:
        if gone := sorted(rank for rank, process in processes.items() if kernel.state(process) == kernel.GONE):
            raise PeerLostError(
                f"rank {old.world.rank}: no new world can begin, as the process of rank {gone} is gone. Start all "
                "ranks again, from a checkpoint."
            )

    shutdown()
    with looking_out(look):
        new = start(old.settings)
    process.session = replace(new, holds=old.holds, before=(*old.before, old.world))
    return process.session


def start(asked: Mapping[str, Any]) -> worlds.Session:
    with ExitStack() as undo, ExitStack() as meanwhile:
        asked = {"timeout": DEFAULT_TIMEOUT, "heartbeat_timeout": DEFAULT_HEARTBEAT, **asked}
        timeout, heartbeat = asked["timeout"], asked["heartbeat_timeout"]
        placement = asked.get("placement") or (
            HandedIn.launchers.placement_beside_group(os.environ, dist.get_rank(), dist.get_world_size())
            if dist.is_initialized()
            else HandedIn.launchers.placement_from_env(os.environ)
        )
        mine = worlds.world_of_parent()
        if mine is not None and (mine.rank, mine.size) == (placement.rank, placement.size):
            raise WorldError(
                f"rank {mine.rank}: this process ({os.getpid()}) is a worker of rank {mine.rank} of {mine.size}, whose "
                "own process has the place in the world. ltx.world() tells rank and size here; to compute alone, "
                "write `with ltx.init(rank=0, size=1):`."
            )
        backend = asked.get("backend")
        world = adopted_world(placement, backend) if dist.is_initialized() else world_of(placement, backend=backend)
        mesh = asked.get("mesh", ((DEFAULT_NAME, world.size),))
        if world.device.index is not None:
            torch.accelerator.set_device_index(world.device.index)
        held: list[Any] = []
        undo.callback(let_go, held)  # this is undone last
        meeting = None
        if not dist.is_initialized() and placement.master is not None:
            meeting = make_group(placement, world, timeout, heartbeat.total_seconds(), undo, meanwhile)
        check_mesh(mesh, world)  # where it's wrong on one rank alone, the others hear of it
        if dist.is_initialized():
            axes, whole = open_axes(mesh, world, timeout, heartbeat, undo)
        else:
            axes, whole = tuple(Axis(name, size) for name, size in mesh), None
        if world.size > 1:
            undo.callback(os.environ.pop, worlds.RANK_VARIABLE, None)
            worlds.tell_children(world)
        undo.callback(set_world_axes, ())
        set_world_axes(axes, whole)
        undo.callback(_close_others, axes if whole is None else (*axes, whole), held)
        if meeting is not None:
            meeting.finish(placement)
            if len(process.stores) > 1:  # all ranks have left the earlier worlds
                process.stores = {placement: process.stores[placement]}
                gc.collect()  # leftover objects of earlier worlds keep their stores' threads and connections
        settings = asked | {"backend": world.backend, "mesh": mesh, "placement": placement}
        for tell in process.when_made:
            tell()
        return worlds.Session(world, settings, undo.pop_all())


def _close_others(axes: tuple[Axis, ...], held: list[Any]) -> None:
    """Add all open axes' communicators to `held`, and close axes that collectives on a group or mesh have opened."""
    held.extend(comm.communicators())
    for axis in comm.open_axes():
        if all(axis is not other for other in axes):
            close_ended(axis, dist.group.WORLD if dist.is_initialized() else None)


def _duration(name: str, value: timedelta | float, left_out: timedelta) -> timedelta | None:
    return None if value is left_out else timedelta(seconds=seconds(f"ltx.init: {name}", value, WorldError))


def _place(placement: Placement) -> tuple[Any, ...]:
    return placement.rank, placement.size, placement.master and f"{placement.master[0]}:{placement.master[1]}"
