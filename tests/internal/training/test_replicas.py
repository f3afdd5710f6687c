"""check_replicas, and train_step(check_every=k): whoever has drifted off is named, on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import ltx
from ltx import hooks
from ltx.core.training.train_state import counted
from ltx.core.transforms.compare import digest, values
from ltx.errors import DonatedStateError, ReplicaDivergedError, StrategyError
from tests import train_on
from tests.kinds import Ranks

ADAM = ltx.optim.from_torch(torch.optim.Adam, lr=0.1)


def trainer(strategy: ltx.Strategy | None = None, **kwargs: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum() + p["b"] ** 2, strategy), ADAM, **kwargs)


def start(train: Any) -> Any:
    return train.init({"w": torch.linspace(-1, 1, 5000), "b": torch.ones(())})


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("n", "odd", "said"),
    [
        (3, [2], "differs on rank 2 from what 2 of 3 ranks have."),
        (3, [0], "differs on rank 0 from what 2 of 3 ranks have."),
        (2, [1], "differs on rank 1 from rank 0 (no value has a majority)."),
        (4, [1, 2, 3], "differs on rank 0 from what 3 of 4 ranks have."),
    ],
)
def test_the_odd_ones_out_are_named_and_mended(n: int, odd: list[int], said: str, ranks: Ranks) -> None:
    right = next(rank for rank in range(n) if (rank in odd) == (len(odd) > n / 2))

    def on_a_rank() -> tuple[str, bool]:
        train = trainer(donate=False)
        state, _ = train(start(train), torch.ones(5000))
        ltx.check_replicas(state)
        good = ltx.tree.map(torch.clone, state.params)
        if int(ltx.axis_index()) in odd:
            state.params["w"].view(torch.int32)[4321] ^= 1  # the last bit of one number
        text = train_on.said(ReplicaDivergedError, ltx.check_replicas, state)
        mended, tie = train.broadcast(state, src=right), len(odd) == n / 2
        ltx.check_replicas(mended)
        if tie:
            train_on.refuses(ReplicaDivergedError, "no value has a majority", ltx.sync_params, state)
        synced = ltx.sync_params(state, right if tie else None)
        ltx.check_replicas(synced)
        assert torch.equal(synced.params["w"], mended.params["w"])
        assert ltx.sync_params(synced) is synced
        return text, torch.equal(mended.params["w"], good["w"])

    results = ranks(n).run(on_a_rank)
    (text,) = {text for text, _ in results}
    assert text.startswith("axis 'data': leaf 'params.w' (float32[5000]) should be the same on every rank, and ")
    assert said in text
    assert f"ltx.sync_params(state, src={right}), or train.broadcast(state, src={right}) for a whole" in text
    assert all(same == (right not in odd) for _, same in results)


@train_on.on_ranks(2)
def test_ranks_that_count_other_steps_are_named_and_mended() -> None:
    """A schedule of the learning rate would read another number on each, and the parameters drift apart."""
    schedule = ltx.optim.from_torch(torch.optim.SGD, lr=lambda updates: 0.1 * (updates + 1))
    train = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), schedule, donate=False, check_every=1)
    state, x = train.init(torch.ones(2)), torch.ones(2)
    if int(ltx.axis_index()) == 1:
        state = counted(state, 5, 3)
    text = train_on.said(ReplicaDivergedError, train, state, x)
    assert text.startswith("axis 'data': leaf 'step' (int64[]) should be the same on every rank, and differs on rank 1")
    assert "So do 1 more: 'updates'." in text
    synced = ltx.sync_params(state, src=1)
    assert (synced.step, synced.sync_state.step, synced.opt_state.count) == (5, 5, 3)
    ltx.check_replicas(train(synced, x)[0])


def test_the_first_step_compares_what_is_common_beside_parameters(on_new_axis: Callable[..., Any]) -> None:
    """Ranks of DiLoCo have parameters of their own, and go on from one anchor, or would differ for good."""

    def on_a_rank() -> str:
        train = trainer(ltx.DiLoCoStrategy(period=2), donate=False)
        state = start(train)
        if int(ltx.axis_index()) == 1:
            state.sync_state.leaves["b"]["anchor"].add_(1.0)
        return train_on.said(ReplicaDivergedError, train, state, torch.ones(5000))

    (text,) = set(on_new_axis(on_a_rank))
    assert "leaf 'sync_state.leaves.b.anchor' (float32[]) should be the same on every rank" in text


@train_on.on_ranks(2)
def test_what_is_each_ranks_own_stays() -> None:
    """ZeRO's parts, parameters between Local SGD's averages; buffers are the same on all ranks or each one's own."""
    for strategy in (ltx.ZeroStrategy(), ltx.LocalSGDStrategy(9, warmup_steps=1)):
        train, x = trainer(strategy), torch.full((5000,), 1.0 + int(ltx.axis_index()))
        state = train_on.go_on(train, start(train), [x] * 3).state
        ltx.check_replicas(state)
    assert ltx.sync_params(state, src=1).params["w"].equal(state.params["w"])
    for synced in ltx.sync_params(dict(state.params), src=1).values():
        assert torch.equal(synced, ltx.broadcast(synced))


def test_ranks_that_differ_in_different_leaves() -> None:
    """Each leaf has a majority, and no rank has all of them."""
    values = dict(zip("abc", torch.eye(3), strict=True))
    train_on.said(ReplicaDivergedError, ltx.vmap(ltx.sync_params), values)
    synced = ltx.vmap(lambda x: ltx.sync_params(x, src=2))(values)
    assert {name: x.tolist() for name, x in synced.items()} == {"a": [0.0] * 3, "b": [0.0] * 3, "c": [1.0] * 3}
    alone = {"a": torch.ones(2), "empty": torch.ones(0)}
    assert ltx.sync_params(alone) is alone


@train_on.on_ranks(2)
def test_all_leaves_that_differ_are_listed() -> None:
    tree = {str(i): torch.full((3,), float(i)) for i in range(12)}
    for i in range(1, 11):
        tree[str(i)] += int(ltx.axis_index())
    said = train_on.said(ReplicaDivergedError, ltx.check_replicas, tree)
    assert "leaf '1' (float32[3])" in said
    assert "So do 9 more: '10', '2', '3', '4', '5', '6', '7', ... Take" in said


@train_on.on_ranks(2)
def test_every_so_many_steps() -> None:
    train, raised = trainer(check_every=3, donate=False), []
    state = start(train)
    for step in range(8):
        if step == 4 and int(ltx.axis_index()) == 1:
            state.params["b"] += 1
        try:
            state, _ = train(state, torch.ones(5000))
        except ReplicaDivergedError:
            raised.append((step, state.step))
            state, _ = train(train.broadcast(state), torch.ones(5000))
    assert raised == [(6, 6)]
    with ltx.profile.record() as trace:
        ltx.check_replicas(state)
    assert trace.events == []


def test_simulated_ranks() -> None:
    train = trainer(check_every=2, donate=False)
    state, _ = ltx.vmap(train, in_dims=(None, 0))(start(train), torch.ones(3, 5000))
    state.params["b"][1] += 1
    state, _ = ltx.vmap(train)(state, torch.ones(3, 5000))
    text = r"leaf 'params.b' .* differs on rank 1 from what 2 of 3 ranks have"
    train_on.refuses(ReplicaDivergedError, text, ltx.vmap(train), state, torch.ones(3, 5000))


def test_alone() -> None:
    ltx.check_replicas(start(trainer()))
    old = start(trainer())
    trainer(check_every=1)(old, torch.ones(5000))
    train_on.said(DonatedStateError, ltx.check_replicas, old)


@pytest.mark.parametrize("every", [0, True, 1.5])
def test_wrong_arguments(every: Any) -> None:
    text = "check_every must be None or a whole number of at least 1, got"
    train_on.refuses(StrategyError, text, trainer, check_every=every)


APART = {
    "strategy": ltx.LocalSGDStrategy(2),
    "hook": ltx.DDPStrategy(comm_hook=hooks.Noop()),
    "hook later": ltx.HorovodStrategy(compression=hooks.after(3, hooks.Noop())),
    "hook of torch": ltx.DDPStrategy(comm_hook=hooks.from_torch(noop_hook)),
}


@pytest.mark.parametrize("part", APART)
def test_what_lets_ranks_drift_apart_is_not_compared(part: str) -> None:
    text = f"check_every needs parameters alike on all ranks, which {APART[part]!r} doesn't offer: leave it out"
    train_on.refuses(StrategyError, re.escape(text), lambda: trainer(APART[part], check_every=1))


TENSORS: dict[str, Callable[[], Tensor]] = {
    "0-dim": lambda: torch.randn(()),
    "small": lambda: torch.randn(7),
    "large": lambda: torch.randn(100_003),
    "bytes": lambda: torch.randint(0, 255, (65_537,), dtype=torch.uint8),
    "half": lambda: torch.randn(50_001).bfloat16(),
    "complex": lambda: torch.randn(30_000, dtype=torch.complex64),
    "at an odd place": lambda: torch.randn(100_004)[1:],
    "bool": lambda: torch.rand(70_000) > 0.5,
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_bit_counts(name: str, seed: int) -> None:
    x = TENSORS[name]()
    found, raw = digest(x), x.clone().view(-1).view(torch.uint8)
    assert digest(x.clone()) == found
    for place in torch.randint(len(raw), (50,)).tolist():
        bit = 1 << int(torch.randint(8, ()))
        raw[place] ^= bit
        assert digest(raw.view(x.dtype) if name != "bool" else raw.view(torch.uint8)) != found
        raw[place] ^= bit
    assert digest(raw) == found


def test_order_counts(seed: int) -> None:
    x = torch.randn(200_000)
    found = digest(x)
    for _ in range(50):
        i, j = torch.randint(len(x), (2,)).tolist()
        y = x.clone()
        y[i], y[j] = x[j], x[i]
        assert (digest(y) == found) == (i == j)
        y = x.clone()
        y[i], y[j] = -x[i], -x[j]
        assert digest(y) != found or i == j
    assert digest(values(x.view(400, 500).T)) != found
    assert digest(torch.zeros(0)) == digest(torch.zeros(0, 5)) == ""
