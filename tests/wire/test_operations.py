"""Every operation of the wire gives the same through shared memory and through sockets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import wire
from ltx.wire.operations import OPERATIONS

from .conftest import OnFreshAxis

ARGUMENTS: dict[str, list[tuple[int, ...]]] = {"broadcast": [(0,), (1,)], "permute": [(0, 1), (1, 0, 0, 1), (1, 1), ()]}
#: Elements of one rank's row: none, few, an odd number over several pieces and slots of the shared memory.
LENGTHS = (1, 5, 1_200_001)


def _buffers(dtype: torch.dtype, length: int) -> Tensor:
    """What the two ranks give: two rows each, of whole numbers, which add up exactly in any order."""
    xs = torch.randint(0, 2 if dtype == torch.bool else 50, (2, 2, length))
    return xs.to(dtype)


def _results(xs: Tensor) -> list[Tensor]:
    line: wire.Line = wire.resolve("data").backing.line
    found = []
    for operation in OPERATIONS:
        if operation in ("sum", "reduce_scatter") and xs.dtype == torch.bool:
            continue
        found += [
            line.user.issue(operation, xs[line.rank].clone(), operation, arguments).wait()
            for arguments in ARGUMENTS.get(operation, [()])
        ]
    return found


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_shared_memory_and_sockets(torn: OnFreshAxis, dtype: torch.dtype, length: int) -> None:
    if dtype != torch.float32:
        length = min(length, 200_001)
    xs = _buffers(dtype, length)
    short, long = torn(lambda: _results(xs)), torn(lambda: _results(xs), sockets=True)
    for rank in range(2):
        for got, want in zip(short.rank(rank), long.rank(rank), strict=True):
            assert torch.equal(got, want)
            assert got.dtype == want.dtype


@pytest.mark.parametrize("sockets", [False, True])
@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_survives_extrema(torn: OnFreshAxis, sockets: bool, whose: int, dtype: torch.dtype) -> None:
    xs = torch.randn(2, 7).to(dtype)
    xs[whose, 2], xs[1 - whose, 4], xs[0, 5] = torch.nan, torch.inf, -torch.inf

    def run() -> Any:
        x = xs[ltx.axis_index()]
        return ltx.pmax(x), ltx.pmin(x), ltx.pmax(torch.zeros(0)), ltx.pmin(x[2])

    nothing = torch.zeros(0)
    want = (xs.amax(0), xs.amin(0), nothing, xs[:, 2].amin())
    torch.testing.assert_close(torn(run, sockets=sockets).replicated(), want, rtol=0, atol=0, equal_nan=True)
