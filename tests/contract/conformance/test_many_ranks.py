"""256 simulated ranks: every collective and a data-parallel step give what plain torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from tests.contract.conformance.test_properties import fixed

N = 256
RING = [(rank, (rank + 1) % N) for rank in range(N - 1)]  # open: rank 0 gets zeros


def _everywhere(y: Tensor) -> Tensor:
    return y.expand(N, *y.shape)


#: A rank's tensor has shape (2 * N,) if it is split, else (6,).
OPS = {
    **{name: fixed(name) for name in ("psum", "pmean", "pmax", "pmin", "pvary", "weighted_mean")},
    "all_gather": fixed("all_gather", dim=0, tiled=False),
    "all_gather tiled": fixed("all_gather", dim=0, tiled=True),
    "psum_scatter": fixed("psum_scatter", dim=0, tiled=True),
    "broadcast": fixed("broadcast", src=N - 1),
    "psum_to": fixed("psum_to", dst=N - 1),
    "gather": fixed("gather", dst=N - 1, dim=0, tiled=True),
    "scatter": fixed("scatter", src=N - 1, dim=0, tiled=True),
    "all_to_all": fixed("all_to_all", split_dim=0, concat_dim=0),
    "ppermute": fixed("ppermute", perm=RING),
    "reduce": fixed("reduce", op="product", keep_dtype=False),
}


@pytest.mark.parametrize("name", OPS, ids=lambda name: name.replace(" ", "_"))
def test_collectives(name: str, seed: int) -> None:
    """Values, and gradients of a loss that weighs rank r by r + 1."""
    op, reference = OPS[name]
    xs = torch.randn(N, 2 * N if name in ("psum_scatter", "scatter", "all_to_all") else 6, dtype=torch.float64)
    if name == "reduce":
        xs = 1 + xs / N  # so that products stay away from 0
    grads, values = ltx.vmap(
        torch.func.grad_and_value(
            lambda x: (lambda y: ((1 + ltx.axis_index()) * y.sin().sum(), y))(op(x)), has_aux=True
        )
    )(xs)
    torch.testing.assert_close(values[1], reference(xs))
    weights = torch.arange(1, N + 1, dtype=torch.float64)
    want = torch.func.grad(lambda xs: (weights * reference(xs).sin().flatten(1).sum(1)).sum())(xs)
    torch.testing.assert_close(grads, want.sum(0).expand_as(want) if name == "pvary" else want)


def _loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"]) @ params["v"] - y).square().mean()


@pytest.fixture
def problem(seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Parameters; four samples a rank, and their targets."""
    double = torch.float64
    params = {"w": torch.randn(3, 5, dtype=double), "v": torch.randn(5, 2, dtype=double)}
    return params, torch.randn(N, 4, 3, dtype=double), torch.randn(N, 4, 2, dtype=double)


def _on_all(step: Callable[..., Any], params: Any, *batch: Tensor) -> Any:
    return ltx.vmap(torch.func.grad(step), in_dims=(None, *(0 for _ in batch)))(params, *batch)


def test_step_with_gradients_in_bfloat16(problem: tuple[dict[str, Tensor], Tensor, Tensor]) -> None:
    """Each share is rounded, then they are added up; at most 256 roundings of 2^-8 of the shares' magnitudes."""
    params, xs, ys = problem
    each = torch.vmap(torch.func.grad(_loss), in_dims=(None, 0, 0))(params, xs, ys)
    got = _on_all(ltx.data_parallel(_loss, ltx.DDPStrategy(comm_hook="bf16")), params, xs, ys)
    for name, grads in each.items():
        assert torch.equal(got[name], _everywhere(got[name][0])), "ranks differ"
        bound = 2**-8 * ((grads / N).abs().sum(0) + grads.mean(0).abs()) + 1e-12
        error = (got[name][0] - grads.mean(0)).abs()
        assert (error > 0).any(), "nothing was rounded"
        assert (error <= bound).all(), (error / bound).max()
