"""Rows that need more than ``make test`` installs: ``.ci/run`` installs the extras that they need, and runs them.

Where a package is missing they aren't collected, and the summary counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """The mark of rows that need these packages, by the names that they are imported by."""
    return pytest.mark.needs(*packages)


def found(name: str) -> Any:
    """The module `name`, or None where its package is missing, and nothing that needs it is run."""
    return import_module(name) if find_spec(name.partition(".")[0]) else None


def missing(item: pytest.Item) -> list[str]:
    """The packages that `item` needs and that aren't here."""
    wanted = {name for marker in item.iter_markers("needs") for name in marker.args}
    return sorted(name for name in wanted if find_spec(name) is None)


def waiting(items: Iterable[pytest.Item]) -> str:
    """How many of the rows that were to run wait for .ci/run, and for which packages; "" if none does."""
    counts = Counter(", ".join(names) for item in items if (names := missing(item)))
    rows = "; ".join(f"{count} for {names}" for names, count in sorted(counts.items()))
    return f"WAITING {counts.total()} rows wait for .ci/run, which installs what they need: {rows}" if counts else ""
