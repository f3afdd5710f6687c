"""Which gradients count as not finite."""

from __future__ import annotations

import pytest
import torch

from ltx.core.training.guard import not_finite
from tests.contract.training.test_guard import INF, NAN


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("place", [None, 0, 5_000, -1])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_not_finite(dtype: torch.dtype, place: int | None, value: float) -> None:
    """The largest numbers add up to infinity, and are finite."""
    largest = torch.finfo(dtype).max
    grads = [torch.full((10_001,), largest, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones((), dtype=dtype)]
    if place is not None:
        grads[0][place] = value
    assert bool(not_finite(grads)) == (place is not None)
    transposed = [grads[0][:10_000].reshape(100, 100).T, *grads[1:]]
    assert bool(not_finite(transposed)) == (place in (0, 5_000))


def test_infinities_that_cancel() -> None:
    assert not_finite([torch.tensor([INF, -INF, 1.0])])
    assert not not_finite([])
