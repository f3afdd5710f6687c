"""Axes that a test may tear apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltx.runtime.per_rank import PerRank

#: What the fixture ``on_new_axis`` is.
OnFreshAxis = Callable[..., PerRank[Any]]
