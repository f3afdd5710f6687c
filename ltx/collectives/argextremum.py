"""pargmax and pargmin: where the extremum over ranks is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ltx import tree
from ltx.collectives.calls import tensors_of
from ltx.collectives.extremum import pmax, pmin
from ltx.collectives.index import axis_index
from ltx.collectives.psum import axis_size
from ltx.typing import Tree


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
