"""What is done by habit from DDP or Lightning: the error, or the warning, says what to write here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import EqualBatchesWarning, StepError
from tests.contract.bad_input.public import batch, loss, params
from tests.kinds import Ranks
from tests.train_on import said, trained
from tests.twins.training import sgd


def stepped(step: Any = loss) -> Any:
    return trained(step, sgd(0.1), params(), [batch()])


def differentiates(p: Any, x: Tensor) -> Tensor:
    value = loss(p, x)
    value.backward(retain_graph=True)
    return value


WAYS: dict[str, Callable[[Any], Any]] = {
    "train_step": stepped,
    "ltx.grad": lambda step: ltx.grad(ltx.data_parallel(step))(params(), batch()),
    "torch.func": lambda step: torch.func.grad(ltx.data_parallel(step))(params(), batch()),
}


@pytest.mark.parametrize("way", WAYS)
def test_backward_inside_a_step(way: str, ranks: Ranks) -> None:
    """It had counted twice, without a word where the graph was retained or had nothing to keep."""
    for text in (said(StepError, WAYS[way], differentiates), *ranks(2).run(said, StepError, WAYS[way], differentiates)):
        assert "the step has called .backward() itself" in text
        assert "Return the loss" in text


X = torch.arange(24.0).reshape(8, 3)
#: {what ranks train on, by rank: whether it is worth a warning}
BATCHES: dict[str, tuple[Callable[[int], Any], bool]] = {
    "all alike": (lambda rank: X, True),
    "a part": (lambda rank: ltx.shard(X), False),
    "one number": (lambda rank: X.index_put((torch.tensor(5), torch.tensor(1)), torch.tensor(float(rank))), False),
    "lengths": (lambda rank: torch.ones(2 + rank, 3), False),
    "no samples": (lambda rank: torch.tensor(1.0), False),
}


@pytest.mark.parametrize("name", BATCHES)
def test_equal_batches(name: str, on_new_axis: Callable[..., Any]) -> None:
    """Said once in a world, on rank 0; later steps compare nothing."""
    of_rank, warns = BATCHES[name]

    def on_rank() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                trained(lambda p, x: (x * p["w"][0, 0]).mean(), sgd(0.1), params(), [of_rank(ltx.world().rank)] * 2)
        return [str(one.message) for one in caught if one.category is EqualBatchesWarning]

    first, second = on_new_axis(on_rank)
    assert len(first) == warns
    assert second == []
    assert all("ltx.shard(batch)" in text and "DistributedSampler" in text for text in first)
