"""ltx: data-parallel training in PyTorch as function transformations.

A step is a pure function. Distribution is a transformation of it. A strategy is a value.
"""

import gc
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch works without NumPy, but warns
    import torch as _torch  # noqa: F401

# Imports make many objects and no garbage; a collection in the middle would search torch's and double the time.
_collects = gc.isenabled()
gc.disable()
try:
    from ltx import errors, hooks, nn, optim
    from ltx.core import collectives as _collectives
    from ltx.core import training as _training
    from ltx.core import transforms as _transforms
    from ltx.core.base import tree as tree
    from ltx.core.base.handed_in import HandedIn as _HandedIn
    from ltx.core.base.slips import lacks as _lacks
    from ltx.core.collectives import *
    from ltx.core.comm.registry import axis_from_group
    from ltx.core.ranks.axis import Axis
    from ltx.core.ranks.simulated import vmap
    from ltx.core.training import *
    from ltx.core.transforms import *
    from ltx.core.transforms.strategy import Strategy
    from ltx.core.world.init import init
    from ltx.core.world.world import World, shutdown, world
    from ltx.peers import pickling as _pickling
    from ltx.peers.debug import debug_checks
    from ltx.peers.meeting import meet as _meet
    from ltx.peers.negotiation import Negotiation as _Negotiation
    from ltx.peers.store_exchange import StoreExchange as _StoreExchange
    from ltx.runtime import launchers as _launchers
    from ltx.runtime.tracebacks import hide_ours
    from ltx.shared_memory.transport import open_transport
    from ltx.strategies import DDPStrategy

    _HandedIn.hooks, _HandedIn.strategy, _HandedIn.launchers = hooks, DDPStrategy(), _launchers
    _HandedIn.meeting, _HandedIn.exchange, _HandedIn.peers = _meet, _StoreExchange, _Negotiation
    _HandedIn.transport, _HandedIn.pickling = open_transport, _pickling
finally:
    if _collects:
        gc.enable()

# --- imported when first asked for: most programs use few of them, and making dataclasses takes time
if TYPE_CHECKING:
    from ltx import checkpoint, profile, tensor_parallel
    from ltx.core.training.mixed_precision import DynamicLossScale, Precision, mixed_precision
    from ltx.data import DataPosition, rank_zero_first, to_device, uneven
    from ltx.hooks.adasum import adasum
    from ltx.record import Replayed, record_messages, replay
    from ltx.runtime.per_rank import PerRank
    from ltx.runtime.pool import Pool, launch
    from ltx.strategies.bagua import BaguaStrategy
    from ltx.strategies.diloco import DiLoCoStrategy
    from ltx.strategies.horovod import HorovodStrategy
    from ltx.strategies.local_sgd import LocalSGDStrategy
    from ltx.strategies.zero import ZeroStrategy

_LATER = {
    **dict.fromkeys(("DataPosition", "rank_zero_first", "to_device", "uneven"), "ltx.data"),
    **dict.fromkeys(("DynamicLossScale", "Precision", "mixed_precision"), "ltx.core.training.mixed_precision"),
    **dict.fromkeys(("Pool", "launch"), "ltx.runtime.pool"),
    **dict.fromkeys(("Replayed", "record_messages", "replay"), "ltx.record"),
    "BaguaStrategy": "ltx.strategies.bagua",
    "DiLoCoStrategy": "ltx.strategies.diloco",
    "HorovodStrategy": "ltx.strategies.horovod",
    "LocalSGDStrategy": "ltx.strategies.local_sgd",
    "PerRank": "ltx.runtime.per_rank",
    "ZeroStrategy": "ltx.strategies.zero",
    "adasum": "ltx.hooks.adasum",
}
_LATER_SUBMODULES = ("checkpoint", "profile", "tensor_parallel")

__all__ = ["checkpoint", "errors", "hooks", "nn", "optim", "profile", "tensor_parallel"]
__all__ += ["Axis", "Strategy", "World", "axis_from_group", "init", "shutdown", "to_device", "vmap", "world"]
__all__ += ["BaguaStrategy", "DDPStrategy", "DiLoCoStrategy", "HorovodStrategy", "LocalSGDStrategy", "ZeroStrategy"]
__all__ += ["DataPosition", "DynamicLossScale", "Precision", "mixed_precision", "rank_zero_first", "uneven"]
__all__ += ["PerRank", "Pool", "Replayed", "debug_checks", "launch", "record_messages", "replay"]
__all__ += [*_collectives.__all__, "adasum"]
__all__ += _training.__all__
__all__ += _transforms.__all__

__version__ = "0.3.0"

if "IPython" in sys.modules:  # in cells of a notebook
    hide_ours(sys.modules["IPython"].get_ipython())


def __getattr__(name: str) -> Any:
    if name in _LATER_SUBMODULES:
        return import_module(f"ltx.{name}")
    if name not in _LATER:
        raise _lacks(f"module {__name__!r}", name)
    return getattr(import_module(_LATER[name]), name)


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext ltx``: cells that begin with ``%%ltx`` run on workers. See :mod:`ltx.notebook`."""
    import_module("ltx.notebook").load_ipython_extension(ipython)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
