"""The axes that are open in this process: how they are opened, closed, and found by the user's `axis` argument."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ltx.core.base import traced
from ltx.core.base.arguments import brief, is_whole
from ltx.core.base.errors import AxisError, WorldError
from ltx.core.comm.axis_comm import AxisComm, NewGroup
from ltx.core.comm.backends import let_go
from ltx.core.comm.peers import DEFAULT_HEARTBEAT_S, own_parts
from ltx.core.comm.processes import ProcessRanks
from ltx.core.comm.signature import Signature
from ltx.core.ranks import axis as axes
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import Part, Ranks

_DEFAULT_TIMEOUT = timedelta(seconds=1800)

#: The open axes by group and name. A group that is opened by a second name has a second communicator.
_opened: dict[tuple[dist.ProcessGroup, str], Axis] = {}


def open_axis(
    name: str | None,
    group: dist.ProcessGroup | NewGroup,
    timeout: timedelta | None = None,
    heartbeat_s: float | None = None,
    make: Callable[[str, int, Ranks], Axis] = Axis,
) -> Axis:
    """The axis `name` over the ranks of `group`, which all call it. Defaults: a name of its own, the world's times."""
    if not isinstance(group, dist.ProcessGroup | NewGroup):  # torch gives a number to processes outside of a new group
        who = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
        raise AxisError(
            f"axis {name or group!r}: {who} isn't a member of the process group that was given as an axis. Only its "
            "members may call this."
        )
    if isinstance(group, dist.ProcessGroup):
        name = group.group_name if name is None else name
        if (group, name) in _opened:
            return _opened[group, name]
    world = [axis.comm for axis in axes.world_axes() if axis.comm is not None]
    of_world = (world[0].timeout, world[0].peers.heartbeat_s) if world else (_DEFAULT_TIMEOUT, DEFAULT_HEARTBEAT_S)
    axis_comm = ProcessRanks(name, group, timeout or of_world[0], heartbeat_s or of_world[1])
    axis = make(axis_comm.name, axis_comm.size, axis_comm)
    _opened[axis_comm.group, axis.name] = axis
    return axis


def first_opened(group: dist.ProcessGroup) -> Axis | None:
    """The axis over `group` that was opened first; None if there is none."""
    return next((axis for (known, _), axis in _opened.items() if known is group), None)


@dataclass(frozen=True)
class GroupAxis(Axis):
    """The axis of some ranks, which its user closes; what :func:`axis_from_group` returns.

    As a context manager it closes at the end of the block.
    """

    owns_group: bool = field(default=False, repr=False, compare=False)

    def close(self) -> None:
        """Close the axis, on all of its ranks: nothing can be issued on it any more. A second call does nothing.

        If ``ltx.init`` had opened the axis (same name, same ranks), it stays open, as the world's.
        """
        if self.comm is None or self.comm.closed or any(axis.comm is self.comm for axis in axes.world_axes()):
            return
        try:
            close_axis(self)
        finally:
            if self.owns_group:
                dist.destroy_process_group(self.comm.group)
            else:
                self.comm.group = None  # it goes on
            let_go([self.comm])

    def __enter__(self) -> GroupAxis:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def axis_from_group(group: dist.ProcessGroup | Sequence[int], name: str | None = None) -> GroupAxis:
    """An axis over the ranks of a process group, or over some ranks of the world: a process set.

    Args:
        group: a ``torch.distributed`` process group that this process is in; or a list of ranks of the world, this one
            among them, in the axis' order: no process group needs to be made for them, and no other rank takes part.
        name: what collectives call the axis, unless an axis of that name is in scope, or two axes have it. The returned
            axis, or the group itself, always works. None: a new, unique name.

    Returns:
        The axis. All ranks of the group must call this, in the same order for several groups: its channels are opened.
        It is closed by ``axis.close()``, at the end of ``with ltx.axis_from_group(...) as axis:``, or with the world.

    Raises:
        AxisError: this process isn't a member; `group` is neither, or holds a rank outside of the world, or one twice.

    Example:
        >>> import torch, ltx
        >>> with ltx.init(), ltx.axis_from_group([0]) as alone:
        ...     ltx.psum(torch.tensor(3.0), alone)
        tensor(3.)

    Source: Horovod's process sets.
    """
    ranks = None if isinstance(group, dist.ProcessGroup | int | str) or not isinstance(group, Sequence) else list(group)
    if not (isinstance(group, dist.ProcessGroup | int) or ranks is not None) or not isinstance(name, str | None):
        said = f"{brief(group)} and {brief(name)}"
        raise AxisError(f"axis_from_group takes a torch.distributed process group or ranks, and a name, got {said}.")
    if ranks == [0] and not dist.is_initialized():  # a world of one
        return GroupAxis("ranks [0]" if name is None else name, 1)
    if ranks is not None:
        if not dist.is_initialized():
            raise AxisError("axis_from_group: ranks are those of a world that is up. Call ltx.init() first.")
        size, mine = dist.get_world_size(), dist.get_rank()
        if not ranks or not all(is_whole(rank) and 0 <= rank < size for rank in ranks) or len(set(ranks)) != len(ranks):
            raise AxisError(f"axis_from_group: expected different ranks from 0 to {size - 1}, got {brief(ranks)}.")
        if mine not in ranks:
            raise AxisError(f"axis_from_group: rank {mine} isn't among ranks {ranks}. Only these may call it.")
        made = NewGroup(ranks, dist.get_backend_config())  # which these ranks alone make
        opened = open_axis(name, made, make=partial(GroupAxis, owns_group=True))
    else:
        opened = open_axis(name, group, make=GroupAxis)  # type: ignore[arg-type]
    return opened if isinstance(opened, GroupAxis) else GroupAxis(opened.name, opened.size, opened.ranks)


def close_axis(axis: Axis) -> None:
    _opened.pop((axis.comm.group, axis.name), None)
    axis.comm.close()


def open_axes() -> tuple[Axis, ...]:
    """All open axes, also those that a collective opened for a group, but no parts of other axes."""
    return tuple(_opened.values())


def communicators() -> list[Any]:
    """Those of all open axes and of their parts."""
    return [axis_comm for own in own_parts.values() for axis_comm in own.axes]


def has_failed(of_peers: bool = False) -> bool:
    """Whether an exception has ended the world of the open axes; `of_peers`: also one of a rank that has said so."""
    comms = communicators()
    failed = any(each.passes.failed or any(channel.failed for channel in each.channels) for each in comms)
    if of_peers and not failed:
        for each in comms:
            each.passes.find_dropped()
        # Peers that wait for the rest of what this rank has left fail.
        failed = any(each.passes.failed or each.passes.is_uncounted for each in comms)
        failed = failed or any(each.peers.gone("failed") for each in comms)
    return failed


def has_lost_pass(axis: Axis) -> bool:
    """Whether the device has given up collectives of the last pass on `axis`, whose results the host has taken."""
    group = None if axis.comm is None else axis.comm.user.stream_group
    return group is not None and group.has_lost_pass


def end_world(axis: Axis, error: BaseException, what: str) -> None:
    """End the world of `axis` because of an `error` in `what`, for whose rest peers wait."""
    if axis.comm is not None:
        axis.comm.passes.end_world(error, what)


def all_peers() -> list[Any]:
    """The peers on one open axis of each world."""
    return [own.axes[-1].peers for own in own_parts.values() if own.axes]


def _refuse_fork() -> None:
    """Refuse every collective: this process is a fork of the rank's own, for which peers would take it."""
    for axis_comm in communicators():
        error = WorldError(
            f"rank {axis_comm.rank}: this process ({os.getpid()}) is a fork of the rank's own "
            f"({axis_comm.peers.own.pid}), and can't take part in collectives on axis {axis_comm.name!r}: its peers "
            "would take it for the rank. Call them in the rank's own process. Forks that only compute are fine."
        )
        for channel in axis_comm.channels:
            channel.failed = error


os.register_at_fork(after_in_child=_refuse_fork)


class InGroups(NamedTuple):
    """The ranks of a group of an axis, as an axis: `axis_index_groups` turns a collective's axis into it."""

    axis: Any  # as users give one
    groups: tuple[tuple[int, ...], ...]  # each group's ranks


@dataclass(frozen=True)
class MeshAxis(Axis):
    """The axis of `mesh`, a dimension of a DeviceMesh (a mesh itself); the axis has the dimension's name."""

    mesh: DeviceMesh | None = field(default=None, repr=False, compare=False)


def resolve(axis: Any) -> Axis:
    """The axis that a user means: None, a name, an Axis, a process group, a DeviceMesh, or a tuple of these."""
    if isinstance(axis, str):
        return _called(axis)
    if isinstance(axis, list):
        return resolve(tuple(axis))
    if axis is None:
        return axes.find(axis)
    if isinstance(axis, InGroups):
        return _resolve_groups(resolve(axis.axis), axis.groups)
    if meshes := _meshes_in(axis):
        return _of_meshes(meshes)
    if isinstance(axis, tuple):
        return axes.joined(axis)
    if isinstance(axis, Axis):
        return axes.check_open(axis)
    if isinstance(axis, dist.ProcessGroup) or (isinstance(axis, int) and axis == dist.GroupMember.NON_GROUP_MEMBER):
        return first_opened(axis) or open_axis(None, axis)  # type: ignore[arg-type]
    got = f"{axis}. A dimension of tensors is dim= here" if isinstance(axis, int) else type(axis).__name__
    raise AxisError(f"an axis is a name, a tuple of names, an ltx.Axis, a ProcessGroup or a DeviceMesh, got {got}.")


def kinds_of(axis: Any) -> list[Any]:
    """A tuple of names split by kind, processes and simulated ranks, if it mixes both kinds; else `axis` alone."""
    if traced.recording() or type(axis) not in (tuple, list):
        return [axis]
    in_scope = [known.name for known in axes.axes_in_scope()]
    if any(name not in in_scope for name in axis):
        return [axis]
    kinds: dict[type, list[str]] = {}
    for name in axis:
        found = axes.find(name)
        if found.ranks.levels or found.size > 1:
            kinds.setdefault(type(found.ranks), []).append(name)
    return [tuple(names) for names in kinds.values()] if len(kinds) > 1 else [axis]


def _called(name: str) -> Axis:
    """The axis of that name: first the axes in scope, then axes opened by a group or a DeviceMesh."""
    opened = [known for known in _opened.values() if known.name == name]
    if all(known.name != name for known in axes.axes_in_scope()):
        if len(opened) > 1:
            raise AxisError(f"axis={name!r}: {len(opened)} axes are called so. Give the axis, group or mesh itself.")
        return opened[0] if opened else axes.find(name)
    found = axes.find(name)
    here = found.comm and found.comm.global_ranks
    others = [known for known in opened if isinstance(known, MeshAxis) and known.comm.global_ranks != here]
    if others and not found.ranks.levels:
        raise AxisError(
            f"axis={name!r} is the name of two axes: of the world's, with {found.size} ranks, and of a dimension of a "
            f"DeviceMesh, with {others[0].size}. Write axis=mesh[{name!r}] for the mesh's; for the world's give it "
            'another name, such as ltx.init(mesh={"world": ...}).'
        )
    return found


def _meshes_in(axis: Any) -> list[DeviceMesh]:
    """The meshes that a user gives as an axis: one mesh, or a tuple of dimensions, given as meshes or by name."""
    if isinstance(axis, DeviceMesh):
        return [axis]
    if not isinstance(axis, tuple):
        return []
    scope = {known.name for known in axes.axes_in_scope()}
    named = {known.name: known.mesh for known in _opened.values() if isinstance(known, MeshAxis)}
    meshes = [named.get(part) if isinstance(part, str) and part not in scope else part for part in axis]
    found = [mesh for mesh in meshes if isinstance(mesh, DeviceMesh)]
    if found and len(found) < len(axis):
        raise AxisError(
            f"axis={brief(axis)} mixes axes in scope with dimensions of a DeviceMesh. Name axes of ltx.init(mesh=...) "
            "alone, or give the mesh's: axis=mesh['node', 'data']."
        )
    return found


def _ranks_of_meshes(meshes: list[DeviceMesh]) -> list[int]:
    """The ranks of one mesh, or of all dimensions `meshes` of one mesh, the first the outermost."""
    me = dist.get_rank()
    if len(meshes) == 1:
        ranks: list[int] = meshes[0].mesh.flatten().tolist()
    else:
        root, names = meshes[0]._get_root_mesh(), [mesh.mesh_dim_names or () for mesh in meshes]
        known = root.mesh_dim_names or ()
        if any(mesh._get_root_mesh() != root for mesh in meshes) or any(len(name) != 1 for name in names):
            raise AxisError("axis: a tuple of DeviceMeshes holds named dimensions of one mesh, as mesh['data'] is one.")
        dims = [known.index(name[0]) for name in names]
        if len(set(dims)) < len(dims):
            raise AxisError(f"axis: a dimension occurs more than once in {names}. Give each once.")
        here = (root.mesh == me).nonzero()[0].tolist() if bool((root.mesh == me).any()) else [0] * root.ndim
        lying = root.mesh.permute(*dims, *(dim for dim in range(root.ndim) if dim not in dims))
        ranks = lying[(..., *(here[dim] for dim in range(root.ndim) if dim not in dims))].flatten().tolist()
    if me not in ranks:
        raise AxisError(f"rank {me} isn't on the DeviceMesh that was given as an axis: its ranks are {ranks}.")
    return ranks


def _of_meshes(meshes: list[DeviceMesh]) -> Axis:
    """The axis of a mesh, opened when it is given for the first time, on all of its ranks."""
    ranks = _ranks_of_meshes(meshes)
    names = [name for mesh in meshes for name in mesh.mesh_dim_names or map(str, range(mesh.ndim))]
    if len(names) > 1:
        title = f"({', '.join(names)})"
        same = [axis for axis in _opened.values() if axis.comm.global_ranks == ranks]
        return Axis(title, 1) if len(ranks) == 1 else same[0] if same else axis_from_group(ranks, title)
    group = meshes[0].get_group()
    name = names[0] if meshes[0].mesh_dim_names else group.group_name
    return first_opened(group) or open_axis(name, group, make=partial(MeshAxis, mesh=meshes[0]))


def _resolve_groups(axis: Axis, groups: tuple[tuple[int, ...], ...]) -> Axis:
    """The axis of this rank's group. Ranks compare new groups before they open them."""
    part, said = Part(groups), f"axis_index_groups={brief([list(group) for group in groups])}"
    size = axis.ranks.least(axis.size)
    indices = [index for group in groups for index in group]
    if size < axis.size or () in groups or sorted(indices) != list(range(size)):
        raise AxisError(
            f"{said}: on axis {axis.name!r} of {axis.size} ranks, every index from 0 to {axis.size - 1} must be in "
            f"exactly one group, and no group may be empty. {_partition_fault(indices, size)}"
        )
    if len(groups) == 1 and indices == list(range(size)):
        return axis
    if axis.comm is None:
        return axes.in_groups(axis, part, f"{axis.name} in {len(groups)} groups")
    axis_comm: AxisComm = axis.comm
    if not axis_comm.compared.has(InGroups, groups):
        axis_comm.negotiate(axis_comm.user, (InGroups, groups), lambda: Signature("axis_index_groups", (), said))
        axis_comm.compared.add(InGroups, groups)
    return axes.in_groups(axis, part, f"{axis.name}, ranks {', '.join(map(str, part.members(axis_comm.rank)))}")


def _partition_fault(indices: list[int], size: int) -> str:
    if unknown := sorted({index for index in indices if not 0 <= index < size}):
        return f"It has no rank {unknown[0]}."
    if twice := sorted({index for index in indices if indices.count(index) > 1}):
        return f"Rank {twice[0]} is in more than one place."
    if missing := sorted(set(range(size)) - {*indices}):
        return f"Rank {missing[0]} is in none."
    return "Leave the empty ones out." if size else "Give one list for each group."
