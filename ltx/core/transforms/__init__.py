"""Transformations of steps: data parallelism, gradients, functional calls."""

from ltx.core.transforms.data_parallel import DataParallel, block_backward_sync, data_parallel
from ltx.core.transforms.functional_call import functional_call, using
from ltx.core.transforms.grad import grad, grad_and_value
from ltx.core.transforms.marking import sync_gradients
from ltx.core.transforms.run import Weighted
from ltx.core.transforms.sync_state import Synced, SyncState

__all__ = ["DataParallel", "Weighted", "block_backward_sync", "data_parallel", "grad", "grad_and_value"]
__all__ += ["SyncState", "Synced", "functional_call", "sync_gradients", "using"]
