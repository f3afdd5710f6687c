"""The cases of Bagua's tests that no table has: its eight-bit codes, frozen rows, several models, ends of training.

After tests/torch_api (test_async_model_average, test_multi_models, test_process_group) and its compressor.py. What its
algorithms do to parameters are rows of tests/contract/strategies/table.py, its communicator's calls of
tests/contract/conformance.

Left out, as ltx has no way to say it:

* ``reduce``, ``gather`` and ``scatter`` with one root: collectives give every rank its result.
* ``send`` and ``recv`` by themselves: a ``ppermute`` is both ends of it.
* aborting a communicator while another thread waits: tests/internal/comm has the deadlines and interrupts.
* ``switch_to`` another algorithm in mid-training: a strategy belongs to its step; make another step.
* the load-balancing sampler, the cached dataset and stores, mixture of experts, the autotune service: not in ltx.
* the fused optimizer against the plain one: ltx fuses by itself (tests/contract/optim).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ltx
from ltx.hooks import ByteGrad
from tests.contract.peers.cases import (
    Case,
    Cases,
    Ranks,
    Refusal,
    check,
    failures,
    failures_simulated,
    on_all,
    on_rank,
    worlds_of,
)

Params = dict[str, Tensor]
STEPS = 8

# --- the net ----------------------------------------------------------------------------------------------------------


def forward(params: Params, x: Tensor) -> Tensor:
    """Bagua's test net, 2 to 10 to 50 to 4."""
    return functional.linear(
        functional.relu(functional.linear(functional.relu(functional.linear(x, params["fc1"])), params["fc2"])),
        params["fc3"],
    )


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(forward(params, x), y)


def slope(params: Params, x: Tensor, y: Tensor) -> Params:
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves, x, y), list(leaves.values())), strict=True))


def runs(n: int) -> list[dict[str, Any]]:
    """Each rank's own start and data. Training must begin with rank 0's start."""
    shapes = {"fc1": (10, 2), "fc2": (50, 10), "fc3": (4, 50)}
    return [
        {
            "start": {name: torch.randn(s, dtype=torch.float64) * s[1] ** -0.5 for name, s in shapes.items()},
            "x": torch.randn(STEPS, 4, 2, dtype=torch.float64),
            "y": torch.randn(STEPS, 4, 4, dtype=torch.float64),
        }
        for _ in range(n)
    ]


def lowered(params: Params, gradient: Params, lr: float = 0.1) -> Params:
    return {name: p - lr * gradient[name] for name, p in params.items()}


def mean(trees: list[Params]) -> Params:
    return {name: torch.stack([tree[name] for tree in trees]).mean(0) for name in trees[0]}


def slopes(xs: list[Params], given: list[dict[str, Any]], step: int) -> list[Params]:
    return [slope(x, of_rank["x"][step], of_rank["y"][step]) for x, of_rank in zip(xs, given, strict=True)]


# --- references -------------------------------------------------------------------------------------------------------


class MinMaxUInt8:
    """Bagua's compressor: codes of multiples of 1 / s, so that 0 has one; kept between 0 and 255."""

    def __init__(self, x: Tensor):
        self.scale = 255.0 / (x.max() - x.min() + 1e-7)
        self.upper = torch.round(x.max() * self.scale)
        self.lower = self.upper - 255.0
        self.codes = (torch.minimum(torch.round(x * self.scale), self.upper) - self.lower).clamp(0, 255)

    @property
    def decoded(self) -> Tensor:
        return (self.codes + self.lower) / self.scale


def eight_bits(x: Tensor) -> Tensor:
    return MinMaxUInt8(x).decoded


def together(reduced: Callable[[list[Params]], Params]) -> Callable[[list[Any]], list[Any]]:
    """All ranks have the same parameters, and step along what is made of their gradients."""

    def want(given: list[Any]) -> list[Any]:
        x = given[0]["start"]
        for step in range(STEPS):
            x = lowered(x, reduced(slopes([x] * len(given), given, step)))
        return on_all(x, len(given))

    return want


def total(trees: list[Params]) -> Params:
    return {name: sum(tree[name] for tree in trees) for name in trees[0]}


def case(call: Any, want: Any, **options: Any) -> Case:
    return Case(call, want, runs, **{"tolerance": 1e-8, "worlds": (2, 3), "simulated": (2,), **options})


TRAINING: dict[str, Case | Refusal] = {}

# --- asynchronous averaging, several models, process groups -----------------------------------------------------------


def gradient_is_x(params: Params, x: Tensor) -> Tensor:
    return x @ params["w"]


def asynchronous(given: dict[str, Any]) -> Tensor:
    """Ranks take different numbers of steps, and finish."""
    strategy = ltx.BaguaStrategy("async", sync_interval_ms=0.0, warmup_steps=2)
    train = ltx.train_step(ltx.data_parallel(gradient_is_x, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    state = train.init({"w": given["w"]})
    for x in given["x"]:
        state = train(state, x)[0]
    return train.finish(state).params["w"].clone()


def nothing_is_lost(given: list[dict[str, Any]]) -> list[Any]:
    """Averaging moves what ranks have learned about, and all of it is there in the end, in the mean."""
    steps = sum(of_rank["x"].sum(0) for of_rank in given)
    return on_all(given[0]["w"] - 0.1 * steps / len(given), len(given))


def of_different_lengths(n: int) -> list[dict[str, Any]]:
    return [
        {"w": torch.randn(6, dtype=torch.float64), "x": torch.randn(4 + 3 * r, 6, dtype=torch.float64)}
        for r in range(n)
    ]


def two_models(given: dict[str, Any]) -> Any:
    """Steps of two models in turns: a mean, and a sum."""
    sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
    trains = [
        ltx.train_step(ltx.data_parallel(loss, ltx.BaguaStrategy("gradient_allreduce", average=average)), sgd)
        for average in (True, False)
    ]
    states = [train.init(given["start"]) for train in trains]
    for x, y in zip(given["x"], given["y"], strict=True):
        states = [train(state, x, y)[0] for train, state in zip(trains, states, strict=True)]
    return [{name: p.clone() for name, p in state.params.items()} for state in states]


def frozen_row(algorithm: str, optimizer: Any, **fields: Any) -> Any:
    """Rows of a table that no rank looks up, after training: they mustn't have moved."""

    def call(given: dict[str, Any]) -> Tensor:
        def table_loss(params: Params, x: Tensor, rows: Tensor) -> Tensor:
            return (params["table"][rows] * x).sum()

        train = ltx.train_step(ltx.data_parallel(table_loss, ltx.BaguaStrategy(algorithm, **fields)), optimizer)
        state = train.init({"table": given["table"]})
        for x in given["x"]:
            state = train(state, x, torch.tensor([0, 2, 4]))[0]
        return train.finish(state).params["table"][1::2].clone()

    return call


def tables(n: int) -> list[dict[str, Any]]:
    return [{"table": torch.randn(6, 5), "x": torch.randn(12, 3, 5) + 0.3} for _ in range(n)]


def rows_of_rank_0(given: list[dict[str, Any]]) -> list[Any]:
    return on_all(given[0]["table"][1::2], len(given))


ADAM = ltx.optim.from_torch(torch.optim.Adam, lr=0.01)
for name, call in {
    "bytegrad": frozen_row("bytegrad", ADAM),
    "low_precision_decentralized": frozen_row("low_precision_decentralized", ADAM),
    "qadam": frozen_row("qadam", ltx.optim.qadam(lr=0.01, warmup_steps=4), warmup_steps=4),
}.items():
    TRAINING[f"{name}: rows without gradient stay to the last bit"] = Case(
        call, rows_of_rank_0, tables, worlds=(2,), simulated=(), tolerance=0
    )
TRAINING |= {
    "async: nothing is lost": Case(asynchronous, nothing_is_lost, of_different_lengths, worlds=(2, 3), simulated=()),
    "two models in turns": case(
        two_models,
        lambda given: [list(pair) for pair in zip(together(mean)(given), together(total)(given), strict=True)],
        simulated=(),
    ),
}

TABLES: dict[str, Cases] = {"training": TRAINING}


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("table", "n"), worlds_of(TABLES))
def test_on_ranks(table: str, n: int, ranks: Ranks, seed: int) -> None:
    cases = TABLES[table]
    check(failures(cases, lambda xs, bars: on_rank(cases, xs, bars), ranks, n))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("table", TABLES)
def test_on_simulated_ranks(table: str, seed: int) -> None:
    check(failures_simulated(TABLES[table]))


# --- eight bits -------------------------------------------------------------------------------------------------------


def sent(x: Tensor) -> tuple[Tensor, Tensor]:
    """ltx's codes of one chunk, counted from 0 as Bagua's are, and what they are decoded to."""
    message = ByteGrad().encode(x[None].clone(), None)
    codes = message[0, -x.numel() :].view(torch.int8).long() + 128
    return codes, ByteGrad().decode(message, x.numel(), x.dtype)[0]


def test_codes_of_five_numbers() -> None:
    codes, decoded = sent(torch.tensor([-1.0, -0.5, 0.0, 0.25, 1.0]))
    assert codes.tolist() == [0, 63, 127, 159, 255]
    torch.testing.assert_close(decoded, torch.tensor([-0.99607843, -0.50196081, 0.0, 0.25098041, 1.00392163]))
    assert decoded[2] == 0


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(1000),
        lambda: torch.randn(1000) * 1e3,
        lambda: torch.rand(1000) - 1e-3,
        lambda: torch.where(torch.rand(1000) < 0.5, 0.0, torch.randn(1000)),
        lambda: torch.cat([torch.zeros(10), torch.rand(90)]),
        lambda: torch.cat([torch.zeros(10), -torch.rand(90)]),
        lambda: torch.randn(1000).exp() - 0.05,
        lambda: torch.tensor([-1e-3, 0.0, 1e3]),
    ],
    ids=["normal", "large", "nearly all positive", "half zeros", "from 0 up", "up to 0", "skewed", "lopsided"],
)
def test_codes_are_baguas_where_0_is_in_the_range(draw: Callable[[], Tensor], seed: int) -> None:
    """In float64, where two ways to write a formula don't round to different codes; and 0 stays 0."""
    x = draw().double()
    x[0] = 0.0
    theirs, (codes, decoded) = MinMaxUInt8(x), sent(x)
    assert torch.equal(codes, theirs.codes.long())
    torch.testing.assert_close(decoded, theirs.decoded, rtol=1e-12, atol=0)
    assert not decoded[x == 0].any()
    assert float((decoded - x).abs().max()) <= 1.001 / float(theirs.scale)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_error_of_codes(dtype: torch.dtype, seed: int) -> None:
    """At most one step, whatever the dtype, of the range's 255; nothing wraps around."""
    for scale, shift in [(1.0, 0.0), (1e-2, 0.0), (1.0, 3.0), (1e-1, -5.0)]:
        x = (torch.randn(500) * scale + shift).to(dtype)
        decoded = sent(x)[1]
        step = (x.double().max() - x.double().min()) / 255
        rounding = torch.finfo(dtype).eps * 2 * x.double().abs().max()
        assert (decoded.double() - x.double()).abs().max() <= step + 4 * rounding, (scale, shift)
