"""gather, scatter and psum_to: what the conformance table leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.errors import AxisError, RankMismatchError
from tests.kinds import Ranks

DTYPES = [torch.bool, torch.int64, torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64]
SHAPES = [(), (0,), (3, 2), (2, 0)]


def _draw(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.randn(n, *shape) * 3).abs().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_shapes(ranks: Ranks, dtype: torch.dtype, seed: int) -> None:
    """Also what torch can't add up, empty and 0-dim; there and back is the identity."""
    n = 3

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        gathered = ltx.gather(x, dst=2)
        return gathered, ltx.scatter(gathered, src=2)

    for shape in SHAPES:
        xs = _draw(n, shape, dtype)
        want = [torch.zeros_like(xs)] * (n - 1) + [xs]
        results = list(ranks(n).run(lambda xs: run(xs[int(ltx.axis_index())]), xs))
        results.extend(zip(*ltx.vmap(run)(xs), strict=True))
        for i, (gathered, back) in enumerate(results):
            rank = i % n
            assert gathered.dtype == back.dtype == dtype
            assert torch.equal(gathered.view(torch.uint8), want[rank].view(torch.uint8))
            assert torch.equal(back, xs[rank]) or dtype is torch.float8_e4m3fn
        assert (ltx.gather(xs[0]).shape, ltx.scatter(xs[:1]).shape) == ((1, *shape), shape)  # a world of one


@pytest.mark.full
@pytest.mark.parametrize("sockets", [False, True])
def test_large_ones_as_in_torch(on_new_axis: Callable[..., Any], sockets: bool) -> None:
    """More than one message: against torch.distributed's own."""

    def run() -> bool:
        rank, length = dist.get_rank(), 300_001
        x = torch.arange(2 * length, dtype=torch.float64).view(2, length).sin() * (1 + rank)
        rows = [torch.empty_like(x[0]) for _ in range(2)]
        dist.gather(x[0], rows if rank == 1 else None, group_dst=1)
        part = torch.empty(length, dtype=torch.float64)
        dist.scatter(part, list(x) if rank == 0 else None, group_src=0)
        total = x.clone()
        dist.reduce(total, group_dst=1)
        nothing = torch.zeros_like(x)
        return all(
            (
                torch.equal(ltx.gather(x[0], dst=1), torch.stack(rows) if rank == 1 else nothing),
                torch.equal(ltx.scatter(x, src=0), part),
                torch.equal(ltx.psum_to(x, dst=1), total if rank == 1 else nothing),
            )
        )

    assert on_new_axis(run, sockets=sockets).replicated()


def test_only_src_s_values_matter(ranks: Ranks) -> None:
    """NaN on the others doesn't leak, forward or backward."""

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mine = torch.where(ltx.axis_index() == 1, x, torch.nan)
        grad, value = torch.func.grad_and_value(lambda x: (ltx.scatter(x, src=1) * (1 + ltx.axis_index())).sum())(mine)
        return grad, value, torch.func.grad(lambda x: ltx.gather(x, dst=1).sum())(x)

    x = torch.tensor([3.0, 5.0])
    for grad, value, of_gather in (ltx.vmap(run)(x.expand(2, 2)), ranks(2).run(run, x).stack()):
        assert value.tolist() == [3.0, 10.0]
        assert grad.tolist() == [[0.0, 0.0], [1.0, 2.0]]
        assert of_gather.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_what_is_sent(ranks: Ranks) -> None:
    """One message each; gather sends what a rank has, not what all have."""

    def run() -> list[tuple[str, int]]:
        x = torch.ones(2, 4)
        with ltx.profile.record() as trace:
            ltx.gather({"a": x}, dst=1)
            ltx.scatter(x)
            ltx.psum_to(x)
        return [(event.operation, event.nbytes) for event in trace.events]

    assert ranks(2).run(run).replicated() == [("gather", 32), ("scatter", 16), ("psum", 32)]


def test_whole_numbers(ranks: Ranks) -> None:
    """Booleans count as int64, and numbers as tensors, as in psum."""

    def run() -> tuple[Tensor, Tensor]:
        return ltx.psum_to(torch.tensor([True, False])), ltx.psum_to(2)

    (flags, two), (none, nothing) = ranks(2).run(run)
    assert flags.tolist() == [2, 0]
    assert flags.dtype == none.dtype == torch.int64
    assert (two.item(), nothing.item()) == (4, 0)


CALLS: dict[str, Callable[[Tensor, int], Any]] = {
    "gather: dst": lambda x, rank: ltx.gather(x, dst=rank),
    "scatter: src": lambda x, rank: ltx.scatter(x, src=rank),
    "psum_to: dst": lambda x, rank: ltx.psum_to(x, dst=rank),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_that_are_not_on_the_axis(ranks: Ranks, call: str, rank: int) -> None:
    text = rf"{call}={rank} isn't an index on an axis of 2 ranks, 0 to 1\. It counts on the axis, not in the world\."

    def both() -> None:
        with pytest.raises(AxisError, match=text):
            CALLS[call](torch.ones(2), rank)

    ranks(2).run(both)
    with pytest.raises(AxisError, match=text):
        ltx.vmap(lambda x: CALLS[call](x, rank))(torch.ones(2, 2))


def test_ranks_that_disagree(ranks: Ranks) -> None:
    def run() -> list[str]:
        rank, found = int(ltx.axis_index()), []
        for call in CALLS.values():
            with pytest.raises(RankMismatchError) as caught:
                call(torch.ones(2, 11), rank)  # which is new to both
            found.append(str(caught.value))
        with pytest.raises(RankMismatchError) as caught:
            ltx.gather(torch.ones(12 + rank))
        return [*found, str(caught.value)]

    *arguments, shape = ranks(2).run(run).replicated()
    assert all("its arguments: rank 0: arguments [(0" in text and "rank 1: arguments [(1" in text for text in arguments)
    assert "rank 0: float32[12]; rank 1: float32[13]" in shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ltx.scatter(x), "scatter over 2 ranks: dimension 0 of a tensor of shape [3] must be 2, got 3"),
        (lambda x: ltx.scatter(x, tiled=True), "must be a multiple of 2, got 3"),
        (lambda x: ltx.scatter(x, dim=1), "scatter: dim=1 is out of range for a tensor of shape [3]"),
        (lambda x: ltx.gather(x, dim=2), "gather: dim=2 is out of range for a tensor of shape [3]"),
        (lambda x: ltx.gather(x.sum(), tiled=True), "Stack 0-dim tensors with tiled=False."),
    ],
)
def test_shapes_that_do_not_fit(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(AxisError) as caught:
        ltx.vmap(call)(torch.ones(2, 3))
    assert message in str(caught.value)
