"""Named axes: the dimensions of ranks that collectives reduce over, and which of them are in scope.

An axis is backed by a process group, by a level of ``torch.vmap`` (:func:`ltx.vmap`), or by nothing (size 1). Code that
uses an axis can't tell which. The axes in scope are the only ambient state of ltx: the world's axes, set by
``ltx.init``, and inside them the axes that :func:`ltx.vmap` opens in a thread while its function runs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ltx.core.base import private
from ltx.core.base.arguments import brief, check_fields
from ltx.core.base.errors import AxisError
from ltx.core.base.traced import at_trace_time
from ltx.core.ranks.backings import ALONE, Alone, Levels, Part, Ranks, mesh_part
from ltx.core.ranks.batched import VmapRanks

DEFAULT_NAME = "data"


@dataclass(frozen=True)
class Axis:
    """A named dimension of ranks.

    Attributes:
        name: the axis' name in collectives. size: the number of ranks; for groups of unequal sizes on simulated ranks,
            the largest. ranks: the object through which the ranks communicate.
    """

    name: str
    size: int
    ranks: Ranks = None  # type: ignore[assignment]  # this rank alone

    def __post_init__(self) -> None:
        if self.ranks is None:  # not a field default, since Dynamo finds no source for it
            object.__setattr__(self, "ranks", ALONE)
        check_fields(self, AxisError)
        if self.size < 1:
            raise AxisError(f"axis {self.name!r}: an axis has at least one rank, got size={self.size}.")

    def index(self) -> torch.Tensor:
        """This rank's position on the axis, a 0-dim int64 tensor on every kind of ranks."""
        return self.ranks.index(self.size)

    def at(self, levels: Levels) -> Axis:
        """The axis with its ranks at other vmap levels, as many; ranks that are no entries of levels stay."""
        ranks: Any = self.ranks
        return replace(self, ranks=ranks.at(levels)) if levels else self

    @property
    def batch_index(self) -> torch.Tensor | None:
        """:meth:`index` if it is batched. As an input it makes torch.func call a Function's vmap rule at each level."""
        return self.index() if self.ranks.levels else None

    @property
    def rank(self) -> int | torch.Tensor:
        """This rank's position: an int where each process has one rank, else the tensor of :meth:`index`."""
        return self.index() if self.ranks.levels else self.ranks.rank

    @property
    def comm(self) -> Any:
        """The :class:`ltx.core.comm.AxisComm` of an axis whose ranks are processes; None for any other axis."""
        return self.ranks if self.ranks.overlaps else None


def inner(axis: Axis, size: int) -> Axis:
    """The axis of this rank's node: `axis` consists of nodes of `size` ranks each, one node after the other.

    Between processes all ranks of `axis` must call this together the first time.

    Raises:
        AxisError: `axis` doesn't divide into nodes of that size.

    Example:
        >>> import torch, ltx
        >>> from ltx.core.ranks.axis import find, inner
        >>> ltx.vmap(lambda x: ltx.psum(x, inner(find("data"), 2)))(torch.tensor([1, 2, 3, 4]))
        tensor([3, 3, 7, 7])
    """
    return _part(axis, size, across=False)


def outer(axis: Axis, size: int) -> Axis:
    """The axis of the ranks that have the same place in their node as this rank; see :func:`inner`.

    Example:
        >>> import torch, ltx
        >>> from ltx.core.ranks.axis import find, outer
        >>> ltx.vmap(lambda x: ltx.psum(x, outer(find("data"), 2)))(torch.tensor([1, 2, 3, 4]))
        tensor([4, 6, 4, 6])
    """
    return _part(axis, size, across=True)


def _part(axis: Axis, size: int, across: bool) -> Axis:
    if size < 1 or axis.size % size:
        raise AxisError(
            f"axis {axis.name!r} has {axis.size} ranks, which don't divide into nodes of {size}. Give a divisor."
        )
    if size == (1 if across else axis.size):
        return axis
    name = f"{axis.name} {'across' if across else 'within'} nodes of {size}"
    return in_groups(axis, mesh_part((axis.size // size, size), (0,) if across else (1,)), name)


def in_groups(axis: Axis, part: Part, name: str) -> Axis:
    """The axis `name` of this rank's group of `part`. Between processes all of the group call it the first time."""
    size, ranks = axis.ranks.part(name, part)
    return Axis(name, 1) if size == 1 else Axis(name, size, ranks)


#: The axis of a process in which there is no world: one object, by which a step knows that nothing has changed.
_NO_WORLD = Axis(DEFAULT_NAME, 1)
#: A check that raises if a launcher has started other ranks too. Empty once it has passed, or a world was made.
checks_alone: list[Callable[[], None]] = []
_world_axes: tuple[Axis, ...] = ()
_whole_world: list[Axis] = []  # the axis of all ranks of a world that has several axes
# The opened axes by thread, each with the Dynamo trace in which it was opened, if any.
_opened_axes: dict[int, list[tuple[Axis, private.TracingContext | None]]] = {}


def check_open(axis: Axis) -> Axis:
    """`axis`, if it is open; raises for one whose :func:`vmap` has ended."""
    if why := axis.ranks.ended:
        raise AxisError(f"axis {axis.name!r} is closed: {why}.")
    if isinstance(axis.ranks, Alone) and axis.size > 1:
        raise AxisError(
            f"axis {axis.name!r} has {axis.size} ranks and none that it stands for. Open one with ltx.vmap, "
            "ltx.init(mesh=...) or ltx.axis_from_group."
        )
    return axis


def set_world_axes(axes: tuple[Axis, ...], whole: Axis | None = None) -> None:
    """Put `axes`, outermost first, in scope in all threads; ``()``: none. `whole`: of several, that of all ranks."""
    global _world_axes
    _world_axes = axes
    if axes:
        checks_alone.clear()
    _whole_world[:] = [] if whole is None else [whole]


def world_axes() -> tuple[Axis, ...]:
    """The axes of the current world, with the axis of all its ranks."""
    return (*_world_axes, *_whole_world)


def axes_in_scope() -> tuple[Axis, ...]:
    """All axes in scope, innermost last."""
    return (*_world_axes, *_opened(_there()))


def _opened(there: tuple[tuple[int, int], ...]) -> tuple[Axis, ...]:
    # An axis of another thread may have ended meanwhile.
    return tuple(axis for thread, at in there for axis, _ in _opened_axes.get(thread, [])[at : at + 1])


def find(name: str | None) -> Axis:
    """The innermost axis called `name`; None means the only axis in scope, and raises if there are several, of size 1
    too: a program means the same on one node and on several. It still works for nested simulated axes of one name, and
    inside a world of one process. Without any axis in scope there is a default axis of size 1, unless a launcher has
    started this process as one of several ranks: then WorldError.
    """
    simple = len(_world_axes) < 2 and not _there()
    scope = _world_axes if simple else _choice() if name is None else axes_in_scope()
    for candidate in reversed(scope):
        if name is None or candidate.name == name:
            return candidate
    if name is None or name == DEFAULT_NAME:
        for check in checks_alone:
            check()
        checks_alone.clear()
        return _NO_WORLD
    known = ", ".join(repr(a.name) for a in scope) or "none (ltx.init hasn't made any)"
    raise AxisError(
        f"no axis called {name!r} is in scope; in scope: {known}. Open it with ltx.vmap(f, axis_name={name!r}) "
        f"or name it in ltx.init(mesh={{{name!r}: ...}})."
    )


def _choice() -> tuple[Axis, ...]:
    """The axes in scope for ``axis=None``; raises if None is ambiguous."""
    world, opened = math.prod([axis.size for axis in _world_axes]), _opened(_there())
    scope = opened if opened and world == 1 else (*_world_axes, *opened)
    names = list(dict.fromkeys(axis.name for axis in scope))
    if len(names) > 1:
        listed = ", ".join(f"{axis.name!r} ({axis.size})" for axis in scope)
        both = "" if opened and world > 1 else f" for one of them, or axis=({', '.join(map(repr, names))}) for all"
        raise AxisError(
            f"axis=None names no axis where several are in scope: {listed}, outermost first. To reduce over one alone "
            f"would let the others drift apart. Write axis={names[-1]!r}{both}."
        )
    return scope


def joined(names: tuple[Any, ...]) -> Axis:
    """One axis of all ranks of several axes, outermost first. Between processes, all its ranks must call this."""
    said = f"axis={brief(names)}"
    if not all(isinstance(name, str) for name in names):
        raise AxisError(f"{said}: a tuple of axes holds names, such as ('node', 'data').")
    if not names:
        return Axis("()", 1)
    if twice := [name for name in names if names.count(name) > 1]:
        raise AxisError(f"{said}: {twice[0]!r} occurs more than once. Name each axis once.")
    axes = [find(name) for name in names]
    if len(axes) == 1:
        return axes[0]
    title, size = f"({', '.join(names)})", math.prod(axis.size for axis in axes)
    real = [axis for axis in axes if axis.ranks.levels or (axis.size > 1 and axis.ranks != Alone())]
    kinds = {type(axis.ranks) for axis in real}
    if not real:
        return Axis(title, size)
    if len(real) == 1:
        return real[0]
    if kinds == {VmapRanks}:
        levels = [axis.ranks.levels.numbers[0] for axis in real]
        numbers = tuple(sorted(levels))
        dims = tuple((numbers.index(level), axis.size) for level, axis in zip(levels, real, strict=True))
        return Axis(title, size, VmapRanks(Levels(numbers), None, dims, real[0].ranks.device))
    if len(kinds) > 1:
        raise AxisError(
            f"{said} mixes axes of different kinds ({', '.join(f'{a.name!r}' for a in real)}). psum, pmean, pmax, pmin "
            "and axis_size take these, without axis_index_groups; reduce over one after the other elsewhere."
        )
    if not _whole_world or any(axis not in _world_axes for axis in real):
        raise AxisError(f"{said}: only axes that ltx.init(mesh=...) has made can be joined.")
    whole = _whole_world[0]
    part = mesh_part(tuple(axis.size for axis in _world_axes), tuple(_world_axes.index(axis) for axis in real))
    return whole if part.groups == (tuple(range(whole.size)),) else in_groups(whole, part, title)


# Dynamo runs these at trace time, when functorch has the same levels as at run time.
@at_trace_time
def open_simulated(name: str, size: int, device: torch.device | None = None) -> int:
    """Open an axis of simulated ranks at torch.func's current level; return the level. `device`: of mapped tensors."""
    level: int = private.current_level()
    opened = _opened_axes.setdefault(threading.get_ident(), [])
    while opened and opened[-1][0].ranks.levels.numbers[0] >= level:  # a failed trace has left these axes behind
        opened.pop()
    opened.append((Axis(name, size, VmapRanks(Levels((level,)), device=device)), private.TracingContext.try_get()))
    return level


@at_trace_time
def _there() -> tuple[tuple[int, int], ...]:
    """The (thread, index) of the opened axes that are valid here; a failed trace leaves invalid ones behind. A thread
    finds its own axes; autograd's device threads, which may recompute a forward pass, find those of all threads.
    """
    if not _opened_axes:
        return ()
    depth, trace, thread = private.maybe_current_level() or 0, private.TracingContext.try_get(), threading.get_ident()
    openers = [thread]
    if thread not in _opened_axes and private.graph_task() != -1:
        openers = list(_opened_axes)
    return tuple(
        (opener, place)
        for opener in openers
        for place, (axis, opened_by) in enumerate(_opened_axes.get(opener, []))
        if axis.ranks.levels.numbers[0] <= depth and opened_by in (None, trace)
    )


@at_trace_time
def close_simulated() -> None:
    """Close the axis that this thread opened last."""
    thread = threading.get_ident()
    _opened_axes[thread].pop()
    if not _opened_axes[thread]:
        del _opened_axes[thread]
