"""Collectives. Each file defines operations with their transposes, by rules of :mod:`ltx.core.collectives.linear`."""

from typing import Any

from ltx.core.base.slips import lacks
from ltx.core.collectives.calls import collective as collective
from ltx.core.collectives.calls import counted as counted
from ltx.core.collectives.gather import AllGatherGrad, all_gather, gather, psum_scatter, scatter
from ltx.core.collectives.permute import all_to_all, ppermute
from ltx.core.collectives.psum import axis_size, broadcast, pmean, psum, psum_to, pvary
from ltx.core.collectives.ranks import axis_index, rank_seed, shard
from ltx.core.collectives.ranks import begun as begun
from ltx.core.collectives.reduce import pmax, pmin, reduce, reduce_boolean_decision, weighted_mean
from ltx.core.collectives.reduce import wide as wide
from ltx.core.collectives.uneven import all_gather_object, barrier, broadcast_object, gather_all_tensors
from ltx.core.collectives.uneven import told as told
from ltx.core.ranks.backings import Rule as Rule

__all__ = ["broadcast", "pmax", "pmean", "pmin", "psum", "psum_to", "pvary", "weighted_mean"]
__all__ += ["AllGatherGrad", "all_gather", "all_to_all", "gather", "ppermute", "psum_scatter", "reduce", "scatter"]
__all__ += ["all_gather_object", "barrier", "broadcast_object", "gather_all_tensors", "reduce_boolean_decision"]
__all__ += ["axis_index", "axis_size", "rank_seed", "shard"]


def __getattr__(name: str) -> Any:
    raise lacks("module 'ltx.extend.collectives'", name)
