"""Shards: an optimizer state of which each rank holds a part, as a value that says which part it is."""

from __future__ import annotations

from dataclasses import dataclass

from ltx.tree import register_node
from ltx.typing import Tree


@dataclass(frozen=True)
class Shards:
    """One rank's part of an optimizer state; made by :class:`ltx.ZeroStrategy`.

    Paths name the part ("opt_state.shard_0_of_2.per_param.w.exp_avg"), so that parts of different ranks don't collide
    in a checkpoint as if they were one value.

    Attributes:
        state: the optimizer's own state of this rank's parts of the parameters, each a vector.
        ranks: how many parts there are; 1 for a state that is whole.
        rank: which of them this is; None on simulated ranks, where it is all of them.
    """

    state: Tree
    ranks: int
    rank: int | None

    @property
    def name(self) -> str:
        """What paths call it."""
        return f"shard_{'r' if self.rank is None else self.rank}_of_{self.ranks}"


register_node(
    Shards,
    lambda shards: ((shards.state,), (shards.ranks, shards.rank)),
    lambda children, static: Shards(children[0], *static),
    lambda shards: (shards.name,),
)
