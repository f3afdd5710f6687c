"""Every hook that compresses: a further one joins the conformance suite by a row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ltx import hooks
from ltx.hooks import CommHook
from tests.contract.hooks.reference import (
    Twin,
    batched_power,
    by_path,
    eight_bit,
    exact,
    one_bit,
    power,
    qsgd,
    random_k,
    rounded,
    scattered,
    top_k,
)
from tests.twins.phases import InTwoPhases


@dataclass(frozen=True)
class Row:
    """A hook, its slow twin, and what else is promised of it.

    Attributes:
        error: at most this, relative in norm, at one step on random gradients of three ranks; None: no promise.
        unbiased: the expectation is the mean.
    """

    hook: CommHook
    twin: Twin
    error: float | None = None
    unbiased: bool = False


FED = hooks.error_feedback

ROWS: dict[str, Row] = {
    "bytegrad": Row(hooks.ByteGrad(), scattered(eight_bit(False, None)), 0.02),
    "bytegrad, fed back": Row(FED(hooks.ByteGrad()), scattered(eight_bit(False, None)), 0.02),
    "quantize per tensor": Row(hooks.Quantize(), scattered(eight_bit(True, None)), 0.02),
    "quantize per channel": Row(hooks.Quantize("channel", 16), scattered(eight_bit(True, 16), 16), 0.02),
    "qsgd": Row(hooks.QSGD(block=32, seed=3), scattered(qsgd(127, 32), 32, seed=3), 0.1, unbiased=True),
    "onebit": Row(hooks.OneBit(block=16), scattered(one_bit(16), 16)),
    "topk": Row(hooks.TopK(0.25), scattered(top_k(0.25), padded=True)),
    "randomk": Row(hooks.RandomK(0.25, seed=5), random_k(0.25, 5, feedback=True)),
    "randomk, unbiased": Row(
        hooks.RandomK(0.25, seed=5, error_feedback=False), random_k(0.25, 5, feedback=False), unbiased=True
    ),
    "powersgd 1": Row(hooks.PowerSGD(1, start_step=0), power(1)),
    "powersgd 3": Row(hooks.PowerSGD(3, start_step=0, min_compression_rate=1), power(3, rate=1)),
    "powersgd 2, iterated": Row(hooks.PowerSGD(2, start_step=0, iterations=3), power(2, iterations=3)),
    "powersgd, not fed back": Row(hooks.PowerSGD(1, start_step=0, error_feedback=False), power(1)),
    "batched powersgd": Row(hooks.BatchedPowerSGD(2, start_step=0, seed=4), batched_power(2, 4)),
    "bf16, fed back": Row(FED(hooks.BF16()), scattered(rounded(torch.bfloat16)), 0.01),
    "fp16, fed back": Row(FED(hooks.FP16()), scattered(rounded(torch.float16)), 0.001),
}


def quarter(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    places = x.abs().topk(max(1, len(x) // 4)).indices
    return x.gather(0, places).half(), places.int()


def spread(message: tuple[torch.Tensor, torch.Tensor], numel: int) -> torch.Tensor:
    values, places = message
    return torch.zeros(numel, device=values.device).scatter(0, places.long(), values.float())


#: Combinations, whose parts have their twins above.
COMBINED: dict[str, CommHook] = {
    "randomk in eight bits": hooks.chain(hooks.RandomK(0.5), hooks.ByteGrad()),
    "powersgd in bf16": hooks.cast(hooks.PowerSGD(1, start_step=0), torch.bfloat16),
    "powersgd in eight bits": hooks.chain(hooks.PowerSGD(1, start_step=0), hooks.Quantize("channel", 16)),
    "randomk in two phases": hooks.chain(hooks.RandomK(0.5), InTwoPhases()),
    "onebit after 1": hooks.after(1, hooks.OneBit(block=16)),
    "a chain of three": hooks.chain(hooks.AllReduce(), hooks.RandomK(0.5, error_feedback=False), hooks.BF16()),
    "a chain, fed back": FED(hooks.chain(hooks.AllReduce(), hooks.ByteGrad())),
    "functions, fed back": hooks.from_functions(quarter, spread, error_feedback=True),
    "warm-up in halves": hooks.after(2, hooks.TopK(0.25), first=FED(hooks.BF16())),
}

#: With other hooks for other parameters, for suites whose parameters have such names.
BY_PATH: dict[str, Row] = {
    "by path": Row(
        hooks.partition({"b*": hooks.AllReduce(), "*e*": hooks.PowerSGD(1, start_step=0), "*": FED(hooks.ByteGrad())}),
        by_path({"b*": exact, "*e*": power(1), "*": scattered(eight_bit(False, None))}),
    )
}

HOOKS: dict[str, CommHook] = {**{name: row.hook for name, row in ROWS.items()}, **COMBINED}
#: One hook of each kind, for what takes long; the others join with --full.
FEW = ("bytegrad", "qsgd", "onebit", "topk", "randomk", "powersgd 1", "randomk in eight bits", "onebit after 1")
MOST = [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in HOOKS]
FED_BACK = [name for name, hook in HOOKS.items() if "residual" in hook.state_names]
