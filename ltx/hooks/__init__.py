"""Communication hooks: one compressor a file."""

from ltx.hooks.allreduce import AllReduce as AllReduce
from ltx.hooks.base import CommHook as CommHook
from ltx.hooks.from_torch import FromTorch as FromTorch
from ltx.hooks.from_torch import from_torch as from_torch
from ltx.hooks.half import BF16 as BF16
from ltx.hooks.half import FP16 as FP16
from ltx.hooks.to_torch import ToTorch as ToTorch
from ltx.hooks.to_torch import to_torch as to_torch
from ltx.sync.reduction import Ask as Ask
from ltx.sync.reduction import Reduction as Reduction
from ltx.sync.reduction import Share as Share

#: The names that strategies accept in place of a hook.
BY_NAME: dict[str, CommHook] = {"allreduce": AllReduce(), "fp16": FP16(), "bf16": BF16()}
