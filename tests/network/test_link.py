"""Ranks on hosts of their own: network namespaces joined by a shaped bridge."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.ranks import run_ranks
from tests.network.hosts import NEEDS_LINKS, links

pytestmark = NEEDS_LINKS


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize("n", [2, 3])
def test_a_step_sends_what_is_recorded(n: int) -> None:
    """Within 3% by the count of each rank's interface without its packets' headers."""
    with links.link("1gbit", n) as link:
        everyone = json.loads(run_ranks([str(Path(__file__).with_name("hooks_sent.py"))], link, n, timeout_s=150))
    assert len(everyone) == n
    for rank, found in enumerate(everyone):
        for name, row in found.items():
            where = f"{name}, rank {rank}: {row}"
            assert row["right"], where
            assert row["sent"] == pytest.approx(row["recorded"], rel=0.03), where
        # The reference systems all-reduce the whole cotangent of a gather and keep their part of it.
        gathered, summed = found["backward of all_gather"]["sent"] / 500_000, found["psum"]["sent"] / 1_200_000
        assert gathered < 0.55 * n * summed
    assert list(Path("/run/netns").glob(f"ltx{os.getpid()}*")) == []
