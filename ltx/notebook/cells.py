"""A notebook's cell on a worker: run in a namespace that stays from cell to cell."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ltx.errors import UnsupportedError
from ltx.runtime.show import looks, show


def run_cell(source: str, name: str, given: Mapping[str, Any], wants_value: bool) -> Any:
    """Run `source` in the namespace of this worker's ``__main__``.

    Args:
        source: the cell, as IPython has transformed it.
        name: what tracebacks call it.
        given: names that the cell finds, and that stay.
        wants_value: give the value of the cell's last expression itself.

    Returns:
        The value of the last expression, or what it looks like (see :func:`ltx.runtime.show.looks`); None without one.
    """
    if "inline" in os.environ.get("MPLBACKEND", "inline"):  # the notebook's own, which shows nothing here
        os.environ["MPLBACKEND"] = "module://ltx.notebook.figures"
    if "tqdm.notebook" not in sys.modules and find_spec("tqdm") is not None:
        sys.modules["tqdm.notebook"] = _TextBars("tqdm.notebook")
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = vars(sys.modules["__main__"])
    namespace.setdefault("display", show)
    namespace["get_ipython"] = _Shell
    namespace.update(given)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    _evaluated(tree, name, "exec", namespace)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    value = _evaluated(ast.Expression(last.value), name, "eval", namespace)
    return value if wants_value or value is None else looks(value)


def _evaluated(tree: ast.Module | ast.Expression, name: str, mode: str, namespace: dict[str, Any]) -> Any:
    """What code comes to, which may await."""
    code = compile(tree, name, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    value = eval(code, namespace)
    return _loop().run_until_complete(value) if code.co_flags & inspect.CO_COROUTINE else value


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all cells: tasks go on at the next await."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


class _TextBars(ModuleType):
    """tqdm.notebook on a worker, which has no kernel for a widget to communicate with: tqdm's bars of text."""

    def __getattr__(self, name: str) -> Any:
        text = {"tqdm": "tqdm", "tqdm_notebook": "tqdm", "trange": "trange", "tnrange": "trange"}.get(name)
        if text is None:  # pickle and inspect ask every module for names: that mustn't import tqdm
            raise AttributeError(f"on workers tqdm.notebook has tqdm and trange, not {name!r}")
        return getattr(import_module("tqdm.std"), text)


def _filled(command: str) -> str:
    """`command` with ``{expression}`` and ``$name`` filled in from the names of this worker, as IPython does it."""
    from IPython.utils.text import DollarFormatter

    try:
        return DollarFormatter().vformat(command, (), vars(sys.modules["__main__"]))
    except Exception:  # IPython too leaves it to the shell then: ${HOME}, awk '{print $1}'
        return command


class _Shell:
    """What ``!command`` and ``%time`` in a cell come to: IPython makes calls of ``get_ipython()`` of them."""

    def system(self, command: str) -> None:
        """``!command``."""
        subprocess.run(_filled(command), shell=True, check=False)

    def getoutput(self, command: str) -> list[str]:
        """``lines = !command``."""
        done = subprocess.run(_filled(command), shell=True, check=False, stdout=subprocess.PIPE, text=True)
        return done.stdout.splitlines()

    def run_line_magic(self, magic: str, line: str, *_: Any, **__: Any) -> Any:
        """``%time statement``; others are the notebook's."""
        if magic != "time":
            raise UnsupportedError(
                f"%{magic} works in the notebook's own cells, not on workers, which know %time and !command. Write it "
                "in a cell without %%ltx, or write Python."
            )
        namespace, began_s, began_cpu_s = vars(sys.modules["__main__"]), time.perf_counter(), time.process_time()
        try:
            code: Any = compile(line, "<timed>", "eval")
        except SyntaxError:
            code = compile(line, "<timed>", "exec")
        value = eval(code, namespace)
        print(f"CPU time {time.process_time() - began_cpu_s:.3g} s, wall time {time.perf_counter() - began_s:.3g} s")
        return value
