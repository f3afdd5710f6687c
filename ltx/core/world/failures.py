"""Where an exception was raised, in the user's own code, and the word of it that a rank leaves for its launcher.

Frames of ltx say nothing about the user's mistake.
"""

from __future__ import annotations

import json
import linecache
import os
import site
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ltx.core.base.errors import message_of

LTX_HOME = Path(__file__).resolve().parents[2]
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_NOTED = "_ltx_noted"


def is_installed(file: str | None) -> bool:
    """Whether a module's file belongs to Python, to an installed package or to ltx."""
    if file is None:
        return True
    paths = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    # Those of the system too, which a virtual environment may see, and the user's own.
    homes = {Path(path).resolve() for path in (*paths, *site.getsitepackages(), site.getusersitepackages())}
    return any(home in Path(file).resolve().parents for home in (*homes, LTX_HOME))


def place_of(trace: traceback.StackSummary) -> str:
    """The innermost frame of the user's in `trace`, in words; "" if there is none."""
    frames = [frame for frame in trace if not is_ours(frame.filename)]
    own = [frame for frame in frames if not is_installed(frame.filename)] or frames
    return in_words(own[-1]) if own else ""


def place_of_error(error: BaseException) -> str:
    """The innermost frame of the user's in which `error` was raised, in words; "" if there is none."""
    return place_of(traceback.extract_tb(error.__traceback__))


def in_words(frame: traceback.FrameSummary) -> str:
    name = label(frame.filename)
    file = name if name.startswith("<") else Path(name).name
    return f"{file}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")


def is_ours(filename: str) -> bool:
    return LTX_HOME in Path(filename).parents


def label(filename: str) -> str:
    """What the driver calls the cell that `filename` stands for; `filename` itself for a file."""
    entry = linecache.cache.get(filename)
    return entry[3] if entry is not None and len(entry) == 4 and entry[1] is None else filename


def note_failure(error: BaseException) -> None:
    """In a rank: leave word of what it has raised for the launcher, now; how long its teardown takes says nothing."""
    file = os.environ.get(_ERROR_FILE)
    if not file or (isinstance(error, SystemExit) and not error.code) or getattr(error, _NOTED, False):
        return
    now, rank = time.time(), os.environ.get("RANK")
    extra = {"py_callstack": "", "timestamp": str(int(now)), "at_s": now, "rank": rank}
    extra |= {"kind": type(error).__name__, "where": place_of_error(error)}
    with suppress(OSError, AttributeError):
        Path(file).write_text(json.dumps({"message": {"message": message_of(error), "extraInfo": extra}}))
        setattr(error, _NOTED, True)


def note_uncaught(then: Callable[[BaseException], None]) -> None:
    """In a rank: have what ends the program noted, and `then` called with it."""
    before = sys.excepthook
    if getattr(before, _NOTED, False):
        return

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        note_failure(error)
        before(kind, error, where)
        then(error)

    setattr(hook, _NOTED, True)
    sys.excepthook = hook
