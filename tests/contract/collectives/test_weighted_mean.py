"""weighted_mean: what the conformance table can't say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import TreeError, WeightError
from tests.kinds import Ranks
from tests.train_on import refuses, said


def _mean_and_gradients(x: Tensor, w: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """On one rank, for a loss that weighs rank r by r + 1."""

    def loss(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        mean = ltx.weighted_mean(x, w)
        return (1 + ltx.axis_index()) * mean.sin().sum(), mean

    gradients, mean = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return mean, gradients


def _expected(xs: Tensor, ws: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    n = len(xs)

    def loss(xs: Tensor, ws: Tensor) -> tuple[Tensor, Tensor]:
        mean = (xs * ws.reshape(n, *[1] * (xs.ndim - 1))).sum(0) / ws.sum()
        return n * (n + 1) / 2 * mean.sin().sum(), mean

    gradients, mean = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(xs, ws)
    return mean.expand(n, *mean.shape), gradients


@pytest.mark.parametrize("nothing", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_of_zero_silences_whatever_there_is(ranks: Ranks, nothing: float, seed: int) -> None:
    xs, ws = torch.randn(3, 4), torch.tensor([2.0, 0.0, 3.0])
    xs[1, :2] = nothing
    finite = xs.clone()
    finite[1, :2] = 0.0
    means, (dx, dw) = ltx.vmap(_mean_and_gradients)(xs, ws)
    torch.testing.assert_close((means, (dx, dw)), _expected(finite, ws))
    assert dx[1].tolist() == [0.0] * 4
    for rank, got in enumerate(ranks(3).run(lambda: _mean_and_gradients(xs[ltx.axis_index()], ws[ltx.axis_index()]))):
        torch.testing.assert_close(got, (means[rank], (dx[rank], dw[rank])))


def test_finite_values_of_weight_zero_keep_the_weights_gradient(seed: int) -> None:
    xs, ws = torch.randn(2, 3, dtype=torch.float64), torch.tensor([0.0, 1.5], dtype=torch.float64)
    got, want = ltx.vmap(_mean_and_gradients)(xs, ws), _expected(xs, ws)
    torch.testing.assert_close(got, want)
    assert want[1][1][0].abs() > 1e-6, "the weight that is 0 has a gradient"


def test_a_tree_of_every_dtype_goes_in_one_call(ranks: Ranks) -> None:
    def run() -> tuple[Any, list[str], list[torch.dtype]]:
        rank = int(ltx.axis_index())
        value = {
            "loss": torch.tensor(float(rank)),
            "right": torch.tensor([rank, 7]),
            "half": torch.full((2,), 60000.0, dtype=torch.float16),
            "done": torch.tensor(rank == 0),
            "wide": torch.tensor(rank, dtype=torch.float64),
        }
        with ltx.profile.record() as trace:
            means = ltx.weighted_mean(value, [1, torch.tensor(3, dtype=torch.int32)][rank])
        return (
            ltx.tree.map(Tensor.tolist, means),
            [e.operation for e in trace.events],
            [m.dtype for m in means.values()],
        )

    means, operations, dtypes = ranks(2).run(run).replicated()
    assert means == {"done": 0.25, "half": [60000.0] * 2, "loss": 0.75, "right": [0.75, 7.0], "wide": 0.75}
    assert operations == ["psum"] * 6, "one psum: the five leaves, and the weights"
    assert set(dtypes) == {torch.float16, torch.float32, torch.float64}


def test_a_tree_without_leaves() -> None:
    assert ltx.weighted_mean({"a": []}, 2) == {"a": []}


NONE = (
    "weighted_mean: the weights of all ranks add up to 0, so there is no mean. Give at least one rank a weight, or "
    "leave the call out on all of them."
)


def _error(x: Tensor, w: Any) -> str:
    return said(WeightError, ltx.weighted_mean, x, w)


def test_without_any_weight(ranks: Ranks) -> None:
    assert ranks(2).run(_error, torch.ones(2), 0).replicated() == NONE
    assert _error(torch.ones(()), 0.0) == NONE
    refuses(WeightError, "add up to 0", ltx.vmap(ltx.weighted_mean), torch.ones(2), torch.zeros(2))
    with pytest.raises(WeightError, match="add up to 0"):
        ltx.vmap(torch.vmap(torch.func.grad(ltx.weighted_mean)))(torch.ones(2, 2), torch.tensor([[1.0, 0.0]] * 2))


def test_a_negative_weight_raises_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks(2).run(lambda: (_error(torch.ones(2), [2, -1][ltx.axis_index()]), ltx.psum(torch.ones(()))))
    assert first[0] == (
        "weighted_mean: 1 of the 2 ranks' weights is negative; that of rank 0 is 2. Weights count samples: give 0 to a "
        "rank whose value is to count for nothing."
    )
    assert "that of rank 1 is -1." in second[0]
    assert first[1] == second[1] == 2, "ranks go on in step"
    with pytest.raises(WeightError, match=r"1 of the 2 ranks' weights is negative; they are \[2.0, -1.0\]"):
        ltx.vmap(ltx.weighted_mean)(torch.ones(2), torch.tensor([2.0, -1.0]))


def test_weights_of_another_shape_and_values_that_are_no_tensors() -> None:
    with pytest.raises(WeightError, match=r"the weight must be a number or a 0-dim tensor, got shape \[1\]\. Sum it\."):
        ltx.weighted_mean(torch.ones(2), torch.ones(1))
    with pytest.raises(TreeError, match=r"weighted_mean: its value must be a tree of tensors, but leaf 'a' is of type"):
        ltx.weighted_mean({"a": "1.0"}, 1)


@pytest.mark.full
@pytest.mark.slow_compile
@pytest.mark.parametrize("weight", [1.0, torch.tensor(1)], ids=["number", "tensor"])
def test_in_a_compiled_graph_there_is_nan_instead_of_errors(ranks: Ranks, weight: Any) -> None:
    def run() -> list[float]:
        compiled = torch.compile(ltx.weighted_mean, fullgraph=True, backend="aot_eager")
        rank = int(ltx.axis_index())
        x = torch.tensor(float(rank))
        found = [compiled(x, w * weight).item() for w in ([1, 3][rank], 0, [1, -3][rank])]
        torch._dynamo.reset()
        return found

    mean, *rest = ranks(2).run(run).replicated()
    assert mean == 0.75
    assert torch.tensor(rest).isnan().tolist() == [True, True]
