"""Whole training steps: gradients, optimizer, and what a strategy does with parameters, as one function of a state."""

from ltx.training.accumulate import accumulate
from ltx.training.data import uneven
from ltx.training.metrics import Metrics
from ltx.training.parameters import to_module
from ltx.training.replicas import check_replicas, sync_params
from ltx.training.train_state import TrainState
from ltx.training.train_step import TrainStep, train_step

__all__ = [
    "Metrics",
    "TrainState",
    "TrainStep",
    "accumulate",
    "check_replicas",
    "sync_params",
    "to_module",
    "train_step",
    "uneven",
]
