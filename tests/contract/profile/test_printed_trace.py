"""What a recording prints: counts that follow from the parameters, the hook and the number of ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from tests.kinds import Params, Ranks

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
PARAMS = {name: torch.ones(60) for name in "abcd"}
#: Each parameter has a bucket of its own.
ALONE = {"bucket_bytes": 240, "first_bucket_bytes": 240}


def loss(params: Params, x: Tensor) -> Tensor:
    return sum((p * x).sum() for p in params.values())


def trainer(strategy: ltx.Strategy) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, strategy), SGD)


def recorded(strategy: ltx.Strategy, x: Tensor) -> ltx.profile.Trace:
    """One step, after one that ranks compare."""
    train = trainer(strategy)
    state, _ = train(train.init(PARAMS), x)
    with ltx.profile.record() as trace:
        train(state, x)
    return trace


def rows(trace: ltx.profile.Trace) -> dict[str, list[str]]:
    """The cells of the table by kind; columns are two spaces apart or more."""
    table = str(trace).split("\n\n")[1].splitlines()[2:]
    return {cells[0]: cells[1:] for cells in (re.split(r" {2,}", line.strip()) for line in table)}


#: hook -> (collectives of a bucket, messages, bytes a rank sends of a buffer of 60 numbers), between n ranks.
HOOKS: dict[str, Any] = {
    "AllReduce()": (hooks.AllReduce(), "psum", lambda n: 2 * (n - 1), lambda n: 2 * 240 * (n - 1) // n),
    "BF16()": (hooks.BF16(), "psum", lambda n: 2 * (n - 1), lambda n: 2 * 120 * (n - 1) // n),
    "Noop()": (hooks.Noop(), "", lambda n: 0, lambda n: 0),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("simulated", [False, True])
def test_buckets(ranks: Ranks, name: str, simulated: bool) -> None:
    hook, operation, messages, nbytes = HOOKS[name]
    strategy = ltx.DDPStrategy(comm_hook=hook, **ALONE)
    if simulated:
        n, train = 4, trainer(strategy)
        with ltx.profile.record() as trace:
            ltx.vmap(train, in_dims=(None, 0))(train.init(PARAMS), torch.ones(n))
    else:
        n = 2
        trace = ranks(n).run(recorded, strategy, torch.ones(())).rank(0)
    assert sum(event.nbytes for event in trace.buckets) == 4 * nbytes(n)
    assert [packed.hook for packed in trace.packed] == [name] * 4
    assert [packed.nbytes for packed in trace.packed] == [240] * 4
    if operation:
        sent = f"{4 * nbytes(n):,} B"
        assert rows(trace)["bucket"] == ["4", "240 B", name, f"4 {operation}", f"{4 * messages(n)}", sent]
    else:
        assert "bucket" not in str(trace)
    times = r"under way for .*s, .*s of it during the backward pass; waited for .*s"
    assert re.fullmatch("without times" if simulated else times, str(trace).splitlines()[-1]) or not trace.events


def test_exchanges_and_collectives_of_ones_own(ranks: Ranks) -> None:
    def run() -> ltx.profile.Trace:
        train = trainer(ltx.LocalSGDStrategy(1))
        with ltx.profile.record() as trace:
            train(train.init(PARAMS), torch.ones(()))
            ltx.psum(torch.ones(3))
        return trace

    found = rows(ranks(2).run(run).rank(0))
    assert found["exchange"] == ["1", "960 B", "AllReduce()", "1 psum", "2", "960 B"]
    assert found["psum"] == ["1", "1 psum", "2", "12 B"]
    assert "bucket" not in found


def test_simulated_exchanges() -> None:
    train = trainer(ltx.LocalSGDStrategy(1))
    with ltx.profile.record() as trace:
        ltx.vmap(train, in_dims=(None, 0))(train.init(PARAMS), torch.ones(4))
    assert rows(trace) == {"exchange": ["1", "960 B", "AllReduce()", "1 psum", "6", "1,440 B"]}


def test_nothing() -> None:
    train = trainer(ltx.DDPStrategy())
    with ltx.profile.record() as trace:
        train(train.init(PARAMS), torch.ones(()))
    assert str(trace) == "rank 0 sent nothing"
