"""Derivatives of torch's kernels beside those of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ltx.nn import _Normalised, _normalised_by_formula


@pytest.mark.parametrize("affine", [True, False])
def test_second_derivatives_by_kernels_of_statistics_that_depend_on_x(affine: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, dy, tangent = (torch.randn(5, 3, 2, generator=draw, dtype=torch.float64) for _ in range(3))
    weight, bias = (torch.randn(3, generator=draw, dtype=torch.float64) if affine else None for _ in range(2))

    def second(normalised: Any) -> list[torch.Tensor]:
        given = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
        var, mean = torch.var_mean(given[0], [0, 2], correction=0)
        y = normalised(1e-5, given[0], mean, var, *(given[1:] if affine else (None, None)))
        first = torch.autograd.grad(y, given, dy, create_graph=True)
        return list(torch.autograd.grad((first[0] * tangent).sum(), given[: 1 + affine]))

    torch.testing.assert_close(second(_Normalised.apply), second(_normalised_by_formula))
