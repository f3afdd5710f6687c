"""A small training for the tests of elastic and of chaos."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ltx

SAMPLES = 48
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))
Y = X.sin().sum(1)


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> ltx.Weighted:
    error = (torch.tanh(x @ params["w"]) @ params["v"] - y).square()
    return ltx.Weighted(error.sum(), error.numel())


def mean_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """For strategies that take no weights."""
    weighted = loss(params, x, y)
    return weighted.total / weighted.weight


def make(strategy: ltx.Strategy | None = None, loss_fn: Callable[..., Any] = loss, **kwargs: Any) -> tuple[Any, Any]:
    """A train step, and its state at the start."""
    step = ltx.data_parallel(loss_fn, strategy or ltx.DDPStrategy())
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.AdamW, lr=0.05), **kwargs)
    generator = torch.Generator().manual_seed(2)
    params = {"w": torch.randn(5, 7, generator=generator), "v": torch.randn(7, generator=generator)}
    return train, train.init(params)


def batch(indices: Tensor) -> tuple[Tensor, Tensor]:
    return X[indices], Y[indices]


START = ltx.DataPosition(SAMPLES, 10, seed=3, weighted=True)  # the last step of an epoch takes 8
STEPS = 5  # an epoch


def values(state: Any) -> list[Any]:
    """All values of a state, to be compared bit for bit."""
    return [state.step, *(x.tolist() for x in ltx.tree.flatten((state.params, state.opt_state))[0])]


def undisturbed(epochs: int = 3) -> list[Any]:
    """The values of the state in the end where nobody is lost."""
    train, state = make()
    return values(ltx.elastic(train, state, batch, START, epochs=epochs)[0])


def close_to(a: list[Any], b: list[Any]) -> bool:
    return all(
        torch.allclose(torch.tensor(x), torch.tensor(y), rtol=1e-4, atol=1e-5) for x, y in zip(a, b, strict=True)
    )


def assert_every_sample_once(*seen: dict[int, list[int]], epochs: int = 3) -> None:
    """`seen`: what each rank took, by step; of lost ranks, in the steps that were done whole with them."""
    for epoch in range(epochs):
        steps = range(epoch * STEPS + 1, (epoch + 1) * STEPS + 1)
        counted = Counter(sample for each in seen for step in steps for sample in each.get(step, []))
        assert counted == Counter(range(SAMPLES)), epoch
