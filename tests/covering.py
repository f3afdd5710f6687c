"""Few rows of a large table in which every value still meets every other.

A defect hides in one value of one argument, or where two meet; hardly ever only where three do (D. R. Kuhn, D. R.
Wallace, A. M. Gallo, "Software fault interactions and implications for software testing", IEEE TSE 30(6), 2004). So the
fast suite runs rows by pairs, and the full one their product.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, cast

import pytest


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """The indices of rows that between them have every combination of `strength` columns' values that any row has.

    Greedy: each time the row with the most combinations that are new, the first of those with equally many. The same
    rows give the same answer.

    Example:
        >>> from itertools import product
        >>> rows = list(product("ab", "cd", "ef"))
        >>> [rows[i] for i in covering(rows)]
        [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """
    has = [
        {tuple((i, row[i]) for i in columns) for columns in combinations(range(len(row)), min(strength, len(row)))}
        for row in rows
    ]
    seen: set[object] = set()
    kept = []
    # What a row would add only shrinks, so one whose figure is still true and that stands first is the best.
    queue = [(-len(each), i) for i, each in enumerate(has)]
    heapq.heapify(queue)
    while queue and queue[0][0]:
        _, i = heapq.heappop(queue)
        new = len(has[i] - seen)
        if queue and (-new, i) > queue[0]:
            heapq.heappush(queue, (-new, i))
        elif new:
            kept.append(i)
            seen |= has[i]
    return sorted(kept)


def some(names: Iterable[str], *fast: str) -> list[Any]:
    """Rows to parametrize by: of `names` those in `fast`, and the others with ``--full``."""
    names = list(names)
    assert set(fast) <= set(names), f"{set(fast) - set(names)} aren't rows"
    return [name if name in fast else pytest.param(name, marks=pytest.mark.full) for name in names]


def fast(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What runs without ``--full``: what isn't marked full, and of tables marked covering or full(but=) some rows."""
    kept: set[pytest.Item] = set()
    tables: dict[object, list[Any]] = {}
    for item in items:
        if any(not marker.kwargs for marker in item.iter_markers("full")):
            continue
        if item.get_closest_marker("covering") or item.get_closest_marker("full"):
            tables.setdefault(cast(pytest.Function, item).function, []).append(item)
        else:
            kept.add(item)
    for table in tables.values():
        if marker := table[0].get_closest_marker("covering"):
            table = [table[i] for i in covering([_values(item, **marker.kwargs) for item in table], *marker.args)]
        if marker := table[0].get_closest_marker("full"):
            table = spread(table, marker.kwargs["but"])
        kept |= set(table)
    return kept


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """So many of the rows, at equal distances, the first among them.

    Example:
        >>> spread("abcdefgh", 3)
        ['a', 'c', 'f']
    """
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def _values(item: Any, of: Callable[..., Sequence[Hashable]] | None = None) -> Sequence[Hashable]:
    """What a row of a table is made of: its arguments, or of(**arguments)."""
    given = item.callspec.params
    if of is not None:
        return of(**given)
    return [_hashable(x) for x in given.values()]


def _hashable(x: Any) -> Hashable:
    """x, or what tells it from others: rows share their values."""
    try:
        hash(x)
    except TypeError:
        return id(x)
    return cast(Hashable, x)
