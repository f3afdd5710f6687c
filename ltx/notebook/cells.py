"""A notebook's cell on a worker: run in a namespace that stays from cell to cell."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Mapping
from typing import Any

from ltx.runtime.show import looks


def run_cell(source: str, name: str, given: Mapping[str, Any], wants_value: bool) -> Any:
    """Run `source` in the namespace of this worker's ``__main__``.

    Args:
        source: the cell.
        name: what tracebacks call it.
        given: names that the cell finds, and that stay.
        wants_value: give the value of the cell's last expression itself.

    Returns:
        The value of the last expression, or what it looks like (see :func:`ltx.runtime.show.looks`); None without one.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = vars(sys.modules["__main__"])
    namespace.update(given)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return value if wants_value or value is None else looks(value)
