"""The interface for writing hooks, strategies, optimizers and layers. ltx's own use nothing else of ltx.core.

The page "Writing your own" (docs/reference/api/extend.md) says what each name is for.
"""

from typing import Any

from ltx.core import collectives, comm
from ltx.core import optim as optimizers
from ltx.core.base import arguments, needs, tree
from ltx.core.base.arguments import brief
from ltx.core.base.private import unwrapped
from ltx.core.base.traced import recording
from ltx.core.gradients import buffers
from ltx.core.gradients.comm_hook import AllReduce, CommHook, HookOffers, around, states_of
from ltx.core.gradients.pending import Exchange, Pending
from ltx.core.gradients.reduction import (
    Bucket,
    BucketInput,
    CollectiveRequest,
    LeafState,
    Packing,
    Reduced,
    Reduction,
    StartedWork,
    drive_within,
)
from ltx.core.optim.base import Optimizer, OptimizerOffers, Update
from ltx.core.ranks.axis import Axis, inner, outer
from ltx.core.transforms.strategy import (
    Old,
    PostUpdateHook,
    PostUpdateResult,
    StateLayout,
    States,
    StepInfo,
    Strategy,
    StrategyOffers,
    Updated,
    communicate_after_update,
    exchange,
    negotiate,
)

__all__ = [
    "AllReduce",
    "Axis",
    "Bucket",
    "BucketInput",
    "CollectiveRequest",
    "CommHook",
    "Exchange",
    "HookOffers",
    "LeafState",
    "Old",
    "Optimizer",
    "OptimizerOffers",
    "Packing",
    "Pending",
    "PostUpdateHook",
    "PostUpdateResult",
    "Reduced",
    "Reduction",
    "StartedWork",
    "StateLayout",
    "States",
    "StepInfo",
    "Strategy",
    "StrategyOffers",
    "Update",
    "Updated",
    "arguments",
    "around",
    "brief",
    "buffers",
    "collectives",
    "comm",
    "communicate_after_update",
    "drive_within",
    "exchange",
    "inner",
    "needs",
    "negotiate",
    "optimizers",
    "outer",
    "recording",
    "states_of",
    "tree",
    "unwrapped",
]


def __getattr__(name: str) -> Any:
    lack = arguments.lacks(f"module {__name__!r}", name)
    # It is another module's now: of an AttributeError, `from ltx.extend import name` would show nothing.
    raise ImportError(str(lack)) if {"extend", "combine", "hooks"} & {*str(lack).split(".")} else lack


def __dir__() -> list[str]:
    return sorted(__all__)
