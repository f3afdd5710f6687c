"""What strategies make of gradients: means at hand, means by weights, and nothing of zeros, or an error by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import RankMismatchError, StrategyError
from tests.contract.hooks.table import HOOKS
from tests.contract.strategies.table import ROWS
from tests.inside import QAdam
from tests.kinds import Ranks
from tests.train_on import inner, on_ranks, raised_by, refuses

SENT_BY = [
    hooks.AllReduce(),
    "fp16",
    hooks.ByteGrad(),
    hooks.OneBit(error_feedback=True),
    hooks.after(1, hooks.TopK(0.5)),
]
WAYS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "ltx.grad": lambda strategy, w, x: ltx.grad(ltx.data_parallel(inner, strategy))(w, x),
    "torch.func.grad": lambda strategy, w, x: torch.func.grad(ltx.data_parallel(inner, strategy))(w, x),
    "accumulate": lambda strategy, w, x: ltx.grad(ltx.accumulate(ltx.data_parallel(inner, strategy), 1))(w, x[None]),
    "gradients that the step returns": lambda strategy, w, x: ltx.data_parallel(
        lambda w, x: x.clone(), strategy, returns="grads"
    )(w, x),
    "sync_gradients": lambda strategy, w, x: ltx.sync_gradients(x.clone(), strategy)[0],
}


def means(way: str, strategy: Any, xs: Tensor) -> list[Tensor]:
    return [WAYS[way](strategy, torch.ones_like(x), x) for x in xs]


@pytest.mark.full(but=8)
@pytest.mark.parametrize("hook", SENT_BY, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_exact_mean_on_every_rank(way: str, hook: Any, ranks: Ranks, seed: int) -> None:
    strategy = ltx.ZeroStrategy(comm_hook=hook)
    xs = torch.randn(2, 2, 5)  # by rank, step and element
    wanted = list(xs.mean(0))
    together = ltx.vmap(lambda x: torch.stack(means(way, strategy, x)))(xs)
    real = ranks(2).run(lambda: means(way, strategy, xs[int(ltx.axis_index())]))
    for found in (*real, *map(list, together)):
        for x, mean in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, mean, rtol=0, atol=0)


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
    return train(train.init(torch.zeros(3)), x)[0].params


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
            text = raised_by(stepped, strategy, torch.ones(3), WEIGHTS[ltx.world().rank])
            if ltx.axis_size() > 1:
                ltx.init()
            if not text.startswith("StrategyError: ") or needs not in text:
                passed.append(f"{strategy!r}: {text}")
        return passed

    needs = "an ltx.Weighted needs gradients that ranks average by weight"
    assert run() == []
    assert list(ranks(2).run(run)) == [[], []]
    for strategy in REFUSED[:8]:  # the next has no clock there
        simulated = ltx.vmap(lambda x, weight, s=strategy: stepped(s, x, weight))
        refuses(StrategyError, needs, simulated, torch.ones(2, 3), WEIGHTS)


def or_zero(w: Tensor, x: Tensor) -> Tensor | ltx.Weighted:
    """As written for a batch that may be empty."""
    return ltx.Weighted((w * x).sum(), len(x)) if len(x) else 0 * w.sum()


@pytest.mark.parametrize(
    ("strategy", "overlap"),
    [(ltx.DDPStrategy(), "backward"), (ltx.DDPStrategy(), "update"), (ltx.ZeroStrategy(), "backward")],
    ids=str,
)
@on_ranks(2)
def test_a_weight_on_some_ranks_alone_is_refused(strategy: ltx.Strategy, overlap: Any) -> None:
    """One rank divided by the weights and the other didn't, so parameters drifted apart."""
    sgd, rank = ltx.optim.from_torch(torch.optim.SGD, lr=0.1), int(ltx.axis_index())
    train = ltx.train_step(ltx.data_parallel(or_zero, strategy), sgd, overlap=overlap, donate=overlap == "backward")
    state, _ = train(train.init(torch.ones(1)), torch.ones(2, 1))
    with pytest.raises(RankMismatchError, match=r"what the step returns: rank 0: ltx.Weighted; rank 1: a loss without"):
        train(state, torch.ones(0 if rank else 2, 1))
    torch.testing.assert_close(state.params, torch.tensor([0.9]))
    ltx.init()
    state, _ = train(state, torch.ones(2, 1))
    torch.testing.assert_close(state.params, torch.tensor([0.8]))


STEPS, LR = 12, 0.01
ADAM = ltx.optim.from_torch(torch.optim.Adam, lr=LR)
QADAM = ltx.optim.qadam(lr=LR, warmup_steps=4)

#: (strategy, optimizer) of each case: every hook under Adam, which makes a step of any gradient; every strategy.
CASES: dict[str, tuple[Any, Any]] = {
    **{f"hook {name}": (ltx.DDPStrategy(comm_hook=hook), ADAM) for name, hook in HOOKS.items()},
    **{
        f"strategy {name}": (row.strategy, ADAM)
        for name, row in ROWS.items()
        if 2 in row.ranks and not isinstance(row.optimizer, type(QADAM))
    },
    "qadam": (QAdam(warmup_steps=4), QADAM),
    "qadam in small buckets": (
        QAdam(warmup_steps=4, betas=(0.9, 0.999), bucket_bytes=64, first_bucket_bytes=64),
        QADAM,
    ),
}

#: How far parameters without gradient go in these steps at most, of the way that steps of lr make.
MOVES = {
    # A size for each block of signs, and 0 has a sign: what all ranks send for it goes one way, unless it is fed back.
    "hook onebit": 1.0,
    "hook onebit after 1": 1.0,
    # The bucket is one matrix, of which two directions are kept: they run through all of its parameters.
    "hook batched powersgd": 1.0,
}


def moved(cases: dict[str, tuple[Any, Any]], seed: int) -> dict[str, tuple[float, float]]:
    """How far the parameters without gradient have gone, and those with one; greatest distances."""
    rank, found = int(ltx.axis_index()), {}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        seen = torch.nn.functional.embedding(rows, params["table"])
        return ((seen * params["w"]).sum(-1) - x).square().mean() + 0.0 * params["idle"].sum()

    for name, (strategy, optimizer) in cases.items():
        draw = torch.Generator().manual_seed(seed)
        # Rows of an embedding that nobody looks up lie between those that are; a whole parameter has no gradient.
        start = {
            "w": torch.randn(8, generator=draw),
            "table": torch.randn(20, 8, generator=draw),
            "idle": torch.randn(33, generator=draw),
        }
        begun = {key: x.clone() for key, x in start.items()}
        train = ltx.train_step(ltx.data_parallel(loss, strategy), optimizer)
        state = train.init(start)
        draw = torch.Generator().manual_seed(seed + 1 + rank)
        for _ in range(STEPS):
            x, rows = torch.randn(16, generator=draw), 2 * torch.randint(10, (16,), generator=draw)
            state = train(state, x, rows)[0]
        params = train.finish(state).params
        idle = max(
            float((params["table"] - begun["table"])[1::2].abs().max()),
            float((params["idle"] - begun["idle"]).abs().max()),
        )
        found[name] = idle, float((params["table"] - begun["table"])[::2].abs().max())
    return found


@pytest.fixture(scope="module")
def distances(request: pytest.FixtureRequest, ranks: Ranks) -> list[dict[str, tuple[float, float]]]:
    """Of the cases that are to be looked at."""
    items: list[Any] = request.session.items
    names = [each.callspec.params["name"] for each in items if each.name.startswith("test_what_has_no_gradient_stays")]
    return list(ranks(2).run(moved, {name: CASES[name] for name in names}, 7))


@pytest.mark.full(but=5)
@pytest.mark.parametrize("name", CASES)
def test_what_has_no_gradient_stays(name: str, distances: list[dict[str, tuple[float, float]]]) -> None:
    print(name, [of_rank[name] for of_rank in distances])
    for idle, used in (of_rank[name] for of_rank in distances):
        assert used > LR
        assert idle <= MOVES.get(name, 0.0) * STEPS * LR, (idle, used)
