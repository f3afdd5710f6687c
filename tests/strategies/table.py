"""Every strategy with its reference: what test_conformance.py runs over. A new strategy is tested by a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import ltx
from ltx import hooks
from ltx.strategies.async_averaging import AsyncAveraging
from ltx.strategies.qadam import QAdam
from tests.strategies.problem import Params, Problem
from tests.strategies.references import async_averaging, ddp, qadam

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)

# Adam's first steps are as long as its second moment is small: these are short, and the moment is soon settled.
QADAM = {"lr": 0.02, "warmup_steps": 4, "betas": (0.8, 0.9), "weight_decay": 0.1}


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
    "qadam": Row(
        QAdam(warmup_steps=4, betas=(0.8, 0.9)), qadam.trained_by(**QADAM), optimizer=ltx.optim.qadam(**QADAM)
    ),
    "qadam, as Bagua's": Row(
        QAdam(warmup_steps=4, betas=(0.8, 0.9)),
        qadam.trained_by(**QADAM, bagua_exact=True),
        optimizer=ltx.optim.qadam(**QADAM, bagua_exact=True),
        ranks=(3,),
    ),
    # Between steps 4 and 5, where the suite saves a state, no round is under way; at the end one is.
    "async": Row(AsyncAveraging(warmup_steps=2, schedule=(3, 2)), async_averaging.rounds(2, 3, 2), replicated=False),
}
