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
        strategy: whose these are, in the words of errors; "" where nobody has said.
    """

    params: LeafLayout = "replicated"
    buffers: LeafLayout = "per_rank"
    opt_state: LeafLayout = "replicated"
    sync_state: LeafLayout = "per_rank"
    strategy: str = ""
