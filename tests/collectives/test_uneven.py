"""Unequal shapes: gather_all_tensors, and the collectives that take splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import AxisError, RankMismatchError
from ltx.runtime.pool import Pool

Ranks = Callable[[int], Pool]
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rows": [(2, 3), (0, 3), (5, 3)],
    "every dimension": [(2, 3), (4, 1), (1, 1)],
    "numbers of dimensions": [(), (3,), (2, 2, 2)],
    "equal": [(2, 2), (2, 2), (2, 2)],
    "empty": [(0,), (0, 4), (0,)],
}


def _mine(xs: list[Tensor]) -> Tensor:
    return xs[int(ltx.axis_index())]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shapes", list(SHAPES.values()), ids=list(SHAPES))
def test_gather_all_tensors(ranks: Ranks, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    xs = [(torch.randn(shape) * 3).to(dtype) for shape in shapes]
    found = ranks(3).run(lambda xs: ltx.gather_all_tensors(_mine(xs)), xs).replicated()
    assert all(torch.equal(got, x) and got.dtype == x.dtype for got, x in zip(found, xs, strict=True))


def test_gradients_flow_through_gather_all_tensors(ranks: Ranks) -> None:
    """Each rank weighs each tensor otherwise; a second derivative and a transform on the way."""
    xs = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES["rows"]]

    def loss(x: Tensor) -> Tensor:
        rank = int(ltx.axis_index())
        gathered = ltx.gather_all_tensors(x.T)
        return sum(((rank + 2 * k + 1) * torch.sin(y)).sum() for k, y in enumerate(gathered))  # type: ignore[return-value]

    def run(xs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = _mine(xs).requires_grad_()
        (plain,) = torch.autograd.grad(loss(x), x)
        hvp = torch.func.jvp(torch.func.grad(loss), (x,), (torch.ones_like(x),))[1]
        return torch.func.grad(loss)(x), plain, hvp

    for k, (by_func, plain, hvp) in enumerate(ranks(3).run(run, xs)):
        weight = sum(rank + 2 * k + 1 for rank in range(3))
        torch.testing.assert_close(by_func, weight * torch.cos(xs[k]))
        torch.testing.assert_close(plain, weight * torch.cos(xs[k]))
        torch.testing.assert_close(hvp, -weight * torch.sin(xs[k]))


def test_dtypes_that_differ(ranks: Ranks) -> None:
    def run() -> str:
        with pytest.raises(RankMismatchError) as caught:
            ltx.gather_all_tensors(
                torch.zeros(1 + int(ltx.axis_index()), dtype=[torch.int32, torch.float32][ltx.axis_index()])
            )
        return str(caught.value)

    message = ranks(2).run(run).replicated()
    assert "rank 0: int32[1]; rank 1: float32[2]" in message


@pytest.mark.parametrize("splits", [(1, 4, 0), (2, 2, 2), (0, 0, 3)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather(ranks: Ranks, splits: tuple[int, ...], dim: int) -> None:
    whole = torch.randn(sum(splits), 2, dtype=torch.float64).movedim(0, dim)
    bars = torch.randn(3, *whole.shape, dtype=torch.float64)

    def run() -> tuple[Tensor, Tensor]:
        rank = int(ltx.axis_index())
        part = whole.split(splits, dim)[rank]
        found, pull = torch.func.vjp(lambda x: ltx.all_gather(x, dim=dim, tiled=True, splits=splits), part)
        return found, pull(bars[rank])[0]

    for rank, (found, bar) in enumerate(ranks(3).run(run)):
        assert torch.equal(found, whole)
        torch.testing.assert_close(bar, bars.sum(0).split(splits, dim)[rank])


@pytest.mark.parametrize("splits", [(1, 4, 0), (2, 2, 2), (0, 0, 3)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_psum_scatter(ranks: Ranks, splits: tuple[int, ...], dim: int) -> None:
    xs = torch.randn(3, *torch.empty(sum(splits), 2).movedim(0, dim).shape, dtype=torch.float64)

    def run() -> tuple[Tensor, Tensor]:
        found, pull = torch.func.vjp(
            lambda x: ltx.psum_scatter(x, dim=dim, tiled=True, splits=splits), xs[ltx.axis_index()]
        )
        return found, pull(found)[0]

    for rank, (found, bar) in enumerate(ranks(3).run(run)):
        torch.testing.assert_close(found, xs.sum(0).split(splits, dim)[rank])
        torch.testing.assert_close(bar, xs.sum(0))


@pytest.mark.parametrize("dim", [0, 1])
def test_all_to_all(ranks: Ranks, dim: int) -> None:
    """Row r of the table is how rank r splits; what it receives is column r, and gradients go back."""
    table = torch.randint(0, 4, (3, 3)).tolist()
    xs = [torch.randn(sum(row), 2, dtype=torch.float64).movedim(0, dim) for row in table]

    def run() -> tuple[Tensor, tuple[int, ...], Tensor]:
        rank = int(ltx.axis_index())
        (found, received) = ltx.all_to_all(xs[rank], dim, dim, splits=table[rank])
        grad = torch.func.grad(lambda x: (ltx.all_to_all(x, dim, dim, splits=table[rank])[0] ** 2).sum() / 2)(xs[rank])
        return found, received, grad

    for rank, (found, received, grad) in enumerate(ranks(3).run(run)):
        want = [x.split(row, dim)[rank] for x, row in zip(xs, table, strict=True)]
        assert torch.equal(found, torch.cat(want, dim))
        assert received == tuple(row[rank] for row in table)
        torch.testing.assert_close(grad, xs[rank])


def test_alone() -> None:
    x = torch.randn(3, 2)
    assert torch.equal(ltx.gather_all_tensors(x)[0], x)
    assert torch.equal(ltx.all_gather(x, tiled=True, splits=[3]), x)
    assert torch.equal(ltx.psum_scatter(x, tiled=True, splits=[3]), x)
    found, received = ltx.all_to_all(x, 0, 0, splits=[3])
    assert torch.equal(found, x)
    assert received == (3,)


CALLS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "gather": (ltx.gather_all_tensors, "gather_all_tensors has no simulated form"),
    "all_gather": (lambda x: ltx.all_gather(x, tiled=True, splits=[1, 1]), "all_gather(splits=) has no simulated form"),
    "scatter": (lambda x: ltx.psum_scatter(x, tiled=True, splits=[1, 1]), "has no simulated form"),
    "all_to_all": (lambda x: ltx.all_to_all(x, 0, 0, splits=[1, 1]), "has no simulated form"),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_no_simulated_and_no_compiled_form(call: str) -> None:
    fn, message = CALLS[call]
    with pytest.raises(AxisError) as caught:
        ltx.vmap(fn)(torch.ones(2, 2))
    assert message in str(caught.value)
    with pytest.raises(RuntimeError, match=r"UnsupportedError: .* can't be compiled"):  # Dynamo's wrapper around it
        torch.compile(fn, fullgraph=True, backend="eager")(torch.ones(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ltx.all_gather(x, splits=[3]), "splits= needs tiled=True"),
        (lambda x: ltx.psum_scatter(x, splits=[3]), "splits= needs tiled=True"),
        (lambda x: ltx.all_gather(x, tiled=True, splits=[1, 2]), "splits must be 1 lengths, one for each rank"),
        (lambda x: ltx.all_gather(x, tiled=True, splits=[-1]), "got [-1]"),
        (
            lambda x: ltx.all_gather(x, tiled=True, splits=[2]),
            "part has length 3 along dimension 0, but splits[0] is 2",
        ),
        (lambda x: ltx.psum_scatter(x, tiled=True, splits=[2]), "splits [2] add up to 2, but dimension 0"),
        (lambda x: ltx.all_to_all(x, 1, 0, splits=[2]), "dim=1 is out of range"),
    ],
)
def test_arguments(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(AxisError) as caught:
        call(torch.ones(3))
    assert message in str(caught.value)


@pytest.mark.parametrize("op", ["all_gather", "psum_scatter"])
@pytest.mark.parametrize("known", [False, True])
def test_splits_that_differ_between_ranks(torn: Callable[..., Any], op: str, known: bool) -> None:
    """Padded to the same length they would pair, and rank 1 would take padding for data."""
    calls = {
        "all_gather": lambda rank, splits: ltx.all_gather(torch.ones(splits[rank]), tiled=True, splits=splits),
        "psum_scatter": lambda rank, splits: ltx.psum_scatter(torch.ones(sum(splits)), tiled=True, splits=splits),
    }

    def run() -> str:
        rank = int(ltx.axis_index())
        choices = [(1, 3), (2, 3)] if op == "all_gather" else [(1, 3), (3, 1)]
        if known:
            for splits in choices:
                calls[op](rank, splits)
        with pytest.raises(RankMismatchError) as caught:
            calls[op](rank, choices[rank])
        return str(caught.value)

    found = list(torn(run))
    assert all(op in text for text in found)
    assert known or all("splits [1, 3]" in text for text in found)


def test_all_to_all_nobody_raises_alone(ranks: Ranks) -> None:
    def run() -> list[str]:
        rank = int(ltx.axis_index())
        found = []
        # Rank 1's splits don't add up; then only rank 0 receives chunks of unequal lengths.
        for splits, concat_dim in (([2, 2 + rank], 0), ([1 + rank, 3 - rank] if rank else [1, 3], 1)):
            with pytest.raises(AxisError) as caught:
                ltx.all_to_all(torch.ones(4, 2), 0, concat_dim, splits=splits)
            found.append(str(caught.value))
        return found

    first, second = ranks(2).run(run)
    assert "the splits of ranks [1] don't fit" in first[0]
    assert "splits [2, 3] add up to 5" in second[0]
    assert "can't be concatenated" in first[1].replace("\n", " ")
    assert first[1] == second[1]
