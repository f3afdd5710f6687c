from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import UnsupportedError
from tests.kinds import Ranks
from tests.train_on import refuses


def some(dtype: torch.dtype) -> Tensor:
    """With many ties."""
    return torch.randint(3, (20,)).to(dtype) if dtype != torch.bool else torch.rand(20) < 0.5


def first(xs: Tensor, which: str) -> Tensor:
    """The first row with the extremum, column by column."""
    best = {"pargmax": xs.float().amax(0), "pargmin": xs.float().amin(0)}[which]
    return (xs.float() == best).long().argmax(0)


@pytest.mark.parametrize("which", ["pargmax", "pargmin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_is_the_first_that_has_it(dtype: torch.dtype, which: str, ranks: Ranks, seed: int) -> None:
    xs = torch.stack([some(dtype) for _ in range(3)])
    collective = getattr(ltx, which)
    expected = first(xs, which)
    assert torch.equal(ltx.vmap(collective)(xs), expected.expand(3, -1))
    for found in ranks(3).run(lambda: collective({"x": xs[ltx.world().rank]})):
        assert torch.equal(found["x"], expected)
    assert torch.equal(collective(xs[0]), torch.zeros(20, dtype=torch.int64))


def test_nan_is_the_extremum_wherever_it_is(ranks: Ranks) -> None:
    xs = torch.tensor([[1.0, 5.0, -torch.inf], [torch.nan, 2.0, torch.nan], [torch.nan, 7.0, torch.inf]])

    def both() -> list[Any]:
        x = xs[ltx.world().rank]
        return [ltx.pargmax(x).tolist(), ltx.pargmin(x).tolist()]

    assert ranks(3).run(both)[2] == [[1, 2, 1], [1, 1, 1]]
    assert ltx.vmap(ltx.pargmax)(xs)[0].tolist() == [1, 2, 1]


def test_has_no_gradient_and_no_complex_numbers() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    assert not ltx.vmap(ltx.pargmax)(x).requires_grad
    refuses(UnsupportedError, "takes real numbers alone", ltx.pargmax, torch.zeros(2, dtype=torch.complex64))
