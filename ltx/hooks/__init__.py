"""Communication hooks: one compressor a file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ltx.hooks.allreduce import AllReduce as AllReduce
from ltx.hooks.base import CommHook as CommHook
from ltx.sync.reduction import Ask as Ask
from ltx.sync.reduction import Reduction as Reduction
from ltx.sync.reduction import Share as Share

if TYPE_CHECKING:
    from ltx.hooks.adasum import Adasum as Adasum
    from ltx.hooks.combined import After as After
    from ltx.hooks.combined import Chain as Chain
    from ltx.hooks.combined import after as after
    from ltx.hooks.combined import cast as cast
    from ltx.hooks.combined import chain as chain
    from ltx.hooks.eight_bit import ByteGrad as ByteGrad
    from ltx.hooks.eight_bit import Quantize as Quantize
    from ltx.hooks.from_ddp import FromTorch as FromTorch
    from ltx.hooks.from_ddp import from_torch as from_torch
    from ltx.hooks.functions import FromFunctions as FromFunctions
    from ltx.hooks.functions import from_functions as from_functions
    from ltx.hooks.half import BF16 as BF16
    from ltx.hooks.half import FP16 as FP16
    from ltx.hooks.lossy import LossyHook as LossyHook
    from ltx.hooks.lossy import error_feedback as error_feedback
    from ltx.hooks.noop import Noop as Noop
    from ltx.hooks.onebit import OneBit as OneBit
    from ltx.hooks.powersgd import BatchedPowerSGD as BatchedPowerSGD
    from ltx.hooks.powersgd import PowerSGD as PowerSGD
    from ltx.hooks.qsgd import QSGD as QSGD
    from ltx.hooks.scattered import ScatteredHook as ScatteredHook
    from ltx.hooks.sparse import RandomK as RandomK
    from ltx.hooks.sparse import TopK as TopK
    from ltx.hooks.to_ddp import ToTorch as ToTorch
    from ltx.hooks.to_ddp import to_torch as to_torch

#: The names that strategies accept in place of a hook, and the classes that they stand for.
NAMED = {"allreduce": "AllReduce", "fp16": "FP16", "bf16": "BF16"}

# Imported when first asked for: most programs use none of them, and making dataclasses takes time.
_LATER = {
    "Adasum": "adasum",
    **dict.fromkeys(("After", "Chain", "after", "cast", "chain"), "combined"),
    **dict.fromkeys(("ByteGrad", "Quantize"), "eight_bit"),
    **dict.fromkeys(("FromTorch", "from_torch"), "from_ddp"),
    **dict.fromkeys(("FromFunctions", "from_functions"), "functions"),
    **dict.fromkeys(("BF16", "FP16"), "half"),
    **dict.fromkeys(("LossyHook", "error_feedback"), "lossy"),
    "Noop": "noop",
    "OneBit": "onebit",
    **dict.fromkeys(("BatchedPowerSGD", "PowerSGD"), "powersgd"),
    "QSGD": "qsgd",
    "ScatteredHook": "scattered",
    **dict.fromkeys(("RandomK", "TopK"), "sparse"),
    **dict.fromkeys(("ToTorch", "to_torch"), "to_ddp"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
