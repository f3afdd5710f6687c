"""Per-sample gradients of a data-parallel step: every rank has to have as many samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import ltx
from ltx.errors import DeadlockDetectedError, RankMismatchError
from tests.kinds import OnNewAxis
from tests.train_on import on_ranks, said

step = ltx.data_parallel(lambda w, x: (w * x).sum())


def batched(w: Tensor, x: Tensor) -> Any:
    w = w.clone().requires_grad_()
    values = ltx.data_parallel(lambda w, x: x @ w)(w, x)
    return torch.autograd.grad(values, w, torch.eye(len(x)), is_grads_batched=True)[0]


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "torch.func.grad": lambda w, x: vmap(grad(step), in_dims=(None, 0))(w, x),
    "ltx.grad": lambda w, x: vmap(ltx.grad(step), in_dims=(None, 0))(w, x),
    "is_grads_batched": batched,
    "sync_gradients": lambda w, x: vmap(lambda x: ltx.sync_gradients(x)[0])(x),
    "fp16": lambda w, x: vmap(grad(ltx.data_parallel(step.fn, ltx.DDPStrategy(comm_hook="fp16"))), (None, 0))(w, x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [3, 70_000])
@pytest.mark.full(but=6)
@pytest.mark.parametrize("known", ["", "known", "known, over sockets"])
def test_unequal_numbers_of_samples_are_refused(way: str, width: int, known: str, on_new_axis: OnNewAxis) -> None:
    """Gradients of other samples, or half of one's own, were taken for means; large ones waited for ever.

    `known`: ranks have taken both numbers of samples before.
    """

    def run() -> str:
        for count in (2, 5) * (2 * bool(known)):
            WAYS[way](torch.ones(width), torch.ones(count, width))
        samples = torch.ones(2 + 3 * int(ltx.axis_index()), width)
        errors = RankMismatchError if known != "known" else (RankMismatchError, DeadlockDetectedError)  # a peer's
        return said(errors, WAYS[way], torch.ones(width), samples)

    for text in on_new_axis(run, sockets=known == "known, over sockets"):
        if known == "":
            assert "bucket 0 of a backward pass, its arguments: rank 0: [2] samples; rank 1: [5] samples" in text
        elif known == "known":
            assert "a peer has issued another collective here" in text  # shared memory compares what is issued
        else:
            assert "ranks disagree on what they call, and wait for each other" in text


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_equal_numbers(way: str) -> None:
    """One pass after the other, of other numbers: equal to the mean of both ranks' samples."""
    ones = [torch.ones(count, 2) * (1 + 2 * int(ltx.axis_index())) for count in (3, 1, 3)]

    found = [WAYS[way](torch.ones(2), x) for x in ones]
    for got, count in zip(found, (3, 1, 3), strict=True):
        torch.testing.assert_close(got, torch.full((count, 2), 2.0))
