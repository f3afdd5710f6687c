"""Random inputs that the rows of a module share, since processes do many rows in one run."""

from __future__ import annotations

import os
import secrets

import pytest

# A script that is run by hand: pytest would import it for its doctests, and it needs JAX.
collect_ignore = ["jax_table.py"]


@pytest.fixture(scope="module")
def drawn() -> int:
    """A seed drawn once for a module; LTX_SEED fixes it. Tests print it, so that failures show it."""
    return int(os.environ.get("LTX_SEED") or secrets.randbelow(2**31))
