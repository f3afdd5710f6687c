"""Fresh random inputs in every run, with the seed that reproduces a failure."""

from __future__ import annotations

import os
import secrets

import pytest
import torch


@pytest.fixture
def seed() -> int:
    """A new seed, printed (pytest shows it when the test fails); ``LTX_TEST_SEED=...`` repeats one."""
    chosen = int(os.environ.get("LTX_TEST_SEED", secrets.randbelow(2**31)))
    print(f"LTX_TEST_SEED={chosen}")
    torch.manual_seed(chosen)
    return chosen
