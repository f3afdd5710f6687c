"""Lanes: sums through shared memory are those of the sockets."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ltx import wire
from ltx.runtime.pool import Pool
from ltx.wire.shared import PIECE_BYTES, PIECES

from .conftest import OnFreshAxis

Ranks = Callable[[int], Pool]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]


def _sums(numels: list[int], dtypes: list[torch.dtype], seed: int) -> tuple[bool, list[Tensor], list[Tensor]]:
    """(are there lanes, sums through the lane, sums through sockets); all sums are under way at once."""
    line = wire.resolve(None).backing.line
    channel = line.bucket_channel(0)
    torch.manual_seed(seed + line.rank)
    tensors = [(torch.randn(n) * 50).to(dtype) for n in numels for dtype in dtypes]
    tickets = [channel.issue("sum", x.clone(), "test") for x in tensors]
    lane = [ticket.wait() for ticket in tickets[::-1]][::-1]  # waiting in another order changes nothing
    return channel.lane is not None, lane, [line.user.issue("sum", x.clone(), "test").wait() for x in tensors]


@pytest.mark.parametrize("n", [2, 3])
def test_small_sums(ranks: Ranks, n: int, seed: int) -> None:
    for has_lane, lane, sockets in ranks(n).run(_sums, [1, 2, 3, 1000, 1001], DTYPES, seed):
        assert has_lane, "ranks of one machine"
        for a, b in zip(lane, sockets, strict=True):
            tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(a.dtype, 1e-6)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=100 * tolerance * (n > 2))


def test_sums_larger_than_the_lane(ranks: Ranks, seed: int) -> None:
    piece = PIECE_BYTES // 4
    numels = [piece - 1, piece, piece + 1, (PIECES + 1) * piece + 7]
    results = ranks(2).run(_sums, numels, [torch.float32], seed)
    for a, b, c, d in zip(*results.rank(0)[1:], *results.rank(1)[1:], strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c), "the same bits on both ranks"
        assert torch.equal(a, d)


def test_lanes_can_be_turned_off(torn: OnFreshAxis) -> None:
    def has_lane() -> bool:
        return wire.resolve(None).backing.line.bucket_channel(1).lane is not None

    def without() -> bool:
        os.environ["LTX_SHARED_MEMORY"] = "0" if wire.resolve(None).backing.rank == 1 else "1"
        try:
            return has_lane()
        finally:
            del os.environ["LTX_SHARED_MEMORY"]

    assert torn(has_lane).replicated()
    assert not torn(without).replicated(), "one rank without is enough"
