"""Local gradients: what a blocked step gives, that reducing it gives the plain step's, and the reduction by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad

import ltx
from ltx.errors import StepError, TreeError
from tests.kinds import Ranks
from tests.train_on import said
from tests.twins.cases import (
    CASES,
    WAYS,
    Params,
    assert_close,
    assert_same_bits,
    gradient,
    params_of,
    plain_step,
    seeded,
)

STRATEGIES = {
    "default": None,
    "small buckets": ltx.DDPStrategy(bucket_bytes=128, first_bucket_bytes=16),
    "bf16": ltx.DDPStrategy(comm_hook="bf16"),
}


def on_a_rank(name: str, way: str, strategy: ltx.Strategy | None, seed: int) -> Any:
    """(local gradients, those reduced, the plain step's, how many issues the local ones took)"""
    module, batches = CASES[name].build(seed, 2)
    rank = ltx.world().rank
    step = ltx.data_parallel(plain_step(module), strategy)

    def differentiate(step: Any) -> Params:
        with seeded(rank):
            return WAYS[way](step, params_of(module), *batches[rank])

    with ltx.profile.record() as trace:
        local = differentiate(ltx.block_backward_sync(step))
    reduced, _ = ltx.sync_gradients(local, strategy)
    return local, reduced, differentiate(step), len(trace.events)


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_blocked_then_synchronised_is_the_plain_step(way: str, strategy: str, ranks: Ranks, seed: int) -> None:
    results = ranks(2).run(on_a_rank, "mlp", way, STRATEGIES[strategy], seed)
    module, batches = CASES["mlp"].build(seed, 2)
    for (local, reduced, plain, issues), batch in zip(results, batches, strict=True):
        assert_close(local, gradient(module, module(*batch)))
        assert_same_bits(reduced, plain, results[0][1])
        assert issues == 0


@pytest.mark.parametrize("name", ["unused and rank-dependent", "mixed dtypes, 0-dim, empty", "dropout", "empty batch"])
def test_other_models(name: str, ranks: Ranks, seed: int) -> None:
    for _, reduced, plain, issues in ranks(2).run(on_a_rank, name, "torch.func.grad", None, seed):
        assert_same_bits(reduced, plain)
        assert issues == 0


def test_is_a_context_manager_that_yields_itself_and_leaves_the_step_as_it_was() -> None:
    step = ltx.data_parallel(lambda w, x: (w * x).sum())
    blocked = ltx.block_backward_sync(step)
    x = torch.tensor([[1.0], [3.0]])

    def gradients(f: Any) -> list[float]:
        return ltx.vmap(grad(f), in_dims=(None, 0))(torch.tensor(1.0), x).tolist()

    with blocked as local:
        assert local is blocked
        assert gradients(local) == [1.0, 3.0]
        assert gradients(step) == [2.0, 2.0]  # only what is called through it
    assert gradients(local) == [1.0, 3.0]
    assert ltx.block_backward_sync(step) == blocked != step
    with pytest.raises(ZeroDivisionError), blocked:
        raise ZeroDivisionError


def test_a_weighted_step_gives_its_local_mean() -> None:
    step = ltx.data_parallel(lambda w, x: ltx.Weighted((w * x).sum(), 2))
    blocked = ltx.vmap(ltx.grad_and_value(ltx.block_backward_sync(step)), in_dims=(None, 0))
    grads, losses = blocked(torch.tensor(2.0), torch.tensor([[1.0, 2.0], [4.0, 5.0]]))
    assert (grads.tolist(), losses.tolist()) == ([1.5, 4.5], [3.0, 9.0])


@pytest.mark.parametrize("way", WAYS)
def test_accumulate_and_block_commute(way: str, seed: int) -> None:
    module, (batch,) = CASES["mlp"].build(seed, 1)
    step = ltx.data_parallel(plain_step(module))
    first = ltx.block_backward_sync(ltx.accumulate(step, 2))
    second = ltx.accumulate(ltx.block_backward_sync(step), 2)
    expected = gradient(module, module(*batch))
    for blocked in (first, second):
        assert blocked.blocked
        assert_close(WAYS[way](blocked, params_of(module), *batch), expected)


def test_error() -> None:
    assert said(StepError, ltx.block_backward_sync, lambda p: p) == (
        "block_backward_sync takes a step made by ltx.data_parallel, got function. A step that isn't data parallel has "
        "local gradients already."
    )


def test_the_communication_state_passes_through_unchanged(ranks: Ranks, seed: int) -> None:
    """Its count of steps too, which schedules read: of three calls here the last alone synchronises."""
    x = torch.randn(2, 3, 4)
    step = ltx.data_parallel(
        lambda w, x: (w * x).sum(), ltx.DDPStrategy(comm_hook=ltx.hooks.PowerSGD(rank=1, start_step=1))
    )

    def run(x: Tensor) -> tuple[list[int], Tensor]:
        w = torch.ones(3, 4)
        state, counted = step.init(w), []
        for each in (ltx.block_backward_sync(step), ltx.block_backward_sync(step), step):
            (grads, state), _ = ltx.grad_and_value(each)(w, x, sync_state=state)
            counted.append(state.checked_step())
        return counted, grads

    simulated: list[list[int]] = []
    grads = ltx.vmap(lambda x: (simulated.append(run(x)[0]), run(x)[1])[1])(x)
    assert simulated == [[0, 0, 1]]
    torch.testing.assert_close(grads, x.mean(0).expand(2, 3, 4))  # exact, before the hook's first compressed step
    for counted, found in ranks(2).run(lambda: run(x[ltx.world().rank])):
        assert counted == [0, 0, 1]
        torch.testing.assert_close(found, x.mean(0))
    assert run(x[0])[0] == [0, 0, 1]


def test_trees_with_other_leaves_and_their_derivative() -> None:
    def reduce(x: Tensor) -> Any:
        return ltx.sync_gradients({"g": [x, (2 * x).double()], "n": x.long(), "none": None})[0]

    out = ltx.vmap(reduce)(torch.tensor([[1.0], [4.0]]))
    assert out["g"][0].tolist() == [[2.5], [2.5]]
    assert (out["g"][1].tolist(), out["g"][1].dtype) == ([[5.0], [5.0]], torch.float64)
    assert (out["n"].tolist(), out["none"]) == ([[1], [4]], None)
    scale = torch.tensor([1.0, 5.0])
    square = ltx.vmap(grad(lambda x, s: s * reduce(x)["g"][0].sum()))
    assert square(torch.tensor([[1.0], [4.0]]), scale).tolist() == [[3.0], [3.0]]  # the mean of the cotangents


def test_what_is_given_is_left_alone(ranks: Ranks) -> None:
    def on_rank() -> tuple[Tensor, Tensor]:
        given = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(2)}
        reduced, state = ltx.sync_gradients(given)
        assert state is None
        assert given["a"].tolist() == [[0, 3], [1, 4], [2, 5]]
        reduced["b"].zero_()
        return given["b"], reduced["a"]

    b, a = ranks(2).run(on_rank).replicated()
    assert (b.tolist(), a.tolist()) == ([1, 1], [[0, 3], [1, 4], [2, 5]])


def test_what_is_no_tree_of_tensors() -> None:
    assert (
        said(TreeError, ltx.sync_gradients, {"a": [torch.ones(1), 2.0]})
        == "grads must be a tree of tensors, but leaf 'a.1' is of type float."
    )


def test_in_inference_mode(ranks: Ranks) -> None:
    def on_rank() -> list[float]:
        with torch.inference_mode():
            mean, _ = ltx.sync_gradients(torch.ones(2) * (1 + ltx.axis_index()))
        return mean.tolist()

    assert ranks(2).run(on_rank).replicated() == [1.5, 1.5]
