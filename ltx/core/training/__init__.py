"""Whole training steps: gradients, the optimizer and the strategy's work on parameters, as one function of a state."""

from ltx.core.training.accumulate import accumulate
from ltx.core.training.parameters import to_module
from ltx.core.training.replicas import check_replicas, sync_params
from ltx.core.training.train_state import Metrics, TrainState
from ltx.core.training.train_step import train_step

__all__ = ["Metrics", "TrainState", "accumulate", "check_replicas", "sync_params", "to_module", "train_step"]
