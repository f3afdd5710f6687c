"""Steps outside of train steps, whose caller gets the gradients, with strategies that shard the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from tests.kinds import Ranks
from tests.train_on import inner

HOOKS = [
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
@pytest.mark.parametrize("hook", HOOKS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_exact_mean_on_every_rank(way: str, hook: Any, ranks: Ranks, seed: int) -> None:
    strategy = ltx.ZeroStrategy(comm_hook=hook)
    xs = torch.randn(2, 2, 5)  # by rank, step and element
    wanted = list(xs.mean(0))

    def on_this_rank() -> list[Tensor]:
        return means(way, strategy, xs[int(ltx.axis_index())])

    together = ltx.vmap(lambda x: torch.stack(means(way, strategy, x)))(xs)
    for found in (*ranks(2).run(on_this_rank), *map(list, together)):
        for x, mean in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, mean, rtol=0, atol=0)
