"""Communication hooks: one compressor a file."""

from ltx.hooks.allreduce import AllReduce as AllReduce
from ltx.hooks.base import CommHook as CommHook
from ltx.hooks.combined import After as After
from ltx.hooks.combined import Chain as Chain
from ltx.hooks.combined import after as after
from ltx.hooks.combined import cast as cast
from ltx.hooks.combined import chain as chain
from ltx.hooks.eight_bit import ByteGrad as ByteGrad
from ltx.hooks.eight_bit import Quantize as Quantize
from ltx.hooks.from_torch import FromTorch as FromTorch
from ltx.hooks.from_torch import from_torch as from_torch
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
from ltx.hooks.to_torch import ToTorch as ToTorch
from ltx.hooks.to_torch import to_torch as to_torch
from ltx.sync.reduction import Ask as Ask
from ltx.sync.reduction import Reduction as Reduction
from ltx.sync.reduction import Share as Share

#: The names that strategies accept in place of a hook.
BY_NAME: dict[str, CommHook] = {"allreduce": AllReduce(), "fp16": FP16(), "bf16": BF16()}
