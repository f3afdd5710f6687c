"""The axes that are open in this process: how they are opened over process groups, and closed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ltx.core.base.arguments import brief, is_whole
from ltx.core.base.errors import AxisError
from ltx.core.comm.axis_comm import AxisComm
from ltx.core.comm.heartbeat import DEFAULT_HEARTBEAT_S
from ltx.core.comm.opening import NewGroup
from ltx.core.comm.process_groups import let_go
from ltx.core.ranks import axis as axes
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import GroupBacking

_DEFAULT_TIMEOUT = timedelta(seconds=1800)

#: By group and name. A group that is opened by a second name has a second communicator.
_opened: dict[tuple[dist.ProcessGroup, str], Axis] = {}


def open_axis(
    name: str | None,
    group: dist.ProcessGroup | NewGroup,
    timeout: timedelta | None = None,
    heartbeat_s: float | None = None,
    make: Callable[[str, int, GroupBacking], Axis] = Axis,
) -> Axis:
    """The axis `name` over the ranks of `group`. All of them must call it, in the same order for several axes.

    `name`: None for one that no other axis has. `timeout` and `heartbeat_s`: None for those of the world. `make`: the
    kind of axis, if it isn't open yet.
    """
    if isinstance(group, dist.ProcessGroup) and name is not None and (group, name) in _opened:
        return _opened[group, name]
    if not isinstance(group, dist.ProcessGroup | NewGroup):  # torch gives a number to those who aren't in a new group
        raise AxisError(f"axis {name!r}: {outsider()}")
    of_world = _limits_of_world()
    axis_comm = AxisComm(name, group, timeout or of_world[0], heartbeat_s or of_world[1])
    axis = make(axis_comm.name, axis_comm.size, GroupBacking(axis_comm.rank, axis_comm))
    _opened[axis_comm.group, axis.name] = axis
    return axis


def _limits_of_world() -> tuple[timedelta, float]:
    """How long ranks of the world wait for one another, and without a sign of life of one for how many seconds."""
    for axis in axes.world_axes():
        if axis.comm is not None:
            return axis.comm.timeout, axis.comm.heartbeat.heartbeat_s
    return _DEFAULT_TIMEOUT, DEFAULT_HEARTBEAT_S


def first_opened(group: dist.ProcessGroup) -> Axis | None:
    """The axis over `group` that was opened first; None if there is none."""
    return next((axis for (known, _), axis in _opened.items() if known is group), None)


def opened_by_groups() -> tuple[Axis, ...]:
    """Every axis that :func:`open_axis` opened, and that is still open."""
    return tuple(_opened.values())


@dataclass(frozen=True)
class GroupAxis(Axis):
    """The axis of some ranks, which its user closes; what :func:`axis_from_group` returns.

    As a context manager it closes at the end of the block.
    """

    owns_group: bool = field(default=False, repr=False, compare=False)

    def close(self) -> None:
        """Close the axis, on all of its ranks: nothing can be issued on it any more. Closing it again does nothing.

        One that ``ltx.init`` had opened by the same name, over the same ranks, stays open: it is the world's.
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
            let_go(holders_of_groups([self, *self.comm.parts]))

    def __enter__(self) -> GroupAxis:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def axis_from_group(group: dist.ProcessGroup | Sequence[int], name: str | None = None) -> GroupAxis:
    """An axis over the ranks of a process group, or over some ranks of the world: a process set.

    Args:
        group: a ``torch.distributed`` process group that this process is in; or the ranks of the world, this one's
            among them, in the axis' order. No process group needs to be made for these, and no other rank takes part.
        name: what collectives call the axis, unless one of that name is in scope, or two are called so; it is always
            found by what this returns, or by the group itself. None: a name that no other axis has.

    Returns:
        The axis. All ranks of the group must call this, in the same order for several groups: its channels are opened.
        It is closed by ``axis.close()``, at the end of ``with ltx.axis_from_group(...) as axis:``, or with the world.

    Raises:
        AxisError: this process isn't a member; `group` is neither, or holds a rank that the world hasn't, or one twice.

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
        opened = open_axis(name, _new_group(ranks), make=partial(GroupAxis, owns_group=True))
    elif isinstance(group, dist.ProcessGroup):
        opened = open_axis(group.group_name if name is None else name, group, make=GroupAxis)
    else:  # torch gives a number to those who aren't in a new group
        raise AxisError(f"axis {name or group!r}: {outsider()}")
    return opened if isinstance(opened, GroupAxis) else GroupAxis(opened.name, opened.size, opened.backing)


def _new_group(ranks: list[Any]) -> NewGroup:
    """A process group of some ranks of the world, which they alone make."""
    if not dist.is_initialized():
        raise AxisError("axis_from_group: ranks are those of a world that is up. Call ltx.init() first.")
    size, mine = dist.get_world_size(), dist.get_rank()
    if not ranks or not all(is_whole(rank) and 0 <= rank < size for rank in ranks) or len(set(ranks)) != len(ranks):
        raise AxisError(f"axis_from_group: expected different ranks from 0 to {size - 1}, got {brief(ranks)}.")
    if mine not in ranks:
        raise AxisError(f"axis_from_group: rank {mine} isn't among ranks {ranks}. Only these may call it.")
    return NewGroup(ranks, dist.get_backend_config())


def outsider() -> str:
    """What is wrong where this process isn't in the group that is given for an axis."""
    who = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
    return f"{who} isn't a member of the process group that was given as an axis. Only its members may call this."


def close_axis(axis: Axis) -> None:
    """Close what :func:`open_axis` opened."""
    if axis.comm is not None:
        _opened.pop((axis.comm.group, axis.name), None)
        axis.comm.close()


def open_axes() -> tuple[Axis, ...]:
    """Every axis that is open, those opened by passing a group to a collective and parts of others included."""
    opened = opened_by_groups()
    return (*opened, *(part for axis in opened if axis.comm is not None for part in axis.comm.parts))


def holders_of_groups(opened: Iterable[Axis]) -> list[Any]:
    """What holds the process groups of the axes `opened`, and can let go of them: communicators and channels."""
    communicators = [axis.comm for axis in opened if axis.comm is not None]
    return [one for axis_comm in communicators for one in (axis_comm, *axis_comm.channels)]


def _refuse_forks() -> None:
    for axis in open_axes():
        if axis.comm is not None:
            axis.comm.refuse_fork()


os.register_at_fork(after_in_child=_refuse_forks)
