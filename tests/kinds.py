"""Types of what fixtures give and of what many tests pass around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import ltx

#: What the fixture ``ranks`` is: the session's pool of so many workers.
Ranks = Callable[[int], ltx.Pool]
#: What the fixture ``on_new_axis`` is.
OnNewAxis = Callable[..., ltx.PerRank[Any]]
#: What the fixture ``started`` is.
Started = Callable[..., Any]
#: By which a fork tells the test something.
Tell = Callable[[Any], None]
Params = dict[str, Tensor]
