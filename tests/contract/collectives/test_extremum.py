"""pmax, pmin, argmax and argmin: what the conformance table can't say."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import UnsupportedError
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import refuses


def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    return ltx.pmax(x), ltx.pmin(x)


@pytest.mark.full
@pytest.mark.covering(1)
@pytest.mark.parametrize("whose", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_on_one_rank_is_nan_on_all(ranks: Ranks, whose: int, dtype: torch.dtype) -> None:
    xs = torch.randn(3, 7).to(dtype)
    xs[whose, 2], xs[(whose + 1) % 3, 4], xs[0, 5] = torch.nan, torch.inf, -torch.inf
    want = (xs.amax(0), xs.amin(0))
    real = ranks(3).run(lambda xs: _both(xs[ltx.axis_index()]), xs).replicated()
    torch.testing.assert_close(real, want, rtol=0, atol=0, equal_nan=True)
    compiled = ranks(3).run(lambda xs: torch.compile(_both, backend="aot_eager")(xs[ltx.axis_index()]), xs)
    torch.testing.assert_close(compiled.replicated(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_nan_over_sockets(on_new_axis: OnNewAxis, dtype: torch.dtype) -> None:
    """gloo keeps or drops it by the order in which it meets it."""
    xs = torch.tensor([[torch.nan, 1.0, torch.inf], [2.0, torch.nan, -torch.inf]]).to(dtype)
    found = on_new_axis(lambda: (*_both(xs[ltx.axis_index()]), *_both(xs[:0])), sockets=True).replicated()
    torch.testing.assert_close(found, (xs.amax(0), xs.amin(0), xs[:0], xs[:0]), rtol=0, atol=0, equal_nan=True)


def test_a_backward_graph_waits_for_all_that_it_issues(ranks: Ranks) -> None:
    """torch computes what depends on no cotangent in the forward graph, and issues it in the backward graph too."""
    unwaited: Callable[[], int] = torch._C._distributed_c10d._get_work_registry_size

    def gradient(x: Tensor) -> tuple[Tensor, int]:
        before, x = unwaited(), x.clone().requires_grad_()
        loss = torch.compile(lambda x: (ltx.pmax(x) * x).sum(), backend="aot_eager_decomp_partition")
        loss(x).backward()
        assert x.grad is not None
        return x.grad, unwaited() - before

    xs = torch.tensor([[4.0, 1.0], [3.0, 1.0]])
    for rank, (grad, left) in enumerate(ranks(2).run(lambda xs: gradient(xs[ltx.axis_index()]), xs)):
        assert (grad.tolist(), left) == ([[4.0 + 7.0, 1.0 + 1.0], [4.0, 1.0 + 1.0]][rank], 0)


def test_complex_numbers_have_no_order() -> None:
    with pytest.raises(UnsupportedError, match=r"leaf 'z' is complex64\[2\]"):
        ltx.pmax({"a": torch.ones(1), "z": torch.zeros(2, dtype=torch.complex64)})


def test_no_gradient_for_integers() -> None:
    assert not operator.attrgetter("requires_grad")(ltx.pmax(torch.arange(3)))


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
