"""Every strategy with its reference: what test_conformance.py runs over. A new strategy is tested by a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import ltx
from ltx import hooks
from tests.strategies.problem import Params, Problem
from tests.strategies.references import ddp, zero

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
CLIPPED_ADAM = ltx.optim.chain(
    ltx.optim.clip_by_global_norm(0.3), ltx.optim.from_torch(torch.optim.AdamW, lr=0.05, weight_decay=0.0)
)


@dataclass(frozen=True)
class Row:
    """A strategy, and each rank's parameters after each step as NumPy finds them.

    Attributes:
        strategy: what is tested.
        reference: ``problem -> parameters by step and rank``, written from the paper without ltx or torch.
        optimizer: what the reference trains with; momentum SGD unless it says otherwise.
        ranks: numbers of processes that it works on.
        replicated: whether parameters are the same on all ranks after every step.
        tolerance: relative and absolute.
    """

    strategy: ltx.Strategy
    reference: Callable[[Problem], list[list[Params]]]
    optimizer: ltx.optim.Optimizer = SGD
    ranks: tuple[int, ...] = (2, 3)
    replicated: bool = True
    tolerance: float = 1e-9


ROWS: dict[str, Row] = {
    "ddp": Row(ltx.DDPStrategy(), ddp.mean_gradients),
    "ddp, several buckets": Row(
        ltx.DDPStrategy(bucket_bytes=8, first_bucket_bytes=8, comm_hook=hooks.AllReduce()), ddp.mean_gradients
    ),
    "zero": Row(ltx.ZeroStrategy(), zero.momentum),
    "zero, several buckets, clipped AdamW": Row(
        ltx.ZeroStrategy(bucket_bytes=8, first_bucket_bytes=8), zero.clipped_adam, CLIPPED_ADAM, ranks=(3,)
    ),
}
