"""The one door through which tests of ``tests/contract`` see inside: what no public name shows or closes yet."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from ltx import Axis
from ltx.core.comm import open_axes, open_axis, resolve
from ltx.core.comm.axis_comm import NewGroup
from ltx.core.comm.registry import GroupAxis
from ltx.core.ranks.axis import axes_in_scope, find
from ltx.core.ranks.backings import Levels
from ltx.core.ranks.batched import VmapRanks
from ltx.core.transforms.strategy import constant_hook, shares_gradients, stateful
from ltx.strategies.async_averaging import AsyncAveraging
from ltx.strategies.qadam import QAdam

#: Of the step summary: two sums and six numbers of the digest, in float64.
SUMMARY_BYTES = 64

__all__ = [
    "SUMMARY_BYTES",
    "AsyncAveraging",
    "Levels",
    "QAdam",
    "VmapRanks",
    "axes_in_scope",
    "close_axis",
    "constant_hook",
    "find",
    "new_axis",
    "open_axes",
    "open_axis",
    "resolve",
    "shares_gradients",
    "stateful",
]


def new_axis(name: str, ranks: Iterable[int], timeout: timedelta | None = None) -> GroupAxis:
    """The axis of ``ltx.axis_from_group(ranks, name)``, with a time limit of its own."""
    group = NewGroup(list(ranks), dist.get_backend_config())
    axis = open_axis(name, group, timeout, make=partial(GroupAxis, owns_group=True))
    assert isinstance(axis, GroupAxis)
    return axis


def close_axis(axis: Axis) -> None:
    """Close `axis` as users close theirs, and its process group: caches of plans hold the axis, not its threads."""
    GroupAxis(axis.name, axis.size, axis.ranks, owns_group=True).close()
