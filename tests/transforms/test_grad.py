"""ltx.grad and ltx.grad_and_value beside torch.func's; tests/transforms/cases.py has them among the ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ltx

from .cases import assert_same_bits
from .feedback import STRATEGY

W, X = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
MEAN = X.mean(0).tolist()


def with_aux(w: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return (w * x).sum(), {"seen": x.sum()}


def test_on_a_plain_step_they_are_torchs() -> None:
    def plain(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).square().sum()

    for mine, torchs in ((ltx.grad, torch.func.grad), (ltx.grad_and_value, torch.func.grad_and_value)):
        assert_same_bits(mine(plain)(W, X[0]), torchs(plain)(W, X[0]))
        assert_same_bits(mine(plain, argnums=(1, 0))(W, X[0]), torchs(plain, argnums=(1, 0))(W, X[0]))
        assert_same_bits(mine(with_aux, has_aux=True)(W, X[0]), torchs(with_aux, has_aux=True)(W, X[0]))


def test_aux_is_the_ranks_own() -> None:
    step = ltx.data_parallel(with_aux)
    grads, (loss, aux) = ltx.vmap(ltx.grad_and_value(step, has_aux=True), in_dims=(None, 0))(W, X)
    assert (grads.tolist(), loss.tolist(), aux["seen"].tolist()) == ([MEAN] * 2, [5.0, 13.0], [3.0, 8.0])
    grads, aux = ltx.vmap(ltx.grad(step, has_aux=True), in_dims=(None, 0))(W, X)
    assert (grads.tolist(), aux["seen"].tolist()) == ([MEAN] * 2, [3.0, 8.0])


@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), STRATEGY], ids=["stateless", "stateful"])
def test_aux_and_state(strategy: ltx.Strategy) -> None:
    step = ltx.data_parallel(with_aux, strategy)
    (grads, state), (loss, aux) = ltx.grad_and_value(step, has_aux=True)(W, X[0], sync_state=step.init(W))
    assert (grads.tolist(), loss.item(), aux["seen"].item(), state.step) == (X[0].tolist(), 5.0, 3.0, 1)
    (grads, state), aux = ltx.grad(step, has_aux=True)(W, X[0], sync_state=state)
    assert (grads.tolist(), aux["seen"].item(), state.step) == (X[0].tolist(), 3.0, 2)


def test_keywords_reach_the_step() -> None:
    step = ltx.data_parallel(lambda w, x, *, scale: scale * (w * x).sum())
    assert ltx.grad(step)(W, X[0], scale=3.0).tolist() == (3 * X[0]).tolist()
