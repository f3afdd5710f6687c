"""What strategies get and return: when and where they act, the results of a step, and how its state is laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ltx.axis import Axis
from ltx.gradients.reduction import LeafState
from ltx.typing import Tree

#: Communication state by parameter path.
States = dict[str, LeafState]


@dataclass(frozen=True)
class StepInfo:
    """When and where a strategy acts.

    Attributes:
        step: the number of steps before this one, a Python int that is the same on every rank.
        axis: the ranks.
    """

    step: int
    axis: Axis


@dataclass(frozen=True)
class Updated:
    """The result of :meth:`Strategy.update`: everything that a step changes, and what stays pending.

    Attributes:
        finish: writes into tensors of the old state that the new one takes over, when everything is complete (see
            :attr:`ltx.optim.update.Update.may_overwrite`). It can't fail, and nothing comes between it and the step's
            end, not even an interrupt.
    """

    params: Tree
    opt_state: Tree
    states: States
    pending: Any = None
    finish: Callable[[], None] | None = None


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
