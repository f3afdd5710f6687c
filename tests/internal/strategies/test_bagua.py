"""BaguaStrategy as a value, what its gradient algorithms send, and what strategies are made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import AxisError, StrategyError
from ltx.optim import partition
from ltx.strategies import decentralized
from ltx.strategies.diloco import cut
from ltx.strategies.horovod import with_scaled_lr
from tests.contract.strategies.test_horovod import SGD, trainer
from tests.train_on import refuses


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
    refuses(StrategyError, "has no field 'communication_interval'", dataclasses.replace, strategy, algorithm="bytegrad")


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized"])
def test_nodes_must_divide_the_ranks(name: str) -> None:
    strategy = ltx.BaguaStrategy(name, hierarchical=True, node_size=2)
    train = ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
    text = r"node_size must divide the number of ranks: axis 'data' has 3, which aren't nodes of 2\."
    refuses(StrategyError, text, ltx.vmap(lambda x: train(train.init({"w": torch.ones(3)}), x)), torch.ones(3, 3))
    if name == "gradient_allreduce":  # nor without a train step
        with pytest.raises(AxisError, match="which don't divide into nodes of 2"):
            ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(torch.ones(3, 2))


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


# What strategies are made of: cuts, scaled rates, sums of differences.
@pytest.mark.parametrize("_", range(20))
def test_cuts_are_balanced(_: int, seed: int) -> None:
    sizes = torch.randint(0, 100, (int(torch.randint(1, 30, ())),)).tolist()
    for parts in range(1, len(sizes) + 1):
        runs = cut(sizes, parts)
        assert ([i for run in runs for i in run], len(runs)) == (list(range(len(sizes))), parts)
        assert all(len(run) for run in runs)
        assert max(sum(sizes[i] for i in run) for run in runs) <= sum(sizes) / parts + max(sizes)


def test_scaled_learning_rates() -> None:
    adam = ltx.optim.from_torch(torch.optim.Adam, weight_decay=0.1)
    assert with_scaled_lr(adam, 4) == ltx.optim.from_torch(torch.optim.Adam, lr=0.004, weight_decay=0.1)
    clip, doubled = ltx.optim.clip_by_global_norm(1.0), ltx.optim.from_torch(torch.optim.SGD, lr=0.2)
    assert with_scaled_lr(ltx.optim.chain(clip, SGD), 2) == ltx.optim.chain(clip, doubled)
    groups = {"*bias": "0", "*": "1"}
    assert with_scaled_lr(partition({"0": SGD, "1": adam}, groups), 2) == partition(
        {"0": doubled, "1": with_scaled_lr(adam, 2)}, groups
    )
    assert with_scaled_lr(ltx.optim.from_torch(torch.optim.SGD, lr=lambda count: 1.0 + count), 3).lr(1) == 6.0
    own = ltx.optim.from_functions(lambda params: (), lambda grads, state, params: (grads, state))
    refuses(StrategyError, "multiplies the learning rate of", trainer, own, scale_lr=True)
    kept = ltx.optim.from_torch(torch.optim.SGD, lr=ltx.optim.adjustable(0.1))
    refuses(StrategyError, "Scale its rate yourself", trainer, kept, scale_lr=True)


@pytest.mark.parametrize("rows", [1, 3])
def test_differences_are_added_leaf_by_leaf(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ltx.core.gradients.buffers.CHUNK", 8)
    sizes = [1, 0, 30, 4, 7]
    width = -(-sum(sizes) // rows)
    messages = decentralized._CODEC.encode(torch.randn(rows, width), None)
    leaves = [torch.randn(size) for size in sizes]
    whole = torch.cat(leaves) + decentralized._CODEC.decode(messages, width, torch.float32).reshape(-1)[: sum(sizes)]
    params = [torch.zeros_like(leaf) for leaf in leaves]
    decentralized._move({"own": messages}, [{"own": leaf} for leaf in leaves], params)
    for moved in (leaves, params):
        torch.testing.assert_close(torch.cat(moved), whole, rtol=0, atol=0)
