"""Gossip: strategies whose ranks, or nodes, have weights of their own and share them at some steps."""

from __future__ import annotations

from dataclasses import dataclass

from ltx.hooks.base import check_whole
from ltx.strategies.nodes import NodeStrategy
from ltx.strategies.state_layout import StateLayout


@dataclass(frozen=True, kw_only=True)
class GossipStrategy(NodeStrategy):
    """What decentralized strategies have in common; not a strategy by itself.

    What each rank sees: parameters and optimizer state of its own, and the loss of its own batch. All of it is work of
    :func:`ltx.train_step`; a data-parallel step by itself gives local gradients.

    Args:
        communication_interval: ranks communicate at every such step, the first included; others are local.
    """

    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, 1, "communication_interval")

    def communicates(self, step: int) -> bool:
        """Whether ranks share weights in the step after `step` others."""
        return step % self.communication_interval == 0

    @property
    def cycle(self) -> tuple[int, int]:
        return 0, self.communication_interval

    @property
    def layout(self) -> StateLayout:
        return StateLayout(params="per_rank", opt_state="per_rank")

    def hook(self, step: int) -> None:
        return None
