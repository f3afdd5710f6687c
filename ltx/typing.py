"""Names for the types that signatures speak of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

#: A pytree (optree's): nested dicts, lists, tuples, namedtuples and registered nodes, with leaves of any type.
Tree: TypeAlias = Any
#: A step: ``(params, *batch) -> output``, pure in its parameters.
Step: TypeAlias = Callable[..., Any]
