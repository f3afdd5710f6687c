"""Sums of many numbers in 16 bits: a bfloat16 has 8 bits of precision, so 256 + 1 is 256 there.

The right values are those of float64, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp

import ltx
from ltx.optim import from_torch
from tests.kinds import Ranks
from tests.train_on import trained
from tests.twins.training import by_train_step

MANY = 64
NARROW = [torch.bfloat16, torch.float16]
sgd = from_torch(torch.optim.SGD, lr=1.0)


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    """Small ones between two large ones, in a narrow sum with which each of them is lost, from either end."""
    x = torch.rand(count)
    x[0] = x[-1] = 2 / torch.finfo(dtype).eps
    return x.to(dtype)


def assert_right(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(found.dtype).eps, atol=0)


def mean(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).mean()


def by_backward(f: Any, w: Tensor, x: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    f(leaf, x).backward()
    assert leaf.grad is not None
    return leaf.grad


WAYS: dict[str, Callable[..., Tensor]] = {
    "backward": by_backward,
    "grad": lambda f, w, x: grad(f)(w, x),
    "jvp": lambda f, w, x: jvp(lambda w: f(w, x), (w,), (torch.ones_like(w),))[1],
    "vmap": lambda f, w, x: torch.vmap(grad(f), (None, 0))(w, x[None])[0],
    "hvp": lambda f, w, x: jvp(
        lambda w: grad(ltx.accumulate(lambda w, x: (w * w * x).mean() / 2, len(x)))(w, x), (w,), (torch.ones_like(w),)
    )[1],
    "second": lambda f, w, x: by_backward(
        lambda w, x: torch.autograd.grad(
            ltx.accumulate(lambda w, x: (w * w * x).mean() / 2, len(x))(w, x), w, create_graph=True
        )[0],
        w,
        x,
    ),
    "train step": by_train_step,
}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_many_micro_batches(way: str, dtype: torch.dtype, seed: int) -> None:
    x = numbers(MANY, dtype)
    w, expected = torch.ones((), dtype=dtype), x.double().mean()
    found = WAYS[way](ltx.accumulate(mean, MANY), w, x)
    assert found.dtype == dtype
    assert_right(found, expected)


@pytest.mark.full
def test_in_a_compiled_graph(seed: int) -> None:
    x = numbers(MANY, torch.bfloat16)
    step = torch.compile(grad(ltx.accumulate(lambda w, x: (w * x).sum(), MANY)), backend="aot_eager")
    assert_right(step(torch.ones((), dtype=torch.bfloat16), x), x.double().mean())


def on_a_rank(step: Any, w: Tensor, x: Tensor) -> Any:
    mine = ltx.shard(x)
    return by_backward(step, w, mine), ltx.grad(step)(w, mine), step(w, mine)


@pytest.mark.parametrize("f", [mean, (lambda w, x: ltx.Weighted((w * x).sum(), len(x)))])
def test_on_ranks(f: Any, ranks: Ranks, seed: int) -> None:
    x, w = numbers(MANY, torch.bfloat16).repeat(2), torch.ones((), dtype=torch.bfloat16)
    step = ltx.accumulate(ltx.data_parallel(f, outputs="mean"), MANY)
    simulated = ltx.vmap(lambda: (grad(step)(w, ltx.shard(x)), step(w, ltx.shard(x))), axis_size=2)()
    for found in (*ranks(2).run(on_a_rank, step, w, x), [one[0] for one in simulated]):
        for value in found:
            assert_right(value.bfloat16(), x.double().mean())


def test_losses_of_many_micro_batches(seed: int) -> None:
    x = numbers(MANY, torch.bfloat16)
    loss = ltx.accumulate(mean, MANY)(torch.ones((), dtype=torch.bfloat16), x)
    assert loss.dtype == torch.bfloat16
    assert_right(loss, x.double().mean())


def test_micro_batches_in_mixed_precision(seed: int) -> None:
    half = ltx.Precision(compute=torch.bfloat16)
    x, step = numbers(MANY, torch.bfloat16), ltx.mixed_precision(ltx.data_parallel(mean), half)
    found = ltx.grad(ltx.accumulate(step, MANY))(torch.ones(()), x.float())
    assert_right(found.bfloat16(), x.double().mean())


def test_float16_gradients_whose_sum_is_too_large() -> None:
    w, x = torch.ones((), dtype=torch.float16), torch.full((4,), 30000.0, dtype=torch.float16)
    assert grad(ltx.accumulate(mean, 4))(w, x) == 30000


def passes(op: Any, count: int, **fields: Any) -> Tensor:
    """How far one update of `count` passes moves: the first gradient is 256, the others are 1."""
    strategy = ltx.HorovodStrategy(op=op, backward_passes_per_step=count, **fields)
    batches = [torch.full((2,), x, dtype=torch.bfloat16) for x in [256.0] + [1.0] * (count - 1)]
    return -trained(lambda w, x: (w * x).sum(), sgd, torch.zeros(2, dtype=torch.bfloat16), batches, strategy).params


@pytest.mark.parametrize(("op", "fields"), [("average", {}), ("adasum", {}), ("average", {"compression": "fp16"})])
def test_horovods_passes(op: str, fields: Any, ranks: Ranks) -> None:
    for found in (passes(op, 64, **fields), *ranks(2).run(passes, op, 64, **fields)):
        assert found.equal(torch.full((2,), 256.0 + 63).bfloat16())


def many_tokens(strategy: ltx.Strategy | None, dtype: torch.dtype) -> Tensor:
    """The gradient of a mean over 100,001 tokens, of which each rank has 100,001."""

    def loss(w: Tensor, x: Tensor) -> ltx.Weighted:
        return ltx.Weighted((w.float() * x).sum() * 100_001, 100_001)

    return -trained(loss, sgd, torch.zeros(1, dtype=dtype), [torch.full((1,), 0.25)], strategy).params


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.BaguaStrategy("gradient_allreduce")])
def test_numbers_of_tokens(strategy: ltx.Strategy, dtype: torch.dtype, ranks: Ranks) -> None:
    for found in (many_tokens(strategy, dtype), *ranks(2).run(many_tokens, strategy, dtype)):
        torch.testing.assert_close(found.float(), torch.tensor([0.25]), rtol=0.01, atol=0)
