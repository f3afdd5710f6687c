"""The tests for a GPU, on the CPU: all that they do without CUDA still works."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.full
@pytest.mark.timeout(500)
def test_gpu_on_cpu() -> None:
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--full", "tests/gpu"]
    done = subprocess.run(run, env={**os.environ, "LTX_TEST_DEVICE": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
