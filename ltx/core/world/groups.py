"""The process groups and axes of a world: made, adopted, and destroyed."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# imported before any world: its functions bind the world's group as a default
from ltx.core.base.errors import WorldError
from ltx.core.base.handed_in import HandedIn
from ltx.core.comm.backends import LATER, backends_of, connecting, set_up_watchdog
from ltx.core.comm.registry import close_axis, open_axis
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import mesh_part
from ltx.core.world.world import Placement, World, process, world_of

#: The sizes of a world's axes by name, outermost first.
Mesh = tuple[tuple[str, int], ...]


def adopted_world(placement: Placement, backend: str | None) -> World:
    """The world of a process group that the user has initialised; raises unless the arguments of ``ltx.init`` agree."""
    rank, size, used = dist.get_rank(), dist.get_world_size(), str(dist.get_backend())
    if used == "undefined":  # several, by device
        used = str(dist.get_backend_config())
    if backend is not None and backend != used:
        raise WorldError(
            f"rank {rank}: torch.distributed is initialised already with backend={used!r}, and ltx.init was asked for "
            f"backend={backend!r}. Leave backend out to use what is there, or destroy that process group first."
        )
    if (placement.rank, placement.size) != (rank, size):
        raise WorldError(
            f"rank {rank}: torch.distributed is initialised already with {size} ranks, and ltx.init was asked for "
            f"rank={placement.rank}, size={placement.size}. Leave these out, or destroy that process group first."
        )
    return world_of(replace(placement, launcher="user"), backend=used)


def make_group(
    placement: Placement, world: World, timeout: timedelta, heartbeat_s: float, undo: ExitStack, meanwhile: ExitStack
) -> Any:
    """Initialise torch.distributed. Returns the ranks' meeting. `meanwhile` closes once the world is made."""
    assert placement.master is not None
    address, port = placement.master
    process.worlds, process.abandoned = process.worlds + 1, False
    try:
        meeting, apart = HandedIn.meeting(placement, world, timeout, heartbeat_s, undo, meanwhile)
        set_up_watchdog()
        c10d._world.group_count = 0  # the number names the group; after a failure torch leaves it at 1
        with connecting():
            limit, size = timeout + LATER, world.size
            dist.init_process_group(world.backend, store=apart, rank=world.rank, world_size=size, timeout=limit)
    except WorldError:
        raise
    except Exception as error:
        raise WorldError(
            f"rank {world.rank} of {world.size} couldn't set up torch.distributed ({world.backend}) at "
            f"{address}:{port} within {timeout.total_seconds():g} s: {type(error).__name__}: {error}\n"
            f"Check that all {world.size} ranks were started, that they have the same MASTER_ADDR and MASTER_PORT and "
            "call ltx.init equally often, and that no other program uses that port."
        ) from error
    undo.callback(_destroy, dist.group.WORLD, dist.group.WORLD)
    meeting.watcher.watch_for(c10d._get_default_store())
    return meeting


def check_mesh(mesh: Mesh, world: World) -> None:
    for name, size in mesh:
        if not isinstance(name, str) or not name or not isinstance(size, int) or size < 1:
            raise WorldError(
                f"mesh={dict(mesh)!r}: expected axis names with sizes of at least 1, got {name!r}: {size!r}."
            )
    product = math.prod(size for _, size in mesh)
    if not mesh or product != world.size:
        sizes = " * ".join(str(size) for _, size in mesh) or "no axes"
        raise WorldError(
            f"mesh={dict(mesh)!r} is for {sizes} = {product} ranks, but the world has {world.size} (launcher "
            f"{world.launcher!r}). Start {product} ranks, or choose sizes whose product is {world.size}."
        )


def open_axes(
    mesh: Mesh, world: World, timeout: timedelta, heartbeat: timedelta, undo: ExitStack
) -> tuple[tuple[Axis, ...], Axis | None]:
    """For each entry of `mesh`, the axis of the ranks that differ in it alone; and, of several, one of all ranks."""
    axes = []
    for dim, (name, size) in enumerate(mesh):
        group = dist.group.WORLD
        if size < world.size:
            # new_group is collective over the world: every rank makes all of them, in the same order.
            for members in mesh_part(tuple(size for _, size in mesh), (dim,)).groups:
                made = dist.new_group(list(members), timeout=timeout)
                if world.rank in members:
                    group = made
                    undo.callback(_destroy, made, dist.group.WORLD)
        assert group is not None
        axes.append(open_axis(name, group, timeout, heartbeat.total_seconds()))
        undo.callback(close_ended, axes[-1], dist.group.WORLD)
    whole = next((axis for axis in axes if axis.size == world.size), None)
    if whole is None and dist.group.WORLD is not None:
        name = f"({', '.join(name for name, _ in mesh)})"
        whole = open_axis(name, dist.group.WORLD, timeout, heartbeat.total_seconds())
        undo.callback(close_ended, whole, dist.group.WORLD)
    return tuple(axes), whole if len(axes) > 1 else None


def _destroy(group: Any, world_group: Any) -> None:
    if dist.is_initialized() and dist.group.WORLD is world_group:  # else the user has destroyed it
        if process.abandoned and backends_of(group).stream:  # an orderly end would wait for kernels that may never end
            group.abort()
        dist.destroy_process_group(group)


def close_ended(axis: Axis, world_group: Any) -> None:
    """Close an axis whose process groups may have been destroyed."""
    try:
        close_axis(axis)
    except ValueError:  # the axis' process groups are gone, which is fine if the user has destroyed them all
        if dist.is_initialized() and dist.group.WORLD is world_group:
            raise
