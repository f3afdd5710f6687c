"""Which steps call compiled functions, whose guards want plain tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

# Steps in which something compiled was called.
_compiled: WeakSet[Any] = WeakSet()


def calls_compiled(fn: Any) -> bool:
    """Whether `fn` is known to call a compiled function, whose guards want plain tensors."""
    try:
        return fn in _compiled
    except TypeError:
        return False


@contextmanager
def on_compilation(fn: Any, react: Callable[[], None]) -> Iterator[None]:
    """Call `react` as soon as Dynamo begins to compile something, and remember that `fn` calls compiled functions."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return

    def begun(_: Any) -> None:
        with suppress(TypeError):
            _compiled.add(fn)
        react()

    dynamo.callback_handler.register_start_callback(begun)
    try:
        yield
    finally:
        dynamo.callback_handler.remove_start_callback(begun)
