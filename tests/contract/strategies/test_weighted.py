"""What weights do under each strategy: the exact mean over all ranks' samples, or an error by name."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import RankMismatchError, StrategyError
from tests.kinds import Ranks

WEIGHTS = torch.tensor([1.0, 100.0])
EXACT: list[ltx.Strategy] = [
    ltx.DDPStrategy(),
    ltx.ZeroStrategy(),
    ltx.HorovodStrategy(),
    ltx.BaguaStrategy("gradient_allreduce"),
]
REFUSED: list[ltx.Strategy] = [
    ltx.LocalSGDStrategy(2),
    ltx.LocalSGDStrategy(2, warmup_steps=5),
    ltx.LocalSGDStrategy(4, subgroup=2),
    ltx.DDPStrategy(model_averaging_period=2, start_local_sgd_step=3),
    ltx.DiLoCoStrategy(2),
    ltx.BaguaStrategy("decentralized"),
    ltx.BaguaStrategy("decentralized", peer_selection_mode="shift_one"),
    ltx.BaguaStrategy("low_precision_decentralized"),
    ltx.BaguaStrategy("async"),
    ltx.HorovodStrategy(op="adasum"),
]


def stepped(strategy: ltx.Strategy, x: Tensor, weight: Tensor) -> Tensor:
    """The parameter after a step of rank r: samples x_r, which count weight_r."""
    step = ltx.data_parallel(lambda w, x: ltx.Weighted(weight * (w * x).sum(), weight), strategy)
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
    w: Tensor = train(train.init(torch.zeros(3)), x)[0].params
    return w


def test_what_averages_gradients_is_exact(ranks: Ranks, seed: int) -> None:
    x = torch.randn(2, 3)
    expected = -(WEIGHTS[:, None] * x).sum(0) / WEIGHTS.sum()

    def run() -> list[Tensor]:
        rank = ltx.world().rank
        return [stepped(strategy, x[rank], WEIGHTS[rank]) for strategy in EXACT]

    for found in ranks(2).run(run):
        for w in found:
            torch.testing.assert_close(w, expected)
    for strategy in EXACT:
        for w in ltx.vmap(lambda x, weight, s=strategy: stepped(s, x, weight))(x, WEIGHTS):
            torch.testing.assert_close(w, expected)


def test_weights_that_half_precision_cant_hold_count_as_they_are(ranks: Ranks, seed: int) -> None:
    """Float16 has no number above 65504, and rounds whole ones from 2049 on."""
    weights, x = torch.tensor([70_001, 4_099]), 2048 * torch.rand(2, 3).half()
    expected = -(weights[:, None] * (x.float() * 2**-12)).sum(0) / weights.sum()

    def step(w: Tensor, x: Tensor, weight: int) -> ltx.Weighted:
        return ltx.Weighted((w * x * (weight * 2**-12)).sum(), weight)

    def run() -> tuple[Tensor, Tensor]:
        rank = ltx.world().rank
        mine, weight = x[rank], int(weights[rank])
        train = ltx.train_step(ltx.data_parallel(step), ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
        start = torch.zeros(3, dtype=torch.half)
        grads = torch.func.grad(ltx.data_parallel(step))(start, mine, weight)
        return train(train.init(start), mine, weight)[0].params, -grads

    for found in ranks(2).run(run):
        for w in found:
            torch.testing.assert_close(w, expected.half(), rtol=1e-2, atol=1e-3)


def test_what_averages_parameters_refuses(ranks: Ranks) -> None:
    def run() -> list[str]:
        passed = []
        for strategy in REFUSED:
            if strategy == REFUSED[2] and ltx.axis_size() == 1:
                continue  # it has no nodes of two ranks there
            try:
                stepped(strategy, torch.ones(3), WEIGHTS[ltx.world().rank])
                passed.append(repr(strategy))
            except StrategyError as error:
                if ltx.axis_size() > 1:
                    ltx.init()
                if "an ltx.Weighted needs gradients that ranks average by weight" not in str(error):
                    passed.append(f"{strategy!r}: {error}")
        return passed

    assert run() == []
    assert list(ranks(2).run(run)) == [[], []]


@pytest.mark.parametrize("strategy", [REFUSED[0], REFUSED[5]], ids=["local SGD", "gossip"])
def test_on_simulated_ranks(strategy: ltx.Strategy) -> None:
    with pytest.raises(StrategyError, match="needs gradients that ranks average by weight"):
        ltx.vmap(lambda x, weight: stepped(strategy, x, weight))(torch.ones(2, 3), WEIGHTS)


def or_zero(w: Tensor, x: Tensor) -> Tensor | ltx.Weighted:
    """As written for a batch that may be empty."""
    return ltx.Weighted((w * x).sum(), len(x)) if len(x) else 0 * w.sum()


def with_an_empty_batch(strategy: ltx.Strategy, overlap: Literal["backward", "update"]) -> None:
    sgd, rank = ltx.optim.from_torch(torch.optim.SGD, lr=0.1), int(ltx.axis_index())
    train = ltx.train_step(ltx.data_parallel(or_zero, strategy), sgd, overlap=overlap, donate=overlap == "backward")
    state, _ = train(train.init(torch.ones(1)), torch.ones(2, 1))
    with pytest.raises(RankMismatchError, match=r"what the step returns: rank 0: ltx.Weighted; rank 1: a loss without"):
        train(state, torch.ones(0 if rank else 2, 1))
    torch.testing.assert_close(state.params, torch.tensor([0.9]))
    ltx.init()
    state, _ = train(state, torch.ones(2, 1))
    torch.testing.assert_close(state.params, torch.tensor([0.8]))


@pytest.mark.parametrize(
    ("strategy", "overlap"),
    [(ltx.DDPStrategy(), "backward"), (ltx.DDPStrategy(), "update"), (ltx.ZeroStrategy(), "backward")],
    ids=str,
)
def test_a_weight_on_some_ranks_alone_is_refused(strategy: ltx.Strategy, overlap: str, ranks: Ranks) -> None:
    """One rank divided by the weights and the other didn't, so parameters drifted apart."""
    ranks(2).run(with_an_empty_batch, strategy, overlap)
