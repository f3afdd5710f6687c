"""How the values of a train state relate across ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: How a leaf's values relate across ranks.
LeafLayout = Literal["replicated", "per_rank", "sharded"]


@dataclass(frozen=True)
class StateLayout:
    """For each part of a train state: is it the same on every rank, each rank's own, or a shard of one value?

    Checkpoints, replica checks and changes of the number of ranks read this.

    Attributes:
        strategy: the strategy that this layout is of, for errors; "" if unknown.
    """

    params: LeafLayout = "replicated"
    buffers: LeafLayout = "per_rank"
    opt_state: LeafLayout = "replicated"
    sync_state: LeafLayout = "per_rank"
    strategy: str = ""
