"""axis_index: where this rank is."""

from __future__ import annotations

from typing import Any

import torch

from ltx import comm
from ltx.collectives.calls import in_graph_index, prepare_trace


def axis_index(axis: Any = None) -> torch.Tensor:
    """This rank's position on an axis: a 0-dim int64 tensor on every backing, on this rank's device.

    Args:
        axis: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.axis_index()
        tensor(0)
        >>> ltx.vmap(lambda x: x * ltx.axis_index())(torch.ones(3))
        tensor([0., 1., 2.])
    """
    if torch.compiler.is_compiling():
        return in_graph_index(prepare_trace(axis))
    found = comm.resolve(axis)
    if found.comm is None:
        return found.index()
    return torch.full((), found.comm.rank, dtype=torch.int64, device=found.comm.device)
