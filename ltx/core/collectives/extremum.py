"""pmax and pmin: extrema over ranks, elementwise.

    y_r = max_s x_s      x̄_r = m_r · (sum_s ȳ_s) / (sum_s m_s),   m_r = (x_r == y_r)

Ranks that tie share the cotangent equally, as ``torch.amax`` does. A NaN on any rank is a NaN on all. gloo and NCCL
keep or drop it by the order in which they read it, so over them a flag travels along that says whether there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ltx.core import comm
from ltx.core.base import traced, tree
from ltx.core.base.arguments import checked
from ltx.core.collectives.calls import (
    check_dense,
    check_plain,
    check_sums,
    grouped,
    negotiate_tree,
    prepare_trace,
    refuse_leaves,
    tensors_of,
    traced_axis,
)
from ltx.core.collectives.futures import Arrived, Future, Pending, one_message
from ltx.core.collectives.in_step import in_step
from ltx.core.collectives.linear import (
    Function,
    apply,
    compare,
    each_rank,
    index_below,
    on_stack,
    peeled_level,
    signature_of,
)
from ltx.core.collectives.psum import axis_size
from ltx.core.collectives.ranks import axis_index
from ltx.core.comm.operations import OPERATIONS
from ltx.core.ranks.axis import Axis
from ltx.typing import Tree


class Extremum(Function):
    """``Extremum.apply("pmax" or "pmin", axis, compiled, index, x)``; `index` as in Linear."""

    @staticmethod
    def forward(which: str, axis: Axis, compiled: bool, index: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        if axis.backing is None or x.numel() == 0:
            return x.clone()
        if axis.threads:
            return _among_threads(axis.threads, which, x)
        assert axis.comm, "a simulated axis is peeled by the vmap rule"
        axis_comm: comm.AxisComm = axis.comm
        return _compiled(axis_comm, which, x) if compiled else _eager(axis_comm, which, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.which, ctx.axis, ctx.compiled, _, x = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)
        if not x.is_floating_point():
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        mine = (x == y).to(x.dtype)
        total, ties = apply("psum", (), ctx.axis, [cotangent, mine], ctx.compiled)
        return None, None, None, None, mine * total / ties

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        x, y = ctx.saved_tensors
        mine = (x == y).to(x.dtype)
        tangent = tangents[-1] if tangents[-1] is not None else torch.zeros_like(x)
        total, ties = apply("psum", (), ctx.axis, [mine * tangent, mine], ctx.compiled)
        return total / ties

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        which: str,
        axis: Axis,
        compiled: bool,
        index: torch.Tensor | None,
        x: torch.Tensor,
    ) -> tuple[torch.Tensor, int | None]:
        dim = in_dims[4]
        simulated = axis.simulated
        if simulated and peeled_level() == simulated.level:
            below = simulated.below
            if below is not None:
                stacks = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
                rest = replace(axis, backing=below)
                return Extremum.apply(which, rest, compiled, index_below(index, in_dims[3]), stacks), 0
            y, per_rank = on_stack(simulated, axis.size, x, dim, partial(_stacked, which))
            return y, 0 if per_rank else None
        front = simulated.taken if simulated else 0
        if dim is not None and front:
            x, dim = x.movedim(dim, front), front
        return Extremum.apply(which, axis, compiled, index, x), dim


def _stacked(which: str, xs: torch.Tensor, n: int) -> tuple[torch.Tensor, bool]:
    """A Rule's `stacked`."""
    if xs.dtype == torch.bool:
        return (xs.any(0) if which == "pmax" else xs.all(0)), False
    return (xs.amax(0) if which == "pmax" else xs.amin(0)), False


def _among_threads(threads: comm.ThreadComm, which: str, x: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = threads.exchange(
        signature_of(which, [x]), [x], lambda values: each_rank(partial(_stacked, which), values)
    )
    return found[0]


def _eager(axis_comm: comm.AxisComm, which: str, x: torch.Tensor) -> torch.Tensor:
    compare(axis_comm, which, x)
    if not x.is_floating_point() or axis_comm.user.uses_transport(x):  # which compares as torch.maximum does
        return axis_comm.user.issue(which, x.clone(memory_format=torch.contiguous_format), which).wait()
    if axis_comm.user.orders_streams(x.device):  # the host doesn't wait for what it could branch on
        value = axis_comm.user.issue(which, x.clone(memory_format=torch.contiguous_format), which).wait()
        nans = axis_comm.user.issue("pmax", x.isnan().to(torch.uint8), f"{which}: NaN").wait()
        return value.masked_fill_(nans.bool(), torch.nan)
    sign = 1 if which == "pmax" else -1
    buffer = x.new_empty(x.numel() + 1)
    buffer[:-1].view(x.shape).copy_(x)
    # amax gives NaN if there is one. The flag lies behind the values, as the extremum that the operation looks for.
    buffer[-1] = sign * buffer[:-1].amax().isnan()
    found = axis_comm.user.issue(which, buffer, which).wait()
    value = found[:-1].view(x.shape)
    if found[-1] != 0:
        nans = axis_comm.user.issue("pmax", x.isnan().to(torch.uint8), f"{which}: NaN").wait()
        value.masked_fill_(nans.bool(), torch.nan)
    return value


def _compiled(axis_comm: comm.AxisComm, which: str, x: torch.Tensor) -> torch.Tensor:
    # What is done may not depend on values here, so the places of NaN always travel too.
    n, group = axis_comm.size, axis_comm.user.group_for(x.device).group_name
    value = OPERATIONS[which].begin_in_graph(x.clone(memory_format=torch.contiguous_format), n, group)()
    if not x.is_floating_point():
        return value
    nans = OPERATIONS["pmax"].begin_in_graph(x.isnan().to(torch.uint8), n, group)()
    return torch.where(nans.bool(), torch.nan, value)


def _extremum(which: str, value: Tree, axis: Any) -> Tree:
    *others, axis = comm.kinds_of(axis)
    for other in others:
        value = _extremum(which, value, other)
    value = tensors_of(value, axis)
    leaves, spec = tree.flatten(value)
    refuse_leaves(which, leaves, value, torch.is_complex, "and complex numbers have no order.")
    check_sums(which, leaves, value, "extrema")
    if traced.recording():
        key = prepare_trace(axis)
        return tree.unflatten(spec, [extremum_in_graph(which, key, x) for x in leaves])
    check_dense(which, leaves, value)
    found, in_background = comm.resolve(axis), isinstance(axis, comm.InBackground)
    if in_background:
        check_plain(which, leaves, value, found)
    negotiate_tree(which, value, leaves, spec, [() for _ in leaves], found)
    if in_background and found.comm is not None:
        works = [work for x in leaves for work in _begin(found.comm, which, x)]
        return Future(which, works, lambda ys: tree.unflatten(spec, list(map(_marked, ys[::2], ys[1::2]))), found.comm)
    index = found.index() if found.simulated else None
    results = tree.unflatten(spec, [Extremum.apply(which, found, False, index, x) for x in leaves])
    return Future(which, finish=lambda _: results) if in_background else results


def _begin(axis_comm: comm.AxisComm, which: str, x: torch.Tensor) -> tuple[Pending, Pending]:
    """Start an extremum, and where there are NaN: all that it takes, as nothing can be issued when it is waited for."""
    nothing = Arrived(torch.zeros((), dtype=torch.uint8, device=x.device))
    if x.numel() == 0:
        return Arrived(x.clone()), nothing
    compare(axis_comm, which, x)
    value = axis_comm.user.issue(which, x.clone(memory_format=torch.contiguous_format), f"async {which}")
    if not x.is_floating_point() or axis_comm.user.uses_transport(x):
        return value, nothing
    return value, axis_comm.user.issue("pmax", x.isnan().to(torch.uint8), f"async {which}: NaN")


def _marked(value: torch.Tensor, nans: torch.Tensor) -> torch.Tensor:
    return value.masked_fill(nans.bool(), torch.nan) if value.is_floating_point() else value


@traced.node
def extremum_in_graph(which: str, axis_key: str, x: torch.Tensor) -> torch.Tensor:
    """The node that a compiled graph holds for an extremum."""
    axis = traced_axis(axis_key)
    index = axis.index() if axis.simulated else None
    found: torch.Tensor = Extremum.apply(which, axis, True, index, x)
    return found


@one_message
@in_step
@checked("axis_index_groups")
def pmax(value: Tree, axis: Any = None, *, axis_index_groups: Sequence[Sequence[int]] | None = None) -> Tree:
    """The maximum over ranks of every element of a tree.

    Args:
        value: tree of real or boolean tensors, the same structure, shapes and dtypes on every rank; any strides.
        axis, axis_index_groups: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: the same tree of new tensors, shapes and dtypes as given. NaN on any rank gives NaN.

    Gradient:
        m · psum(ȳ) / psum(m) with m = (x == y): ranks that tie share it equally. None for integers and booleans.

    Raises:
        UnsupportedError: complex tensors, and dtypes that torch has no maximum for: uint16, uint32, uint64, float8.
        AxisError, TreeError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.pmax)(torch.tensor([[1.0, 4.0], [3.0, 2.0]]))
        tensor([[3., 4.],
                [3., 4.]])
    """
    return _extremum("pmax", value, grouped(axis, axis_index_groups))


@one_message
@in_step
@checked("axis_index_groups")
def pmin(value: Tree, axis: Any = None, *, axis_index_groups: Sequence[Sequence[int]] | None = None) -> Tree:
    """The minimum over ranks of every element of a tree. Everything else is as in :func:`pmax`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.pmin)(torch.tensor([[1.0, 4.0], [3.0, 2.0]]))
        tensor([[1., 2.],
                [1., 2.]])
    """
    return _extremum("pmin", value, grouped(axis, axis_index_groups))


def pargmax(value: Tree, axis: Any = None) -> Tree:
    """The rank that holds the maximum over ranks, for every element of a tree.

    Args:
        value: as in :func:`ltx.pmax`.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: the same tree of int64 tensors, shapes as given, with indices on the axis. Of ranks that
        tie it is the first. NaN counts as the maximum, as in ``torch.argmax``.

    Gradient:
        None: whole numbers.

    Raises:
        As :func:`ltx.pmax`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.pargmax)(torch.tensor([[1.0, 4.0], [3.0, 4.0]]))
        tensor([[1, 0],
                [1, 0]])
    """
    value = tensors_of(value, axis)
    return _first(value, pmax(tree.map(_apart, value), axis), axis)


def pargmin(value: Tree, axis: Any = None) -> Tree:
    """The rank that holds the minimum over ranks, for every element of a tree. The rest is as in :func:`pargmax`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.pargmin)(torch.tensor([[1.0, 4.0], [3.0, 4.0]]))
        tensor([[0, 0],
                [0, 0]])
    """
    value = tensors_of(value, axis)
    return _first(value, pmin(tree.map(_apart, value), axis), axis)


def _apart(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _first(value: Tree, best: Tree, axis: Any) -> Tree:
    index, size = axis_index(axis), axis_size(axis)

    def mine(x: Tensor, y: Tensor) -> Tensor:
        has = (x == y) | (x.isnan() & y.isnan()) if x.is_floating_point() else x == y
        return torch.where(has, index.to(x.device), torch.full_like(x, size, dtype=torch.int64))

    return pmin(tree.map(mine, value, best), axis)
