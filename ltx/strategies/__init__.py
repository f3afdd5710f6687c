"""Strategies: one algorithm a file."""

from ltx.strategies.base import Strategy
from ltx.strategies.ddp import DDPStrategy
from ltx.strategies.update import StateLayout, States, StepInfo, Updated

#: What transformations use when they are given none. Made once: Dynamo can't make one while it traces.
DEFAULT = DDPStrategy()

__all__ = [
    "DEFAULT",
    "DDPStrategy",
    "StateLayout",
    "States",
    "StepInfo",
    "Strategy",
    "Updated",
]
