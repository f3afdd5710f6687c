"""Which of the axes that are in scope or open a user means: by None, a name, a process group or a DeviceMesh."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ltx.core.base import traced
from ltx.core.base.arguments import brief
from ltx.core.base.errors import AxisError
from ltx.core.comm.axis_comm import AxisComm
from ltx.core.comm.registry import axis_from_group, first_opened, open_axis, opened_by_groups, outsider
from ltx.core.comm.signature import Signature
from ltx.core.ranks import axis as axes
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import Part


class InGroups(NamedTuple):
    """The ranks of a group of an axis, as an axis: what `axis_index_groups` makes of the axis of a collective.

    Attributes:
        axis: as users give one.
        groups: the indices of each group; as lists in errors.
    """

    axis: Any
    groups: tuple[tuple[int, ...], ...]


class InBackground(NamedTuple):
    """An axis on which a collective is begun and waited for later (``ltx.async_``).

    Attributes:
        axis: as users give one.
        name: the collective's, as users call it.
    """

    axis: Any
    name: str


@dataclass(frozen=True)
class MeshAxis(Axis):
    """The axis of a dimension of a DeviceMesh, called as that is.

    Attributes:
        mesh: that dimension, a mesh by itself.
    """

    mesh: DeviceMesh | None = field(default=None, repr=False, compare=False)


def size_and_rank(axis: Any) -> tuple[int, int]:
    """(number of ranks, this one's place among them) of the axis that a user means; 0 on simulated ranks.

    Unlike :func:`resolve` it never opens an axis, which all its ranks would have to do together.
    """
    meshes = _meshes_in(axis)
    if meshes:
        ranks = _ranks_of_meshes(meshes)
        return len(ranks), ranks.index(dist.get_rank())
    if isinstance(axis, dist.ProcessGroup):
        return axis.size(), axis.rank()
    found = resolve(axis)
    return found.size, found.rank if isinstance(found.rank, int) else 0


def resolve(axis: Any) -> Axis:
    """The axis that a user means: None, a name or a tuple of names, an Axis, a process group, a DeviceMesh, or a tuple
    of dimensions of one."""
    if isinstance(axis, str):
        return _called(axis)
    if isinstance(axis, list):
        return resolve(tuple(axis))
    if axis is None:
        return axes.find(axis)
    if isinstance(axis, InBackground):
        return resolve(axis.axis)
    if isinstance(axis, InGroups):
        return _resolve_groups(resolve(axis.axis), axis.groups)
    if meshes := _meshes_in(axis):
        return _of_meshes(meshes)
    if isinstance(axis, tuple):
        return axes.joined(axis)
    if isinstance(axis, Axis):
        return axes.check_open(axis)
    if isinstance(axis, dist.ProcessGroup):
        return first_opened(axis) or open_axis(axis.group_name, axis)
    if isinstance(axis, int) and axis == dist.GroupMember.NON_GROUP_MEMBER:
        # What torch gives to those who aren't in a new group.
        raise AxisError(outsider())
    got = f"{axis}. A dimension of tensors is dim= here" if isinstance(axis, int) else type(axis).__name__
    raise AxisError(f"an axis is a name, a tuple of names, an ltx.Axis, a ProcessGroup or a DeviceMesh, got {got}.")


def kinds_of(axis: Any) -> list[Any]:
    """The names of each kind, processes or simulated ranks, in a tuple of names that mixes them; else `axis` alone."""
    if traced.recording() or type(axis) not in (tuple, list) or not all(isinstance(name, str) for name in axis):
        return [axis]
    kinds: dict[type, list[str]] = {}
    for name in axis:
        found = axes.find(name)
        if found.simulated or found.size > 1:
            kinds.setdefault(type(found.backing), []).append(name)
    return [tuple(names) for names in kinds.values()] if len(kinds) > 1 else [axis]


def _called(name: str) -> Axis:
    """The axis of that name: what is in scope first, then what was opened by a group or a DeviceMesh."""
    opened = [known for known in opened_by_groups() if known.name == name]
    if all(known.name != name for known in axes.axes_in_scope()):
        if len(opened) > 1:
            raise AxisError(f"axis={name!r}: {len(opened)} axes are called so. Give the axis, group or mesh itself.")
        return opened[0] if opened else axes.find(name)
    found = axes.find(name)
    others = [known for known in opened if isinstance(known, MeshAxis) and _ranks(known) != _ranks(found)]
    if others and not found.simulated:
        raise AxisError(
            f"axis={name!r} is the name of two axes: of the world's, with {found.size} ranks, and of a dimension of a "
            f"DeviceMesh, with {others[0].size}. Write axis=mesh[{name!r}] for the mesh's; for the world's give it "
            'another name, such as ltx.init(mesh={"world": ...}).'
        )
    return found


def _ranks(axis: Axis) -> list[int]:
    """The ranks of the world on an axis of processes; none for another."""
    return [] if axis.comm is None else axis.comm.global_ranks


def _meshes_in(axis: Any) -> list[DeviceMesh]:
    """The meshes that a user gives for an axis: one, or a tuple of dimensions by themselves or by their names."""
    if isinstance(axis, DeviceMesh):
        return [axis]
    if not isinstance(axis, tuple):
        return []
    scope = {known.name for known in axes.axes_in_scope()}
    named = {known.name: known.mesh for known in opened_by_groups() if isinstance(known, MeshAxis)}
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
        same = [axis for axis in opened_by_groups() if _ranks(axis) == ranks]
        return Axis(title, 1) if len(ranks) == 1 else same[0] if same else axis_from_group(ranks, title)
    group = meshes[0].get_group()
    name = names[0] if meshes[0].mesh_dim_names else group.group_name
    return first_opened(group) or open_axis(name, group, make=partial(MeshAxis, mesh=meshes[0]))


def _resolve_groups(axis: Axis, groups: tuple[tuple[int, ...], ...]) -> Axis:
    """The axis of this rank's group; ranks compare groups that are new before they open any."""
    part, said = Part(groups), f"axis_index_groups={brief([list(group) for group in groups])}"
    size = axis.size if axis.simulated is None or axis.simulated.part is None else min(axis.simulated.part.sizes)
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
    members = part.members(axis_comm.rank)
    return axes.in_groups(axis, part, f"{axis.name}, ranks {', '.join(map(str, members))}")


def _partition_fault(indices: list[int], size: int) -> str:
    if unknown := sorted({index for index in indices if not 0 <= index < size}):
        return f"It has no rank {unknown[0]}."
    if twice := sorted({index for index in indices if indices.count(index) > 1}):
        return f"Rank {twice[0]} is in more than one place."
    if missing := sorted(set(range(size)) - {*indices}):
        return f"Rank {missing[0]} is in none."
    return "Leave the empty ones out." if size else "Give one list for each group."
