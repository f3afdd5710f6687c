"""A small training: parameters, a loss, and what is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ltx


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> ltx.Weighted:
    error = (torch.tanh(x @ params["w"]) @ params["v"] - y).square()
    return ltx.Weighted(error.sum(), error.numel())


def mean_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """For strategies that take no weights."""
    weighted = loss(params, x, y)
    return weighted.total / weighted.weight


def make(strategy: ltx.Strategy | None = None, loss_fn: Callable[..., Any] = loss, **kwargs: Any) -> tuple[Any, Any]:
    step = ltx.data_parallel(loss_fn, strategy or ltx.DDPStrategy())
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.AdamW, lr=0.05), **kwargs)
    generator = torch.Generator().manual_seed(2)
    return train, train.init({"w": torch.randn(5, 7, generator=generator), "v": torch.randn(7, generator=generator)})


def values(state: Any) -> list[Any]:
    """All values of a state, to be compared bit for bit."""
    return [state.step, *(x.tolist() for x in ltx.tree.flatten((state.params, state.opt_state))[0])]
