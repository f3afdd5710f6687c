"""Every strategy with its reference: what test_conformance.py runs over. A new strategy is tested by a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import ltx
from ltx import hooks
from tests.strategies.problem import Adam, Params, Problem
from tests.strategies.references import ddp, horovod

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)

ADAM = ltx.optim.from_torch(torch.optim.Adam, lr=0.05)


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
    "horovod": Row(ltx.HorovodStrategy(groups=2), horovod.averaged(Adam), ADAM, ranks=(2,)),
    "horovod sum": Row(ltx.HorovodStrategy(op="sum"), horovod.averaged(factor=lambda n: n), ranks=(2,)),
    "horovod fp16": Row(ltx.HorovodStrategy(compression="fp16"), horovod.averaged(sent=horovod.fp16), ranks=(2,)),
    "horovod predivide": Row(
        ltx.HorovodStrategy(gradient_predivide_factor=2.0, bucket_bytes=8), horovod.averaged(), ranks=(3,)
    ),
    "horovod scaled lr": Row(
        ltx.HorovodStrategy(scale_lr=True), horovod.averaged(Adam, lr=lambda n: 0.05 * n), ADAM, ranks=(2,)
    ),
    "horovod 2 passes": Row(
        ltx.HorovodStrategy(backward_passes_per_step=2, first_bucket_bytes=8), horovod.averaged(passes=2), ranks=(2,)
    ),
    "horovod adasum": Row(ltx.HorovodStrategy(op="adasum", bucket_bytes=8), horovod.adasum_of_steps(), ranks=(2, 4)),
    # With Adam's small eps first steps are signs. Opposite ones cancel, and what is left over is all rounding.
    "horovod adasum, adam": Row(
        ltx.HorovodStrategy(op="adasum"),
        horovod.adasum_of_steps(lambda: Adam(eps=0.1)),
        ltx.optim.from_torch(torch.optim.Adam, lr=0.05, eps=0.1),
        ranks=(2, 4),
    ),
    "horovod adasum, 2 passes": Row(
        ltx.HorovodStrategy(op="adasum", backward_passes_per_step=2), horovod.adasum_of_steps(passes=2), ranks=(2,)
    ),
}
