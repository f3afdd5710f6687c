"""The conformance suites, run once more on a backend that orders streams (``pytest --streams``)."""

from __future__ import annotations

import re

import pytest

from tests.programs import printed


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
    options = ("--streams", "--full", "--part", part, "-q", tests, "-k", chosen)
    said = printed("-m", "pytest", *options, timeout_s=600)
    assert re.search(r"^\d{2,} passed, \d+ deselected", said, re.MULTILINE), said[-4000:]
