"""Gradients of data-parallel steps against torch's DDP and against one process with the whole batch."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from tests.kinds import Ranks
from tests.train_on import on_ranks
from tests.twins import cases
from tests.twins.cases import (
    CASES,
    FUNC_WAYS,
    WAYS,
    Case,
    Params,
    assert_close,
    assert_same_bits,
    params_of,
    plain_step,
    seeded,
)

TABLE = [(name, way) for name, case in CASES.items() for way in WAYS if case.transforms or way not in FUNC_WAYS]
# A bucket for each parameter or two.
SMALL_BUCKETS = ltx.DDPStrategy(bucket_bytes=128, first_bucket_bytes=16)


def on_a_rank(case: Case, way: str, seed: int) -> tuple[Params, Params | None]:
    """(gradients of ltx, of DDP)"""
    module, batches = case.build(seed, ltx.world().size)
    rank = ltx.world().rank
    with seeded(rank):
        mine = WAYS[way](ltx.data_parallel(plain_step(module), SMALL_BUCKETS), params_of(module), *batches[rank])
    return mine, cases.ddp_gradient(case, seed) if case.ddp is not None else None


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "way"), TABLE)
def test_equal_to_ddp_and_to_one_process(name: str, way: str, ranks: Ranks, seed: int) -> None:
    case = CASES[name]
    mine, ddp = ranks(2).run(on_a_rank, case, way, seed).replicated()  # the same bits on every rank
    module, batches = case.build(seed, 2)
    assert_close(mine, cases.gradient(module, case.loss(module, batches)))
    if ddp is not None:
        assert_close(mine, ddp)


@pytest.mark.full(but=2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("way", FUNC_WAYS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.transforms])
def test_simulated_ranks_equal_one_process(name: str, way: str, seed: int) -> None:
    case = CASES[name]
    module, batches = case.build(seed, 3, equal=True)
    stacked = [torch.stack(parts) for parts in zip(*batches, strict=True)]
    step, params = ltx.data_parallel(plain_step(module), SMALL_BUCKETS), params_of(module)

    def on_all_ranks(vmap: Any, step: Any) -> Params:
        with seeded(seed):
            return vmap(
                lambda *batch: FUNC_WAYS[way](step, params, *batch), randomness="different", in_dims=(0,) * len(stacked)
            )(*stacked)

    if case.random:  # vmap draws for all ranks at once
        expected = {name: g.mean(0) for name, g in on_all_ranks(torch.vmap, plain_step(module)).items()}
    else:
        expected = cases.gradient(module, case.loss(module, batches))
    for rank in range(3):
        assert_close({name: g[rank] for name, g in on_all_ranks(ltx.vmap, step).items()}, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "way"), TABLE)
def test_world_of_one_is_the_bare_step(name: str, way: str, seed: int) -> None:
    module, (batch,) = CASES[name].build(seed, 1)
    results = []
    for step in (plain_step(module), ltx.data_parallel(plain_step(module))):
        with seeded(seed):
            results.append(WAYS[way](step, params_of(module), *batch))
    assert_same_bits(*results)


def scaled(params: Params, x: Tensor) -> Tensor:
    return (params["a"] * x).sum() + 2 * (params["b"] * x).sum()


def on_two(step: Any, *args: Any) -> Any:
    """`step` on two simulated ranks whose batches are [1, 2] and [3, 5]."""
    return ltx.vmap(lambda x: step(*args, x))(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))


AB = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([0.5, 1.0])}
MEAN = torch.tensor([2.0, 3.5])


@pytest.mark.parametrize(
    "wrap",
    [
        ltx.data_parallel,
        ltx.data_parallel(),
        ltx.data_parallel(strategy=ltx.DDPStrategy()),
        lambda f: ltx.data_parallel(f, ltx.DDPStrategy()),
        lambda f: ltx.data_parallel(f, ltx.DDPStrategy(), argnums=0, axis="data", outputs="local", returns="value"),
    ],
)
def test_ways_to_wrap(wrap: Any) -> None:
    step = wrap(scaled)
    assert step.__name__ == "scaled"
    assert step.__wrapped__ is scaled
    assert on_two(torch.func.grad(step), AB)["b"].tolist() == [[4.0, 7.0]] * 2
    assert step(AB, torch.ones(2)) == scaled(AB, torch.ones(2))


def test_gradients_with_respect_to_the_batch_are_the_ranks_own() -> None:
    assert on_two(torch.func.grad(ltx.data_parallel(scaled), argnums=1), AB).tolist() == [[2.0, 3.0]] * 2
    both = on_two(torch.func.grad(ltx.data_parallel(lambda w, x: (w * x.square()).sum()), argnums=(0, 1)), MEAN)
    assert both[0].tolist() == [[5.0, 14.5]] * 2
    assert both[1].tolist() == [[4.0, 14.0], [12.0, 35.0]]


@pytest.mark.parametrize("argnums", [(0, 1), (1, 0), (0, -2), (-3, 1)])
def test_several_arguments_of_parameters(argnums: tuple[int, int]) -> None:
    step = ltx.data_parallel(lambda a, b, x: scaled({"a": a, "b": b}, x), argnums=argnums)
    a, b = on_two(torch.func.grad(step, argnums=(0, 1)), AB["a"], AB["b"])
    assert (a.tolist(), b.tolist()) == ([MEAN.tolist()] * 2, [(2 * MEAN).tolist()] * 2)


def test_argnums_counts_from_either_end_and_keywords_pass_through() -> None:
    step = ltx.data_parallel(lambda x, p, scale: scale * scaled(p, x), argnums=-1)
    grads = ltx.vmap(lambda x: torch.func.grad(step, argnums=1)(x, AB, scale=3.0))(torch.stack([MEAN, MEAN]))
    assert grads["a"].tolist() == [(3 * MEAN).tolist()] * 2


def test_frozen_parameters_and_integers_are_left_alone() -> None:
    step = ltx.data_parallel(lambda p, x: (p["w"] * p["frozen"] * x).sum() * p["count"])
    params = {"w": torch.ones(2, requires_grad=True), "frozen": MEAN, "count": torch.tensor(3)}
    with ltx.profile.record() as trace:
        step(params, torch.ones(2)).backward()
    assert params["w"].grad.tolist() == [6.0, 10.5]
    assert params["frozen"].grad is None
    assert not trace.events


@on_ranks(2)
def test_no_gradient_no_reduction() -> None:
    with ltx.profile.record() as trace:
        assert ltx.data_parallel(scaled)(AB, MEAN) == scaled(AB, MEAN)
    assert not trace.events


def reduced(returned: Callable[[Params, Tensor], Any]) -> Any:
    return on_two(ltx.data_parallel(returned, returns="grads"), AB)


def test_steps_that_return_gradients() -> None:
    grads = torch.func.grad(scaled)
    assert reduced(grads)["a"].tolist() == [MEAN.tolist()] * 2
    first, value = reduced(torch.func.grad_and_value(scaled))
    assert first["b"].tolist() == [(2 * MEAN).tolist()] * 2
    assert value.tolist() == [8.0, 21.0]
    _, mean = on_two(ltx.data_parallel(torch.func.grad_and_value(scaled), returns="grads", outputs="mean"), AB)
    assert mean.tolist() == [14.5, 14.5]
    blocked = ltx.block_backward_sync(ltx.data_parallel(grads, returns="grads"))
    assert on_two(blocked, AB)["a"].tolist() == [[1.0, 2.0], [3.0, 5.0]]


def test_one_0_dim_parameter_may_have_a_loss_of_its_shape() -> None:
    step = ltx.data_parallel(lambda w, x: (w * x).sum())
    assert on_two(torch.func.grad(step), torch.tensor(1.0)).tolist() == [5.5, 5.5]


BUCKETS = [(1, 1), (16, 16), (100, 40), (1 << 20, 1), (1 << 20, 1 << 20)]


def with_buckets(seed: int) -> list[Params]:
    module, batches = CASES["tied transformer"].build(seed, 2)
    strategies = [ltx.DDPStrategy(bucket_bytes=size, first_bucket_bytes=first) for size, first in BUCKETS]
    batch = batches[ltx.world().rank]
    return [WAYS["backward"](ltx.data_parallel(plain_step(module), s), params_of(module), *batch) for s in strategies]


def test_buckets_change_no_bit(ranks: Ranks, seed: int) -> None:
    assert_same_bits(*ranks(2).run(with_buckets, seed).replicated())


def interleaved(seed: int) -> tuple[Params, Params]:
    """Two steps' graphs at once, and their backward passes in the other order."""
    module, batches = CASES["mlp"].build(seed, 2)
    step, batch = ltx.data_parallel(plain_step(module), SMALL_BUCKETS), batches[ltx.world().rank]
    leaves = [{k: p.requires_grad_() for k, p in params_of(module).items()} for _ in range(2)]
    first, second = step(leaves[0], *batch), step(leaves[1], *(-x for x in batch))
    second.backward()
    first.backward()
    return tuple({k: p.grad for k, p in params.items()} for params in leaves)


def test_two_graphs_at_once(ranks: Ranks, seed: int) -> None:
    module, batches = CASES["mlp"].build(seed, 2)
    for got, sign in zip(ranks(2).run(interleaved, seed).replicated(), (1, -1), strict=True):
        assert_close(got, cases.gradient(module, cases.whole_batch(module, [(sign * x, sign * y) for x, y in batches])))


def test_nested_simulated_axes() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    means = {"inner": [[1.5, 1.5], [4.5, 4.5]], "outer": [[2.0, 4.0], [2.0, 4.0]], ("outer", "inner"): [[3.0] * 2] * 2}
    for axis, expected in means.items():
        grad = torch.func.grad(ltx.data_parallel(lambda w, x: w * x, axis=axis))
        got = ltx.vmap(ltx.vmap(grad, (None, 0), axis_name="inner"), (None, 0), axis_name="outer")(torch.tensor(1.0), x)
        assert got.tolist() == expected


def test_is_a_value() -> None:
    step = ltx.data_parallel(scaled, ltx.DDPStrategy(comm_hook="bf16"))
    assert step == ltx.data_parallel(scaled, ltx.DDPStrategy(comm_hook="bf16"))
    assert hash(step) == hash(ltx.data_parallel(scaled, ltx.DDPStrategy(comm_hook="bf16")))
    assert step != ltx.data_parallel(scaled)
    assert pickle.loads(pickle.dumps(step)) == step
    assert dataclasses.replace(step, strategy=ltx.DDPStrategy()) == ltx.data_parallel(scaled)


def test_complex_outputs(ranks: Ranks, seed: int) -> None:
    """Each rank's loss may come of another output, as with real ones; and "mean" averages them."""
    torch.manual_seed(seed)
    w, xs = torch.randn(3, dtype=torch.cfloat), torch.randn(2, 3, dtype=torch.cfloat)

    def outputs(w: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"real": (w * x).real, "complex": w * x}

    def loss(out: dict[str, Tensor], rank: int) -> Tensor:
        return out["complex"].abs().sum() if rank else out["real"].sum()

    def on_rank(w: Tensor, xs: Tensor) -> tuple[list[Tensor], Tensor]:
        rank, grads = int(ltx.axis_index()), []
        for fn in (outputs, lambda w, x: {"complex": w * x}):
            leaf = w.clone().requires_grad_()
            loss(ltx.data_parallel(fn)(leaf, xs[rank]), rank or fn is not outputs).backward()
            assert leaf.grad is not None
            grads.append(leaf.grad)
        return grads, ltx.data_parallel(outputs, outputs="mean")(w, xs[rank])["complex"]

    grads, mean = ranks(2).run(on_rank, w, xs).replicated()
    for grad, others in zip(grads, ([0, 1], [1, 1]), strict=True):
        leaf = w.clone().requires_grad_()
        (sum(loss(outputs(leaf, x), rank) for x, rank in zip(xs, others, strict=True)) / 2).backward()
        torch.testing.assert_close(grad, leaf.grad)
    torch.testing.assert_close(mean, w * xs.mean(0))
    step = ltx.data_parallel(outputs, outputs="mean")
    torch.testing.assert_close(ltx.vmap(step, (None, 0))(w, xs)["complex"][1], w * xs.mean(0))


@on_ranks(2, alone=True)
def test_a_loss_that_is_changed_in_place() -> None:
    w = torch.ones(2, requires_grad=True)
    loss = ltx.data_parallel(lambda w, x: (w * x).sum())(w, torch.ones(2) * (1 + ltx.axis_index()))
    loss += 1
    loss /= 2
    loss.backward()
    assert w.grad.tolist() == [0.25 * (1 + ltx.axis_size())] * 2  # type: ignore[union-attr]
