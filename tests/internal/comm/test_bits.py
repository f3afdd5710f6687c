"""The bits of numbers, also where vmap has no rule for them, as in torch 2.11."""

from __future__ import annotations

import pytest
import torch

from ltx.core.comm import operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("out", [torch.uint8, torch.int16])
@pytest.mark.parametrize("dim", [0, 1])
def test_views_equal_torchs(
    dtype: torch.dtype, out: torch.dtype, dim: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-100, 100, (3, 3, 8), generator=generator).to(dtype)
    want = x.movedim(dim, 0).contiguous().view(out)
    monkeypatch.setattr(operations, "_VMAP_KNOWS_VIEW", False)
    got = torch.vmap(lambda row: operations.view_as(row, out), in_dims=dim)(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    twice = torch.vmap(torch.vmap(lambda row: operations.view_as(row, out)), in_dims=dim)(x)
    torch.testing.assert_close(twice, want, rtol=0, atol=0)
    torch.testing.assert_close(operations.view_as(x, out), x.view(out), rtol=0, atol=0)


def test_under_grad_no_gradient_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_VMAP_KNOWS_VIEW", False)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * operations.view_as(x, torch.int32).float()).sum()

    x = torch.ones(2)
    torch.testing.assert_close(torch.func.grad(loss)(x), x.view(torch.int32).float())
