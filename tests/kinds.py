"""Types of what fixtures give and of what many tests pass around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import ltx

#: What the fixtures ``ranks`` (the session's pool of so many workers), ``on_new_axis`` and ``started`` are.
Ranks = Callable[[int], ltx.Pool]
OnNewAxis = Callable[..., ltx.PerRank[Any]]
Started = Callable[..., Any]
#: By which a fork tells the test something.
Tell = Callable[[Any], None]
Params = dict[str, Tensor]
