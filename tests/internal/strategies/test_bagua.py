"""BaguaStrategy as a value, its bad fields, and what its gradient algorithms send."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import AxisError, StrategyError
from tests.kinds import Ranks


def test_all_that_a_strategy_does_is_the_algorithms() -> None:
    """Whatever is added to the contract must be passed on."""
    # What the algorithm does by itself, and what it is given.
    own = {"exchange", "negotiate", "sizes", "grouping"}
    contract = {name for name, value in vars(ltx.Strategy).items() if callable(value) or isinstance(value, property)}
    assert {name for name in contract if not name.startswith("_")} - own <= set(vars(ltx.BaguaStrategy))


def test_replace_changes_the_algorithm_too() -> None:
    strategy = dataclasses.replace(ltx.BaguaStrategy("decentralized"), communication_interval=3)
    assert strategy.communicates_besides
    assert strategy.inner.communication_interval == 3
    assert dataclasses.replace(strategy, algorithm="low_precision_decentralized").communicates_after_update(3)
    with pytest.raises(StrategyError, match="has no field 'communication_interval'"):
        dataclasses.replace(strategy, algorithm="bytegrad")


@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized"]
)
def test_nodes_must_divide_the_ranks(algorithm: str) -> None:
    strategy = ltx.BaguaStrategy(algorithm, hierarchical=True, node_size=2)
    train = ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    text = r"node_size must divide the number of ranks: axis 'data' has 3, which aren't nodes of 2\."
    with pytest.raises(StrategyError, match=text):
        ltx.vmap(lambda x: train(train.init({"w": torch.ones(3)}), x))(torch.ones(3, 3))
    if algorithm == "gradient_allreduce":  # nor without a train step
        with pytest.raises(AxisError, match="which don't divide into nodes of 2"):
            ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(torch.ones(3, 2))


# --- gradients --------------------------------------------------------------------------------------------------------


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["w"] * x).sum()


@pytest.mark.parametrize("fields", [{}, {"hierarchical": True, "node_size": 2}], ids=str)
def test_sums_and_means_without_a_train_step(fields: dict[str, Any], seed: int) -> None:
    """Also of a bucket that doesn't divide into parts, of empty ones and of half precision."""
    params = {"w": torch.randn(7), "none": torch.randn(0), "half": torch.randn((), dtype=torch.float16)}
    x = torch.randn(4, 7)

    def step(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (params["w"] * x).sum() + params["none"].sum() + params["half"].float() * x[0]

    for average, whole in ((True, x.mean(0)), (False, x.sum(0))):
        for algorithm, off in (("gradient_allreduce", 1e-6), ("bytegrad", 0.2)):
            strategy = ltx.BaguaStrategy(algorithm, average=average, **fields)
            grads = ltx.vmap(torch.func.grad(ltx.data_parallel(step, strategy)), in_dims=(None, 0))(params, x)
            torch.testing.assert_close(grads["w"], whole.expand(4, 7), rtol=off, atol=off)
            half = whole[0].to(torch.float16).expand(4)
            torch.testing.assert_close(grads["half"], half, rtol=max(off, 2e-3), atol=max(off, 2e-3))


def recorded(strategy: ltx.BaguaStrategy) -> list[tuple[str, int]]:
    """What is issued for gradients."""
    train = ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    state, _ = train(train.init({"w": torch.ones(1000)}), torch.ones(1000))
    with ltx.profile.record() as trace:
        train(state, torch.ones(1000))
    return [(e.operation, e.nbytes) for e in trace.buckets]


@pytest.mark.full
def test_a_node_sends_as_much_to_others_as_one_rank_would(ranks: Ranks) -> None:
    """Of float32: a rank gets half of its node's sum, shares it with the other node, gives its node the result."""
    nodes = {"hierarchical": True, "node_size": 2}
    for algorithm, among in (
        ("gradient_allreduce", [("psum", 2000)]),
        # A grid of two numbers and a byte for each of 250, to the other node; and the same back.
        ("bytegrad", [("all_to_all", 258), ("all_gather", 258)]),
    ):
        for issued in ranks(4).run(recorded, ltx.BaguaStrategy(algorithm, **nodes)):
            assert issued == [("psum_scatter", 2000), *among, ("all_gather", 2000)]
