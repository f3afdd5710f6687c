"""What the tests on links have in common: network namespaces that stand for hosts, and who can't have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import links as links

ROOT = Path(__file__).parents[2]

#: For a module's ``pytestmark``.
NEEDS_LINKS = [pytest.mark.network, pytest.mark.skipif(links.why_not() is not None, reason=str(links.why_not()))]
