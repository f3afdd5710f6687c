"""Every strategy with its reference: what test_conformance.py runs over. A new strategy is tested by a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import ltx
from ltx import hooks
from tests.contract.strategies.problem import Adam, Params, Problem
from tests.contract.strategies.references import averaging, bagua, horovod, zero
from tests.inside import AsyncAveraging, QAdam
from tests.twins.training import sgd

SMALL: Any = {"bucket_bytes": 8, "first_bucket_bytes": 8}
NODES: Any = {"hierarchical": True, "node_size": 2}
SLOW = sgd(0.02, momentum=0.9)
SGD = sgd(0.1, momentum=0.9)
CLIPPED_ADAM = ltx.optim.chain(
    ltx.optim.clip_by_global_norm(0.3), ltx.optim.from_torch(torch.optim.AdamW, lr=0.05, weight_decay=0.0)
)

# Adam's first steps are as long as its second moment is small: these are short, and the moment is soon settled.
QADAM = {"lr": 0.02, "warmup_steps": 4, "betas": (0.8, 0.9), "weight_decay": 0.1}
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
    "ddp": Row(ltx.DDPStrategy(), horovod.averaged()),
    "ddp, several buckets": Row(ltx.DDPStrategy(comm_hook=hooks.AllReduce(), **SMALL), horovod.averaged()),
    "bagua gradient_allreduce": Row(ltx.BaguaStrategy("gradient_allreduce", flatten=True), horovod.averaged()),
    "bagua gradient_allreduce, sum": Row(
        ltx.BaguaStrategy("gradient_allreduce", average=False),
        horovod.averaged(factor=lambda n: n, lr=lambda n: 0.02),
        SLOW,
    ),
    "bagua bytegrad": Row(ltx.BaguaStrategy("bytegrad"), bagua.eight_bit_gradients()),
    "bagua bytegrad, sum": Row(
        ltx.BaguaStrategy("bytegrad", average=False), bagua.eight_bit_gradients(False, 0.02), SLOW, ranks=(2,)
    ),
    "bagua decentralized": Row(ltx.BaguaStrategy("decentralized"), bagua.decentralized(), replicated=False),
    "bagua decentralized, interval": Row(
        ltx.BaguaStrategy("decentralized", communication_interval=3),
        bagua.decentralized(interval=3),
        ranks=(3,),
        replicated=False,
    ),
    "bagua decentralized, shift_one": Row(
        ltx.BaguaStrategy("decentralized", peer_selection_mode="shift_one"),
        bagua.decentralized(shift_one=True),
        ranks=(2, 4),
        replicated=False,
    ),
    "bagua decentralized, shift_one, interval": Row(
        ltx.BaguaStrategy(
            "decentralized", peer_selection_mode="shift_one", communication_interval=2, first_bucket_bytes=8
        ),
        bagua.decentralized(shift_one=True, interval=2),
        ranks=(4,),
        replicated=False,
    ),
    "bagua low_precision_decentralized": Row(
        ltx.BaguaStrategy("low_precision_decentralized"), bagua.low_precision(), ranks=(2, 3, 4), replicated=False
    ),
    "bagua low_precision_decentralized, interval, several buckets": Row(
        ltx.BaguaStrategy("low_precision_decentralized", communication_interval=2, **SMALL),
        bagua.low_precision(interval=2, one_bucket=False),
        ranks=(3,),
        replicated=False,
    ),
    "bagua bytegrad, hierarchical": Row(
        ltx.BaguaStrategy("bytegrad", **NODES), bagua.eight_bit_gradients(node=2), ranks=(4,)
    ),
    "bagua gradient_allreduce, hierarchical": Row(
        ltx.BaguaStrategy("gradient_allreduce", **NODES, **SMALL), horovod.averaged(), ranks=(4,)
    ),
    "bagua decentralized, hierarchical": Row(
        ltx.BaguaStrategy("decentralized", **NODES), bagua.decentralized(node=2), ranks=(4,), replicated=False
    ),
    "bagua decentralized, hierarchical, shift_one": Row(
        ltx.BaguaStrategy("decentralized", peer_selection_mode="shift_one", **NODES, **SMALL),
        bagua.decentralized(shift_one=True, node=2),
        ranks=(4,),
        replicated=False,
    ),
    "bagua low_precision_decentralized, hierarchical": Row(
        ltx.BaguaStrategy("low_precision_decentralized", **NODES),
        bagua.low_precision(node=2),
        ranks=(4,),
        replicated=False,
    ),
    "local SGD": Row(
        ltx.LocalSGDStrategy(3, warmup_steps=2), partial(averaging.post_local, period=3, warmup=2), replicated=False
    ),
    "local SGD in nodes, hierarchical": Row(
        ltx.LocalSGDStrategy({2: 2, 4: 4}, warmup_steps=1, subgroup=2),
        partial(averaging.hierarchical, levels={2: 2, 4: 4}, warmup=1, node=2),
        ranks=(4,),
        replicated=False,
    ),
    "DDP that averages models": Row(
        ltx.DDPStrategy(model_averaging_period=2, start_local_sgd_step=1),
        partial(averaging.post_local, period=2, warmup=1),
        ranks=(2,),
        replicated=False,
    ),
    "no communication after a while": Row(
        ltx.DDPStrategy(comm_hook=hooks.after(2, hooks.Noop())),
        partial(averaging.hierarchical, levels={}, warmup=2, node=1),
        ranks=(2,),
        replicated=False,
    ),
    "DiLoCo": Row(
        ltx.DiLoCoStrategy(3), partial(averaging.diloco, period=3, lr=0.7, momentum=0.9), ranks=(2,), replicated=False
    ),
    "DiLoCo, 8 bits, fragments": Row(
        ltx.DiLoCoStrategy(3, outer_lr=0.5, outer_momentum=0.8, outer_hook=hooks.ByteGrad(), fragments=2),
        partial(
            averaging.diloco, period=3, lr=0.5, momentum=0.8, average=bagua.EightBits, fragments=(("b", "s"), ("w",))
        ),
        replicated=False,
    ),
    "DiLoCo, SlowMo's outer step, mixed": Row(
        ltx.DiLoCoStrategy(3, outer=sgd(0.8, momentum=0.5), fragments=2, update_alpha=0.25),
        partial(
            averaging.diloco, period=3, lr=0.8, momentum=0.5, nesterov=False, alpha=0.25, fragments=(("b", "s"), ("w",))
        ),
        ranks=(2,),
        replicated=False,
    ),
    "DiLoCo, 8 bits with error feedback": Row(
        ltx.DiLoCoStrategy(3, outer_hook=hooks.ByteGrad(error_feedback=True)),
        partial(averaging.diloco, period=3, lr=0.7, momentum=0.9, average=partial(bagua.EightBits, feedback=True)),
        replicated=False,
    ),
    # Between steps 4 and 5, where the suite saves a state, nothing is under way; test_diloco.py saves at all others.
    "DiLoCo, fragments sent two steps ahead, mixed": Row(
        ltx.DiLoCoStrategy(8, fragments=2, fragment_sync_delay=2, update_alpha=0.25),
        partial(averaging.diloco, period=8, lr=0.7, momentum=0.9, fragments=(("b", "s"), ("w",)), alpha=0.25, delay=2),
        replicated=False,
    ),
    "qadam": Row(
        QAdam(warmup_steps=4, betas=(0.8, 0.9)), bagua.trained_by(**QADAM), optimizer=ltx.optim.qadam(**QADAM)
    ),
    "qadam, as Bagua's": Row(
        QAdam(warmup_steps=4, betas=(0.8, 0.9)),
        bagua.trained_by(**QADAM, bagua_exact=True),
        optimizer=ltx.optim.qadam(**QADAM, bagua_exact=True),
        ranks=(3,),
    ),
    "1-bit Adam": Row(
        ltx.BaguaStrategy("qadam", warmup_steps=4, betas=(0.8, 0.9), momentum_hook=hooks.OneBit(block=8)),
        bagua.trained_by(**QADAM, one_bit=8),
        optimizer=ltx.optim.qadam(**QADAM),
    ),
    "qadam, hierarchical": Row(
        ltx.BaguaStrategy(
            "qadam", warmup_steps=4, betas=(0.8, 0.9), momentum_hook=hooks.after(2, hooks.ByteGrad()), **NODES
        ),
        bagua.trained_by(**QADAM, node=2),
        optimizer=ltx.optim.qadam(**QADAM),
        ranks=(4,),
    ),
    # Between steps 4 and 5, where the suite saves a state, no round is under way; at the end one is.
    "async": Row(AsyncAveraging(warmup_steps=2, schedule=(3, 2)), averaging.rounds(2, 3, 2), replicated=False),
    "async, hierarchical": Row(
        ltx.BaguaStrategy("async", warmup_steps=2, schedule=(3, 2), **NODES),
        averaging.rounds(2, 3, 2, node=2),
        ranks=(4,),
        replicated=False,
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
    "zero": Row(ltx.ZeroStrategy(), horovod.averaged()),
    "zero, bytegrad": Row(ltx.ZeroStrategy(comm_hook=hooks.ByteGrad()), zero.eight_bit_parts),
    "zero, topk": Row(ltx.ZeroStrategy(comm_hook=hooks.TopK(0.5)), zero.greatest_half_of_parts),
    "zero, several buckets, clipped AdamW": Row(
        ltx.ZeroStrategy(**SMALL), horovod.averaged(zero.ClippedAdam), CLIPPED_ADAM, ranks=(3,)
    ),
}

#: name: the mechanism that it is a case of. The fast suite asks of one strategy of each what the full one asks of all.
KINDS = {name: getattr(row.strategy, "algorithm", type(row.strategy).__name__) for name, row in ROWS.items()}
