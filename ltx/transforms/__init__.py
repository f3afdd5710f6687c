"""Transformations of steps."""

from ltx.transforms.data_parallel import DataParallel as DataParallel
from ltx.transforms.data_parallel import data_parallel as data_parallel
from ltx.transforms.sync_gradients import sync_gradients as sync_gradients
from ltx.transforms.sync_state import Synced as Synced
from ltx.transforms.sync_state import SyncState as SyncState
from ltx.transforms.weighted import Weighted as Weighted
