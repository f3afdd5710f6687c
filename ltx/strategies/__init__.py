"""Strategies: one algorithm a file."""

from ltx.extend import StateLayout, States, StepInfo, Strategy, Updated
from ltx.strategies.ddp import DDPStrategy

__all__ = ["DDPStrategy", "StateLayout", "States", "StepInfo", "Strategy", "Updated"]
