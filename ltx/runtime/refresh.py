"""Modules that were edited since a worker imported them are read again, so that it runs what the driver runs.

What travels by value is always new. This is for the user's modules that workers import: those of a project, not those
that are installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ltx.errors import WorkerError

_INSTALLED = tuple(
    os.path.realpath(path) + os.sep
    for path in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
    )
)


class Modules:
    """The user's modules in this process, each as its file was when it was read."""

    def __init__(self) -> None:
        self._known = set(sys.modules)
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self._old: dict[Any, Any] = {}  # functions and classes of modules before they were read again

    def note(self) -> None:
        """Remember the files of modules that are new."""
        for name in [name for name in sys.modules if name not in self._known]:
            self._known.add(name)
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is not None and file.endswith(".py") and not os.path.realpath(file).startswith(_INSTALLED):
                self._stamps[name] = _stamp(file)

    def refresh(self) -> None:
        """Read those again whose files have changed; functions and classes that others hold of them are the new ones.

        What others have taken of them besides, such as a number, stays as it was until those are edited too.

        Raises:
            WorkerError: one can't be read. It stays as it was, and is tried again at the next call.
        """
        self.note()
        for name, stamp in reversed(self._stamps.items()):  # a module is listed before those that it imports
            module = sys.modules.get(name)
            now = _stamp(module.__file__ or "") if module is not None else None
            if module is None or now in (stamp, None):
                continue
            with suppress(OSError, NotImplementedError):
                # Its time is kept in whole seconds there.
                os.unlink(importlib.util.cache_from_source(module.__file__ or ""))
            importlib.invalidate_caches()
            try:
                self._reload(module)
            except Exception as error:
                raise WorkerError(
                    f"the module {name!r} was edited since this worker imported it, and reading it again raised "
                    f"{type(error).__name__}: {error}. Mend {module.__file__}, or start new workers."
                ) from error
            self._stamps[name] = now or stamp

    def _reload(self, module: ModuleType) -> None:
        try:
            from IPython.extensions.autoreload import superreload
        except ImportError:
            importlib.reload(module)  # `from module import f` elsewhere still has the old f
        else:
            superreload(module, importlib.reload, self._old)  # type: ignore[no-untyped-call]


def _stamp(file: str) -> tuple[int, int] | None:
    """What tells an edited file; None where there is none any more."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
