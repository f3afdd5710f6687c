"""Transformations of functions: what a step is wrapped in."""

from ltx.transforms.block import block_backward_sync
from ltx.transforms.data_parallel import DataParallel, data_parallel
from ltx.transforms.functional_call import functional_call
from ltx.transforms.grad import grad, grad_and_value
from ltx.transforms.sync_gradients import sync_gradients
from ltx.transforms.sync_state import Synced, SyncState
from ltx.transforms.weighted import Weighted

__all__ = [
    "DataParallel",
    "SyncState",
    "Synced",
    "Weighted",
    "block_backward_sync",
    "data_parallel",
    "functional_call",
    "grad",
    "grad_and_value",
    "sync_gradients",
]
