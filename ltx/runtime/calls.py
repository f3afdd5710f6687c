"""A call as it travels to the workers, and the answer as it comes back.

The function's own module is sent by value (cloudpickle): a worker may not be able to import a notebook's or a test's,
and what it imported once would be out of date after an edit. Everything else is imported by the workers.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from ltx.errors import WorkerError
from ltx.runtime.crew import LTX_HOME
from ltx.runtime.messages import Failure


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        with _by_value(fn):
            call: bytes = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise WorkerError(
            f"{name_of(fn)} and its arguments can't be sent to the workers: {type(error).__name__}: {error}. Open "
            "files, locks, process groups and generators don't travel: make them inside the function."
        ) from error
    return call


@contextmanager
def _by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Let cloudpickle send what `fn`'s module defines by value, unless the workers have the same module installed."""
    module = _module(fn)
    registered = module is not None and module.__name__ in cloudpickle.list_registry_pickle_by_value()
    if module is None or registered or _is_installed(getattr(module, "__file__", None)):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _module(fn: Any) -> ModuleType | None:
    """The module of the user's function inside partials, decorators and bound methods."""
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__") or inspect.ismethod(fn):
        fn = getattr(fn, "func", None) or getattr(fn, "__wrapped__", None) or getattr(fn, "__func__", None)
    return sys.modules.get(getattr(fn, "__module__", None) or "")


@functools.lru_cache
def _is_installed(file: str | None) -> bool:
    """Whether a module's file belongs to Python, to an installed package or to ltx."""
    if file is None:
        return True
    paths = sysconfig.get_paths()
    homes = [Path(paths[key]).resolve() for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(home in Path(file).resolve().parents for home in (*homes, LTX_HOME))


def unpickle_answer(frame: bytes) -> Any:
    try:
        return pickle.loads(frame)
    except Exception as error:
        message = f"the driver couldn't unpickle the result: {error}"
        return Failure(type(error).__qualname__, message, message, time.monotonic())


def name_of(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or fn)
