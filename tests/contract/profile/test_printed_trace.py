"""What a recording and a comparison print: counts follow from the parameters, the hook and the number of ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import InputError
from tests.kinds import Ranks
from tests.train_on import refuses

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
PARAMS = {name: torch.ones(60) for name in "abcd"}
#: Each parameter has a bucket of its own.
ALONE = {"bucket_bytes": 240, "first_bucket_bytes": 240}


def trainer(strategy: ltx.Strategy) -> Any:
    return ltx.train_step(
        ltx.data_parallel(lambda params, x: sum((p * x).sum() for p in params.values()), strategy), SGD
    )


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


NET = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 3))


def loss_of(params: Any, buffers: Any, x: torch.Tensor) -> Any:
    y, buffers = ltx.functional_call(NET, (params, buffers), x, return_buffers=True)
    return y.square().mean(), buffers


def steps() -> dict[str, Any]:
    adam, compressed = ltx.optim.from_torch(torch.optim.Adam), ltx.DDPStrategy(comm_hook=hooks.PowerSGD(rank=1))
    strategies = {"ddp": None, "local": ltx.LocalSGDStrategy(4), "powersgd": compressed, "zero": ltx.ZeroStrategy()}
    return {name: ltx.train_step(ltx.data_parallel(loss_of, s), adam) for name, s in strategies.items()}


def compared() -> Any:
    candidates = steps()
    params = dict(NET.named_parameters())
    params["0.bias"].requires_grad_(False)
    state = candidates["zero"].init(params, dict(NET.named_buffers()))
    before = ltx.tree.map(torch.clone, (state.params, state.buffers))
    found = ltx.profile.compare(candidates, state, torch.randn(8, 40), steps=3)
    ltx.tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), (state.params, state.buffers), before)
    return [(row.name, row.step_s) for row in found], {row.name: row.sent for row in found}, str(found)


def test_steps_in_turns(ranks: Ranks) -> None:
    (rows, sent, text), (others, *_) = ranks(2).run(compared)
    assert rows == others
    assert [step_s for _, step_s in rows] == sorted(step_s for _, step_s in rows)
    assert rows[0][1] > 0
    nbytes = sum(p.nbytes for name, p in NET.named_parameters() if name != "0.bias")  # of two ranks, each sends all
    assert sent["ddp"] == nbytes
    assert sent["powersgd"] < nbytes / 2, "steps begin behind the exact ones"
    assert sent["local"] == pytest.approx(nbytes / 4)
    assert text.splitlines()[0].split() == ["candidate", "a", "step", "to", "the", "first", "sent"]
    assert text.splitlines()[2].split()[0] == rows[0][0]


def test_alone_and_what_cannot_be() -> None:
    _, sent, _ = compared()
    assert set(sent.values()) == {0.0}
    candidates = steps()
    for wrong in (({}, None), (candidates, NET)):
        refuses(InputError, "compare takes train steps by name and a state, got", ltx.profile.compare, *wrong)
    with pytest.raises(InputError, match="compare: steps must be a whole number of at least 1, got 0"):
        ltx.profile.compare(candidates, candidates["ddp"].init(dict(NET.named_parameters())), steps=0)
