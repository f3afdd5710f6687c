"""Values that no training can be of: refused in words, on all ranks, before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW

import ltx
from ltx.errors import AxisError, OptimError, TreeError, WeightError
from ltx.optim import from_torch
from tests.kinds import Ranks
from tests.train_on import refuses, said
from tests.twins.training import sgd

NONE = [math.nan, math.inf, -math.inf, -1.0]


def with_weight(weight: float, as_tensor: bool) -> list[str]:
    """What each kind of step says of rank 0's weight, the other rank's being 4; and whether the state is as before."""
    mine = weight if int(ltx.axis_index()) == 0 else 4.0
    given = torch.tensor(mine) if as_tensor else mine
    step = ltx.data_parallel(lambda w, x: ltx.Weighted((w * x).sum(), given))
    train = ltx.train_step(step, sgd(lr=0.1))
    state = train.init(torch.ones(()))
    calls: list[Callable[[], Any]] = [
        lambda: ltx.grad(step)(torch.ones(()), torch.ones(2)),
        lambda: torch.func.grad(step)(torch.ones(()), torch.ones(2)),
        lambda: ltx.grad(ltx.accumulate(step, 2))(torch.ones(()), torch.ones(2)),
        lambda: train(state, torch.ones(2)),
    ]
    return [*(said(WeightError, call) for call in calls), str(float(state.params))]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("weight", NONE)
def test_weights_that_count_nothing(ranks: Ranks, weight: float, as_tensor: bool) -> None:
    for *texts, after in (*ranks(2).run(with_weight, weight, as_tensor), with_weight(weight, as_tensor)):
        assert after == "1.0"
        assert all("is negative, infinite or NaN" in text for text in texts)
    step = ltx.data_parallel(lambda w, x, weight: ltx.Weighted((w * x).sum(), weight))
    with pytest.raises(WeightError, match="is negative, infinite or NaN"):
        ltx.vmap(torch.func.grad(step), in_dims=(None, 0, 0))(
            torch.ones(()), torch.ones(2), torch.tensor([weight, 4.0])
        )


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: sgd(x), "lr"),
        (lambda x: sgd(0.1, momentum=x), "momentum"),
        (lambda x: sgd(0.1, momentum=0.9, dampening=x), "dampening"),
        (lambda x: from_torch(AdamW, weight_decay=x), "weight_decay"),
        (lambda x: from_torch(Adam, betas=(0.9, x)), "betas"),
        (lambda x: from_torch(Adam, betas=[x, 0.9]), "betas"),
        (lambda x: from_torch(Adam, eps=x), "eps"),
    ],
)
def test_hyperparameters_that_are_no_numbers(make: Callable[[float], Any], name: str, value: float) -> None:
    refuses(OptimError, f"{name} must be a finite number, got {value}", make, value)


@pytest.mark.parametrize("value", NONE)
@pytest.mark.parametrize("of", [float, torch.tensor])
def test_schedules_that_give_no_numbers(of: Callable[[float], Any], value: float) -> None:
    train = ltx.train_step(ltx.data_parallel(lambda w: w.sum()), sgd(lambda count: of(value) if count else 0.5))
    state, _ = train(train.init(torch.ones(())))
    text = rf"the schedule lr\(1\) must be a finite number >= 0 or a 0-dim tensor, got \S*{value:g}"
    refuses(OptimError, text, train, state)


@pytest.mark.parametrize("size", [0, -1, -2])
@pytest.mark.parametrize("given", [(), (torch.ones(2),)])
def test_sizes_of_an_axis(given: tuple[Tensor, ...], size: int) -> None:
    with pytest.raises(AxisError, match=rf"axis_size is the number of ranks, at least 1, got {size}"):
        ltx.vmap(lambda *x: ltx.axis_index(), axis_size=size)(*given)


OVERLAPS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "a part": (lambda a: {"a": a, "b": a[1:]}, True),
    "parts of one that isn't there": (lambda a: {"a": a[:5], "b": a[3:]}, True),
    "a row and a column": (lambda a: {"a": a.view(4, 4)[1], "b": a.view(4, 4)[:, 2]}, True),
    "another dtype": (lambda a: {"a": a, "b": a.view(torch.complex64)[1:2]}, True),
    "transposed": (lambda a: {"a": a.view(4, 4), "b": a.view(4, 4).T}, True),
    "three": (lambda a: {"a": a[:2], "b": a[4:], "c": a[1:4]}, True),
    "pieces": (lambda a: {"a": a[:4], "b": a[4:]}, False),
    "columns": (lambda a: {"a": a.view(4, 4)[:, 0], "b": a.view(4, 4)[:, 1], "c": a.view(4, 4)[:, 2]}, False),
    "every other one": (lambda a: {"a": a[::2], "b": a[1::2]}, False),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_parameters_that_share_memory(name: str) -> None:
    make, overlap = OVERLAPS[name]
    train = ltx.train_step(ltx.data_parallel(lambda p: sum(x.abs().sum() for x in p.values())), sgd(lr=0.1))
    if overlap:
        with pytest.raises(TreeError, match=r"'[abc]' and '[abc]' share memory .* would be trained apart"):
            train.init(make(torch.ones(16)))
    else:
        state, _ = train(train.init(make(torch.ones(16))))
        assert all((x == 0.9).all() for x in state.params.values())
