"""The one door through which tests of ``tests/contract`` see inside: what no public name shows or closes yet."""

from __future__ import annotations

from ltx.core.comm import SUMMARY_BYTES, close_axis, open_axes, open_axis, resolve
from ltx.core.ranks.axis import axes_in_scope, find
from ltx.core.ranks.batched import VmapRanks
from ltx.strategies.async_averaging import AsyncAveraging
from ltx.strategies.qadam import QAdam

__all__ = [
    "SUMMARY_BYTES",
    "AsyncAveraging",
    "QAdam",
    "VmapRanks",
    "axes_in_scope",
    "close_axis",
    "find",
    "open_axes",
    "open_axis",
    "resolve",
]
