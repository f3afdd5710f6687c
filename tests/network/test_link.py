"""Ranks on hosts of their own: network namespaces joined by a shaped bridge."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import links  # noqa: E402
from benchmarks.ranks import run_ranks  # noqa: E402


@pytest.mark.network
@pytest.mark.skipif(links.why_not() is not None, reason=str(links.why_not()))
def test_what_crosses_a_real_link_and_the_bytes_that_the_ledger_counts() -> None:
    with links.link("1gbit", 2) as link:
        found = json.loads(run_ranks([str(Path(__file__).with_name("worker.py"))], link, 2, timeout_s=50))
    for name, row in found.items():
        assert row["right"], name
        # The interface also carries headers, acknowledgements, the barriers and the store.
        assert row["counted"] <= row["sent"] <= 1.05 * row["counted"] + 20_000, f"{name}: {row}"
    # The reference systems all-reduce the whole cotangent of a gather and keep their part of it.
    assert found["backward of all_gather"]["sent"] < 0.55 * found["psum"]["sent"]
    left = [name for name in os.listdir("/run/netns") if name.startswith("ltx")] if os.path.isdir("/run/netns") else []
    assert left == []
