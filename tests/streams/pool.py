"""A pool whose ranks communicate by the backend of :mod:`tests.streams.backend`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ltx import PerRank, Pool
from ltx.core import comm
from ltx.core.comm.registry import GroupAxis
from ltx.core.gradients import buffers
from ltx.core.ranks.axis import axes_in_scope, set_world_axes
from tests.streams.backend import LOG, NAME, PATIENT_S, Host, register


class StreamedPool:
    """`pool`, in whose calls the axis in scope is stream-ordered. `hung_s`: as in :class:`Host`."""

    def __init__(self, pool: Pool, hung_s: float = PATIENT_S):
        self._pool, self._hung_s = pool, hung_s

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> PerRank[Any]:
        return self._pool.run(on_streams, fn, *args, timeout_s=timeout_s, hung_s=self._hung_s, **kwargs)


def on_streams(
    fn: Callable[..., Any], *args: Any, hung_s: float = PATIENT_S, host: Callable[[float], Host] = Host, **kwargs: Any
) -> Any:
    """``fn(*args, **kwargs)`` on an axis of its own, which is stream-ordered. Every rank of the world calls it.

    Hooks and optimizers do what they do on accelerators.
    """
    register()
    before_pieces, buffers.IN_PIECES = buffers.IN_PIECES, frozenset()
    before = axes_in_scope()
    group = dist.new_group(backend=NAME)
    # Its close lets go of groups, whose threads wake a hundred times a second: plans that are kept hold the axis.
    axis = comm.open_axis("data", group, timedelta(seconds=30), make=partial(GroupAxis, owns_group=True))
    set_world_axes((axis,))
    LOG.clear()
    try:
        with host(hung_s):
            return fn(*args, **kwargs)
    finally:
        buffers.IN_PIECES = before_pieces
        del group
        if axes_in_scope() == (axis,):  # else fn has begun a new world
            set_world_axes(before)
            axis.close()
