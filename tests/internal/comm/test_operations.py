"""Every operation of the wire gives the same through shared memory and through sockets."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from ltx.core import comm
from ltx.core.collectives import linear
from ltx.core.comm import operations
from ltx.core.comm.backends import is_gloo
from ltx.core.comm.operations import OPERATIONS
from tests.kinds import OnNewAxis
from tests.train_on import raised_by

ARGUMENTS: dict[str, list[tuple[int, ...]]] = {
    "broadcast": [(0,), (1,)],
    "gather": [(0,), (1,)],
    "scatter": [(0,), (1,)],
    "ppermute": [(0, 1), (1, 0, 0, 1), (1, 1), ()],
}
#: Elements of one rank's row: none, few, an odd number over several pieces and slots of the shared memory.
LENGTHS = (1, 5, 1_200_001)


Found = dict[tuple[str, tuple[int, ...]], tuple[torch.dtype, torch.Size, str]]


def _buffer(dtype: torch.dtype, length: int, seed: int) -> Tensor:
    """What a rank gives: two rows of whole numbers, which add up exactly in any order."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 50, (2, length), generator=draw).to(dtype)


def _results(dtype: torch.dtype, length: int, seed: int) -> Found:
    """What each operation gives, by its digest: megabytes would take seconds on their way to the driver."""
    axis_comm: comm.AxisComm = comm.resolve("data").comm
    x = _buffer(dtype, length, seed + axis_comm.rank)
    found: Found = {}
    for operation in OPERATIONS:
        if operation in ("psum", "psum_scatter") and dtype == torch.bool:
            continue
        for arguments in ARGUMENTS.get(operation, [()]):
            y = axis_comm.user.issue(operation, x.clone(), operation, arguments).wait()
            found[operation, arguments] = y.dtype, y.shape, hashlib.sha256(y.view(torch.uint8).numpy()).hexdigest()
    return found


@pytest.mark.timeout(30)  # the peer isn't told by a deadline, but at once
@pytest.mark.parametrize("where", ["start", "before"])
def test_no_memory_for_a_collective_on_one_rank(where: str, on_new_axis: OnNewAxis) -> None:
    """Its next one would pair with this one of its peers."""

    def run() -> list[str]:
        # The worker's own: what issues the collective, and what prepares its buffer.
        rows: dict[str, Any] = {"start": operations.OPERATIONS, "before": linear.RULES}[where]  # type: ignore[dict-item]
        rank, row = int(ltx.axis_index()), rows["all_gather"]
        ltx.all_gather(torch.ones(2))

        def fail(*_: object) -> Any:
            rows["all_gather"] = row
            raise torch.OutOfMemoryError("no memory")

        if rank == 0:
            rows["all_gather"] = replace(row, **{where: fail})
        return [raised_by(ltx.all_gather, torch.full((2,), value)) for value in (1.0, 2.0)[: 2 - rank]]

    (first, then), (told,) = on_new_axis(run, sockets=True)
    assert first == "OutOfMemoryError: no memory"
    assert "out of step since an earlier failure" in then
    assert "no memory" in then or "couldn't be issued for want of memory" in then
    assert "DeadlockDetectedError: rank 1: rank 0 has left all_gather on axis 'data' halfway" in told


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_shared_memory_and_sockets(on_new_axis: OnNewAxis, dtype: torch.dtype, length: int, seed: int) -> None:
    if dtype != torch.float32:
        length = min(length, 200_001)
    short, long = (on_new_axis(lambda: _results(dtype, length, seed), sockets=sockets) for sockets in (False, True))
    assert list(short) == list(long)


def _in_turn() -> tuple[bool, list[int], list[float]]:
    """Threads of the buckets' and of the user's group, whether the former is known for gloo's, and sums on it."""
    axis_comm: comm.AxisComm = comm.resolve("data").comm
    bucket, user = axis_comm.bucket_channel(0).group, axis_comm.user.group
    threads = [group._get_backend(torch.device("cpu")).options._threads for group in (bucket, user)]
    xs = [torch.ones(3) * k for k in range(5)]
    for work in [dist.all_reduce(x, group=bucket, async_op=True) for x in xs]:
        work.wait()
    return is_gloo(bucket), threads, [x[0].item() for x in xs]


def test_buckets_travel_one_after_the_other(on_new_axis: OnNewAxis) -> None:
    """Two at once would share the link, and the first take as long as both."""
    for found in on_new_axis(_in_turn, sockets=True):
        assert found == (True, [1, 2], [0.0, 2.0, 4.0, 6.0, 8.0])
