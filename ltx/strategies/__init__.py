"""Strategies: one algorithm a file."""

from ltx.strategies.base import Strategy as Strategy
from ltx.strategies.ddp import DDPStrategy as DDPStrategy
