"""Strategies: one algorithm a file."""

from ltx.core.transforms.strategy import Strategy
from ltx.core.transforms.strategy_update import StateLayout, States, StepInfo, Updated
from ltx.strategies.ddp import DDPStrategy

__all__ = [
    "DDPStrategy",
    "StateLayout",
    "States",
    "StepInfo",
    "Strategy",
    "Updated",
]
