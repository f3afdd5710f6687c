"""The conformance suites, run once more on a backend that orders streams (``pytest --streams``)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tests", "chosen", "part"),
    [
        # Dynamo refuses to compile while the fake device watches what the host does.
        ("tests/contract/conformance/test_conformance.py", "2_processes and eager and not aot_eager", "1/1000"),
        ("tests/contract/hooks/test_conformance.py", "processes or training or buckets", "1/4"),
        ("tests/contract/strategies/test_conformance.py", "processes", "1/4"),
        ("tests/contract/nn/test_sync_batch_norm.py", "not compiled", "1/1"),
    ],
)
def test_conformance(tests: str, chosen: str, part: str) -> None:
    command = [sys.executable, "-m", "pytest", "--streams", "--full", "--part", part, "-q", tests, "-k", chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.search(r"^\d{2,} passed, \d+ deselected", done.stdout, re.MULTILINE), done.stdout[-4000:]
