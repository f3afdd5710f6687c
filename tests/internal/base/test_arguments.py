"""What annotations allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ltx.core.base.arguments import checked
from ltx.errors import ArgumentError
from tests.train_on import refuses

ALLOWS: dict[Any, tuple[list[Any], list[Any]]] = {
    tuple[int, str]: ([(1, "a")], [(1, 2), ("a", "a"), (1,), (1, "a", 2), [1, "a"], "ab"]),
    tuple[Any, int]: ([("a", 1), (None, 2)], [(1, "a"), (1,), ("a", 1, 2)]),
    tuple[int, ...]: ([(), (1,), (1, 2)], [(1, "a"), [1]]),
    tuple[()]: ([()], [(1,)]),
    tuple[int, str] | None: ([None, (1, "a")], [(1, 1)]),
    Sequence[int]: ([[1], (1, 2)], [["a"], "1", 1]),
    list[Any]: ([[1, "a"]], [(1,)]),
    dict[str, int]: ([{"a": 1}], [[1]]),
}


@pytest.mark.parametrize("annotation", ALLOWS, ids=str)
def test_items(annotation: Any) -> None:
    def fn(value: Any) -> Any:
        return value

    fn.__annotations__["value"] = annotation
    good, bad = ALLOWS[annotation]
    for value in good:
        assert checked("value")(fn)(value) == value
    for value in bad:
        refuses(ArgumentError, "value must be", checked("value")(fn), value)
