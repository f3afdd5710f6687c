"""Transformations of steps."""

from ltx.transforms.accumulate import accumulate as accumulate
from ltx.transforms.block import block_backward_sync as block_backward_sync
from ltx.transforms.data_parallel import DataParallel as DataParallel
from ltx.transforms.data_parallel import data_parallel as data_parallel
from ltx.transforms.divergence import check_replicas as check_replicas
from ltx.transforms.divergence import sync_params as sync_params
from ltx.transforms.functional_call import functional_call as functional_call
from ltx.transforms.grad import grad as grad
from ltx.transforms.grad import grad_and_value as grad_and_value
from ltx.transforms.sync_gradients import sync_gradients as sync_gradients
from ltx.transforms.sync_state import Synced as Synced
from ltx.transforms.sync_state import SyncState as SyncState
from ltx.transforms.to_module import to_module as to_module
from ltx.transforms.train_state import Metrics as Metrics
from ltx.transforms.train_state import TrainState as TrainState
from ltx.transforms.train_step import TrainStep as TrainStep
from ltx.transforms.train_step import train_step as train_step
from ltx.transforms.uneven import uneven as uneven
from ltx.transforms.weighted import Weighted as Weighted
