"""A call as it travels to the workers, and the answer as it comes back.

Functions and classes are sent by value (cloudpickle) if they are of the called function's own module, which a notebook
or an editor may have changed since a worker imported it, or of a module that the workers can't import. Those of all
other modules are imported by the workers.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle

from ltx.errors import WorkerError
from ltx.runtime.messages import Failure

_LTX_HOME = Path(__file__).resolve().parents[1]


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The frame that asks a worker for ``fn(*args, **kwargs)``. Raises WorkerError for what can't be pickled."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, _module_name(fn))
    try:
        pickler.dump((fn, args, kwargs))
    except Exception as error:
        raise WorkerError(
            f"{name_of(fn)} and its arguments can't be sent to the workers: {type(error).__name__}: {error}. Open "
            "files, locks, process groups and generators don't travel: make them inside the function."
        ) from error
    finally:
        pickler.unregister()
    return stream.getvalue()


def unpickle_answer(frame: bytes) -> Any:
    try:
        return pickle.loads(frame)
    except Exception as error:
        message = f"the driver couldn't unpickle the result: {error}"
        return Failure(type(error).__qualname__, message, message, time.monotonic())


def name_of(fn: Any) -> str:
    """What messages call a function."""
    return str(getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or fn)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which sends by value what is registered with it: here, for the time of one dump."""

    def __init__(self, stream: io.BytesIO, own_module: str):
        super().__init__(stream)
        self._seen: set[str] = set()
        self._registered: list[str] = []
        self._look_at(own_module, importable=False)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type):
            self._look_at(getattr(obj, "__module__", None) or "")
        return super().reducer_override(obj)

    def unregister(self) -> None:
        for name in self._registered:
            with suppress(ValueError, KeyError):
                cloudpickle.unregister_pickle_by_value(sys.modules[name])

    def _look_at(self, name: str, importable: bool | None = None) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        module = sys.modules.get(name)
        if module is None or name == "__main__" or _is_installed(getattr(module, "__file__", None)):
            return
        if importable is None:
            importable = _finds(name, module.__file__)
        if not importable and name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(name)


def _module_name(fn: Any) -> str:
    """The module of the user's function inside partials, decorators and bound methods."""
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__") or inspect.ismethod(fn):
        fn = getattr(fn, "func", None) or getattr(fn, "__wrapped__", None) or getattr(fn, "__func__", None)
    return getattr(fn, "__module__", None) or ""


def _finds(name: str, file: str | None) -> bool:
    """Whether importing the module `name` afresh, with this process' ``sys.path``, would find its file."""
    path, spec = None, None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(".".join(parts[:end]), path) for find in finders if find is not None)
        spec = next((found for found in specs if found is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and file is not None and spec.origin == file


@functools.lru_cache
def _is_installed(file: str | None) -> bool:
    """Whether a module's file belongs to Python, to an installed package or to ltx."""
    if file is None:
        return True
    paths = sysconfig.get_paths()
    homes = [Path(paths[key]).resolve() for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(home in Path(file).resolve().parents for home in (*homes, _LTX_HOME))
