"""ltx: data-parallel training in PyTorch as function transformations."""

from ltx import errors as errors
from ltx.axis import Axis as Axis
from ltx.axis import vmap as vmap
from ltx.collectives import AllGatherGrad as AllGatherGrad
from ltx.collectives import all_gather as all_gather
from ltx.collectives import axis_index as axis_index
from ltx.collectives import axis_size as axis_size
from ltx.collectives import barrier as barrier
from ltx.collectives import broadcast as broadcast
from ltx.collectives import broadcast_object as broadcast_object
from ltx.collectives import pmean as pmean
from ltx.collectives import psum as psum
from ltx.collectives import psum_scatter as psum_scatter
from ltx.collectives import pvary as pvary
from ltx.wire import record as record
from ltx import hooks as hooks
from ltx.strategies import DDPStrategy as DDPStrategy
from ltx.strategies import Strategy as Strategy
from ltx.transforms import Synced as Synced
from ltx.transforms import SyncState as SyncState
from ltx.transforms import Weighted as Weighted
from ltx.transforms import data_parallel as data_parallel
from ltx.transforms import sync_gradients as sync_gradients
