"""ltx: data-parallel training in PyTorch as function transformations.

A step is a pure function. Distribution is a transformation of it. A strategy is a value.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Imports make many objects and no garbage; to look through torch's for some in the middle takes as long as the rest.
_collects = gc.isenabled()
gc.disable()

# --- submodules
from ltx import errors as errors
from ltx import hooks as hooks
from ltx import nn as nn
from ltx import optim as optim

# --- axes
from ltx.axis import Axis as Axis

# --- collectives
from ltx.collectives import AllGatherGrad as AllGatherGrad
from ltx.collectives import adasum as adasum
from ltx.collectives import all_gather as all_gather
from ltx.collectives import all_gather_object as all_gather_object
from ltx.collectives import all_to_all as all_to_all
from ltx.collectives import axis_index as axis_index
from ltx.collectives import axis_size as axis_size
from ltx.collectives import barrier as barrier
from ltx.collectives import broadcast as broadcast
from ltx.collectives import broadcast_object as broadcast_object
from ltx.collectives import gather_all_tensors as gather_all_tensors
from ltx.collectives import pargmax as pargmax
from ltx.collectives import pargmin as pargmin
from ltx.collectives import pmax as pmax
from ltx.collectives import pmean as pmean
from ltx.collectives import pmin as pmin
from ltx.collectives import ppermute as ppermute
from ltx.collectives import psum as psum
from ltx.collectives import psum_scatter as psum_scatter
from ltx.collectives import pvary as pvary
from ltx.collectives import rank_seed as rank_seed
from ltx.collectives import reduce as reduce
from ltx.collectives import reduce_boolean_decision as reduce_boolean_decision
from ltx.collectives import shard as shard
from ltx.collectives import weighted_mean as weighted_mean

# --- world and running
from ltx.runtime.init import init as init
from ltx.runtime.init import shutdown as shutdown
from ltx.runtime.init import to_device as to_device
from ltx.runtime.init import world as world
from ltx.runtime.world import World as World
from ltx.simulated import vmap as vmap

# --- strategies
from ltx.strategies import DDPStrategy as DDPStrategy
from ltx.strategies import Strategy as Strategy

# --- transformations
from ltx.transforms import DataParallel as DataParallel
from ltx.transforms import Metrics as Metrics
from ltx.transforms import Synced as Synced
from ltx.transforms import SyncState as SyncState
from ltx.transforms import TrainState as TrainState
from ltx.transforms import Weighted as Weighted
from ltx.transforms import accumulate as accumulate
from ltx.transforms import block_backward_sync as block_backward_sync
from ltx.transforms import check_replicas as check_replicas
from ltx.transforms import data_parallel as data_parallel
from ltx.transforms import functional_call as functional_call
from ltx.transforms import grad as grad
from ltx.transforms import grad_and_value as grad_and_value
from ltx.transforms import sync_gradients as sync_gradients
from ltx.transforms import sync_params as sync_params
from ltx.transforms import to_module as to_module
from ltx.transforms import train_step as train_step
from ltx.transforms import uneven as uneven

# --- the wire
from ltx.wire import Network as Network
from ltx.wire import axis_from_group as axis_from_group
from ltx.wire import debug_checks as debug_checks
from ltx.wire import measure_network as measure_network
from ltx.wire import record as record

if _collects:
    gc.enable()

# --- imported when first asked for: most programs use few of them, and making dataclasses takes time
if TYPE_CHECKING:
    # --- submodules
    from ltx import checkpoint as checkpoint

    # --- running
    from ltx.runtime.elastic import elastic as elastic
    from ltx.runtime.launch import launch as launch
    from ltx.runtime.per_rank import PerRank as PerRank
    from ltx.runtime.pool import Pool as Pool
    from ltx.runtime.show import progress as progress
    from ltx.runtime.show import show as show

    # --- strategies
    from ltx.strategies.bagua import BaguaStrategy as BaguaStrategy
    from ltx.strategies.diloco import DiLoCoStrategy as DiLoCoStrategy
    from ltx.strategies.horovod import HorovodStrategy as HorovodStrategy
    from ltx.strategies.local_sgd import LocalSGDStrategy as LocalSGDStrategy
    from ltx.strategies.zero import ZeroStrategy as ZeroStrategy
    from ltx.transforms.cost import Cost as Cost
    from ltx.transforms.data_position import DataPosition as DataPosition

    # --- planning
    from ltx.transforms.explain import Explanation as Explanation
    from ltx.transforms.explain import explain as explain

    # --- transformations
    from ltx.transforms.mixed_precision import mixed_precision as mixed_precision
    from ltx.transforms.plan import plan as plan
    from ltx.transforms.precision import DynamicLossScale as DynamicLossScale
    from ltx.transforms.precision import Precision as Precision
    from ltx.transforms.recommend import recommend as recommend

    # --- the wire
    from ltx.wire.timeline import Timeline as Timeline
    from ltx.wire.timeline import timeline as timeline

_LATER = {
    "BaguaStrategy": "ltx.strategies.bagua",
    "DiLoCoStrategy": "ltx.strategies.diloco",
    "LocalSGDStrategy": "ltx.strategies.local_sgd",
    "HorovodStrategy": "ltx.strategies.horovod",
    "Explanation": "ltx.transforms.explain",
    "explain": "ltx.transforms.explain",
    "ZeroStrategy": "ltx.strategies.zero",
    "elastic": "ltx.runtime.elastic",
    "launch": "ltx.runtime.launch",
    "PerRank": "ltx.runtime.per_rank",
    "Pool": "ltx.runtime.pool",
    "progress": "ltx.runtime.show",
    "show": "ltx.runtime.show",
    "DataPosition": "ltx.transforms.data_position",
    "mixed_precision": "ltx.transforms.mixed_precision",
    "DynamicLossScale": "ltx.transforms.precision",
    "Precision": "ltx.transforms.precision",
    "Cost": "ltx.transforms.plan",
    "plan": "ltx.transforms.plan",
    "recommend": "ltx.transforms.recommend",
    "Timeline": "ltx.wire.timeline",
    "timeline": "ltx.wire.timeline",
}

_SUBMODULES = ("checkpoint",)

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"ltx.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext ltx``: cells that begin with ``%%ltx`` run on workers. See :mod:`ltx.notebook`."""
    import_module("ltx.notebook").load_ipython_extension(ipython)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_SUBMODULES})
