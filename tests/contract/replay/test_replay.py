"""Records of what ranks received, and a rank that runs alone from its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import (
    CheckpointError,
    InputError,
    LtxError,
    NotFiniteError,
    RankMismatchError,
    ReplicaDivergedError,
    WorldError,
)
from tests.kinds import Params, Ranks

STEPS, SIZE = 10, 4

NET = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = ltx.optim.from_torch(torch.optim.Adam, lr=0.01)


def mse(params: Params, x: Tensor, y: Tensor, weight: Any = 1.0) -> Tensor:
    error: Tensor = (ltx.functional_call(NET, params, x) - y).square().mean()
    return error * weight


def weighted(params: Params, x: Tensor, y: Tensor) -> ltx.Weighted:
    return ltx.Weighted((ltx.functional_call(NET, params, x) - y).square().sum(), len(x))


def train_step(strategy: ltx.Strategy | None = None, optimizer: Any = ADAM, loss: Any = mse, **how: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, strategy), optimizer, **how)


#: What is trained, by name; the first come without --full.
KINDS: dict[str, Callable[[], Any]] = {
    "DDP": train_step,
    "PowerSGD": lambda: train_step(ltx.DDPStrategy(comm_hook=ltx.hooks.PowerSGD(rank=1))),
    "ZeRO": lambda: train_step(ltx.ZeroStrategy()),
    "bytegrad": lambda: train_step(ltx.BaguaStrategy("bytegrad")),
    "Adasum": lambda: train_step(ltx.HorovodStrategy(op="adasum"), SGD),
    "local SGD": lambda: train_step(ltx.LocalSGDStrategy(period=3)),
    "Weighted": lambda: train_step(loss=weighted),
    "accumulate": lambda: ltx.train_step(ltx.accumulate(ltx.data_parallel(mse), 2), ADAM),
    "uneven": train_step,
    "qadam": lambda: train_step(ltx.BaguaStrategy("qadam", warmup_steps=4), ltx.optim.qadam(lr=0.01, warmup_steps=4)),
    "decentralized": lambda: train_step(ltx.BaguaStrategy("decentralized")),
    "DiLoCo": lambda: train_step(ltx.DiLoCoStrategy(period=3)),
    "update": lambda: train_step(overlap="update"),
    "skip": lambda: train_step(guard="skip"),
    "compared": lambda: train_step(check_every=2),
}
QUICK = ("DDP", "PowerSGD", "ZeRO")


def params() -> Params:
    random = torch.Generator().manual_seed(1)
    return {name: torch.randn(p.shape, generator=random) / 4 for name, p in NET.named_parameters()}


def batches(kind: str, steps: int = STEPS) -> Iterator[tuple[Any, ...]]:
    rank = ltx.world().rank
    random = torch.Generator().manual_seed(rank)
    made = [(torch.randn(6, 8, generator=random), torch.randn(6, 3, generator=random)) for _ in range(steps)]
    if kind == "uneven":
        return ((*batch, weight) for batch, weight in ltx.uneven(made[: steps - 2 * (rank == 1)]))
    return iter(made)


def trained(train: Any, state: Any, given: Iterator[tuple[Any, ...]]) -> list[Tensor]:
    """The losses, with their means over ranks, and the parameters at the end."""
    losses = list[Tensor]()
    for batch in given:
        state, metrics = train(state, *batch)
        losses += [metrics.loss.clone(), ltx.pmean(metrics.loss)]
    return losses + [x.detach().clone() for x in state.params.values()]


def record(run: Path, kind: str, first: int) -> list[Tensor]:
    """What a rank comes to from step `first` on, while it is recorded."""
    train, given = KINDS[kind](), list(batches(kind))
    state = train.init(params())
    torch.manual_seed(ltx.world().rank)  # of the dropout
    with ltx.record_messages(run, steps=range(first, STEPS)):
        for batch in given[:first]:
            state, _ = train(state, *batch)
        return trained(train, state, iter(given[first:]))


def replay(run: Path, kind: str, rank: int) -> list[Tensor]:
    train = KINDS[kind]()
    with ltx.replay(run, rank=rank) as replayed:
        assert (ltx.world().rank, ltx.world().size) == (rank, SIZE)
        return trained(train, replayed.load(train.init(params())), replayed.batches)


def in_another_process(call: str, run: Path) -> Any:
    """What `call`, of functions of this file, comes to in a new process."""
    program = (
        f"import torch; from tests.contract.replay.test_replay import *; torch.save({call}, {str(run / 'told')!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3], env=dict(os.environ))
    return torch.load(run / "told", weights_only=True)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(each, marks=pytest.mark.full) for each in KINDS if each not in QUICK)]
)
def test_each_rank_alone_is_what_it_was(ranks: Ranks, tmp_path: Path, kind: str, first: int) -> None:
    were = ranks(SIZE).run(partial(record, tmp_path, kind, first))
    are = in_another_process(f"[replay(Path({str(tmp_path)!r}), {kind!r}, rank) for rank in range({SIZE})]", tmp_path)
    for rank, (then, now) in enumerate(zip(were, are, strict=True)):
        assert [*map(torch.equal, then, now)] == [True] * len(then), f"rank {rank}"
