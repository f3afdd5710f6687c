"""Axes that a test may tear apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ltx import wire
from ltx.axis import axes_in_scope, set_world_axes
from ltx.runtime.per_rank import PerRank
from ltx.runtime.pool import Pool

OnFreshAxis = Callable[..., PerRank[Any]]


def _run(fn: Callable[[], Any], timeout_s: float, sockets: bool) -> Any:
    """fn() where the only axis in scope is a new one. It is left open: its channels may be waiting for ever."""
    world_axes = axes_in_scope()
    group = dist.new_group(list(range(dist.get_world_size())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LTX_SHARED_MEMORY", "0" if sockets else "1")
        set_world_axes((wire.open_axis("data", group, timedelta(seconds=timeout_s)),))
    try:
        return fn()
    finally:
        set_world_axes(world_axes)


@pytest.fixture(scope="session")
def torn() -> Iterator[OnFreshAxis]:
    """``torn(f)`` is what f() gave on each of 2 ranks that share a new axis, on workers that nobody else uses.

    With ``sockets=True`` the axis does without shared memory.
    """
    with Pool(2, timeout_s=50.0) as pool:
        yield lambda fn, timeout_s=10.0, sockets=False: pool.run(_run, fn, timeout_s, sockets)
