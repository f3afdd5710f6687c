"""What tests on a GPU need: they aren't collected without one, and each one's outcome is written down as it comes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ltx import Pool
from tests.gpu.device import DEVICE
from tests.streams.pool import StreamedPool

# Asks the driver's library. `torch.cuda.is_available()` would start CUDA, which forks of this process couldn't use.
if DEVICE == "cuda" and torch.cuda.device_count() == 0:
    collect_ignore_glob = ["*"]

#: Where outcomes are written, a line of JSON for each test: :mod:`benchmarks.gpu` reads them.
REPORT = "LTX_GPU_REPORT"


_failed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.append(report.nodeid)
    path = os.environ.get(REPORT)
    if path is None or (report.when != "call" and report.outcome == "passed"):
        return
    text = "" if report.outcome == "passed" else report.longreprtext
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")] or lines
    entry = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
    with open(path, "a", 1 << 16) as file:  # a line at once, beside other processes' lines
        file.write(json.dumps(entry | {"error": errors[-1] if errors else "", "text": text[-4000:]}) + "\n")


@pytest.fixture(scope="session")
def started_pools() -> Iterator[list[Pool]]:
    started: list[Pool] = []
    yield started
    for pool in started:
        pool.close()


@pytest.fixture
def pool(started_pools: list[Pool]) -> Pool:
    """A pool of one worker, whose world communicates over NCCL on a GPU, and over gloo on the CPU.

    After a test that has failed it is a new one: an error of CUDA's stays with its process.
    """
    if _failed and started_pools:
        started_pools.pop().close()
    _failed.clear()
    if not started_pools:
        started_pools.append(Pool(1, start_timeout_s=120.0, timeout_s=140.0))
    return started_pools[0]


@pytest.fixture
def workers(pool: Pool) -> Any:
    """The same; on the CPU it communicates over a backend that orders streams as NCCL does."""
    return pool if DEVICE == "cuda" else StreamedPool(pool)
