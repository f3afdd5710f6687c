"""Communication hooks: one compressor a file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ltx.extend import AllReduce, BucketInput, CollectiveRequest, CommHook, Reduction, arguments
from ltx.hooks import noise
from ltx.hooks.plain import Noop

if TYPE_CHECKING:
    from ltx.hooks.adasum import Adasum
    from ltx.hooks.by_path import partition
    from ltx.hooks.combined import after, cast, chain, error_feedback
    from ltx.hooks.ddp import from_torch, to_torch
    from ltx.hooks.eight_bit import QSGD, ByteGrad, Quantize
    from ltx.hooks.functions import from_functions
    from ltx.hooks.half import BF16, FP16
    from ltx.hooks.lossy import CompressedAllReduce, LossyHook
    from ltx.hooks.onebit import OneBit
    from ltx.hooks.powersgd import BatchedPowerSGD, PowerSGD
    from ltx.hooks.sparse import RandomK, TopK

__all__ = ["AllReduce", "BucketInput", "CollectiveRequest", "CommHook", "CompressedAllReduce", "LossyHook", "Reduction"]
__all__ += ["BF16", "FP16", "QSGD", "Adasum", "BatchedPowerSGD", "ByteGrad", "Noop", "OneBit", "PowerSGD", "Quantize"]
__all__ += ["RandomK", "TopK", "noise"]
__all__ += ["after", "cast", "chain", "error_feedback", "from_functions", "from_torch", "partition", "to_torch"]

# Most programs need none of these, and making their dataclasses takes time: each module is imported at first use.
_LATER = {
    "Adasum": "adasum",
    **dict.fromkeys(("after", "cast", "chain", "error_feedback"), "combined"),
    **dict.fromkeys(("QSGD", "ByteGrad", "Quantize"), "eight_bit"),
    "from_functions": "functions",
    **dict.fromkeys(("from_torch", "to_torch"), "ddp"),
    **dict.fromkeys(("BF16", "FP16"), "half"),
    **dict.fromkeys(("CompressedAllReduce", "LossyHook"), "lossy"),
    "OneBit": "onebit",
    "partition": "by_path",
    **dict.fromkeys(("BatchedPowerSGD", "PowerSGD"), "powersgd"),
    **dict.fromkeys(("RandomK", "TopK"), "sparse"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise arguments.lacks(f"module {__name__!r}", name)
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
