"""A pool whose ranks communicate by the backend of :mod:`tests.streams.backend`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ltx import PerRank, Pool
from ltx.core import comm
from ltx.core.gradients import packing
from ltx.core.ranks.axis import axes_in_scope, set_world_axes
from tests.streams.backend import LOG, NAME, PATIENT_S, Host, register


class StreamedPool:
    """`pool`, in whose calls the axis in scope is stream-ordered. `hung_s`: as in :class:`Host`."""

    def __init__(self, pool: Pool, hung_s: float = PATIENT_S):
        self._pool, self._hung_s = pool, hung_s

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> PerRank[Any]:
        """As :meth:`ltx.Pool.run`."""
        return self._pool.run(on_streams, fn, *args, timeout_s=timeout_s, hung_s=self._hung_s, **kwargs)


def on_streams(
    fn: Callable[..., Any],
    *args: Any,
    hung_s: float = PATIENT_S,
    host: Callable[[float], Host] = Host,
    **kwargs: Any,
) -> Any:
    """``fn(*args, **kwargs)`` on an axis of its own, which is stream-ordered. Every rank of the world calls it.

    Hooks and optimizers do what they do on accelerators.
    """
    register()
    before_pieces, packing.IN_PIECES = packing.IN_PIECES, frozenset()
    before = axes_in_scope()
    group = dist.new_group(backend=NAME)
    axis = comm.open_axis("data", group, timedelta(seconds=30))
    set_world_axes((axis,))
    LOG.clear()
    try:
        with host(hung_s):
            return fn(*args, **kwargs)
    finally:
        packing.IN_PIECES = before_pieces
        set_world_axes(before)
        comm.close_axis(axis)
        dist.destroy_process_group(group)
        del group, axis
        gc.collect()  # groups in cycles have threads of gloo's that wake a hundred times a second: they were hundreds
