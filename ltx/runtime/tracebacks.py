"""The user's line that raised an exception, and tracebacks without ltx's frames."""

from __future__ import annotations

import linecache
import os
import site
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

LTX_HOME = Path(__file__).resolve().parents[1]


def is_installed(file: str | None) -> bool:
    """Whether a module's file belongs to Python, to an installed package or to ltx."""
    if file is None:
        return True
    paths = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    # Includes the system's packages, which a virtual environment may use, and the user's.
    homes = {Path(path).resolve() for path in (*paths, *site.getsitepackages(), site.getusersitepackages())}
    return any(home in Path(file).resolve().parents for home in (*homes, LTX_HOME))


def place_of(trace: traceback.StackSummary) -> str:
    """A text that names the user's innermost frame in `trace`; "" if there is none."""
    frames = [frame for frame in trace if not is_ours(frame.filename)]
    # Methods of dataclasses, which Python generates, are in no file.
    mine = [frame for frame in frames if (frame.filename, frame.name[:2]) != ("<string>", "__")]
    own = [frame for frame in mine if not is_installed(frame.filename)] or frames
    return in_words(own[-1]) if own else ""


def place_of_error(error: BaseException) -> str:
    """A text that names the user's innermost frame in the traceback of `error`; "" if there is none."""
    return place_of(traceback.extract_tb(error.__traceback__))


def in_words(frame: traceback.FrameSummary) -> str:
    name = label(frame.filename)
    file = name if name.startswith("<") else Path(name).name
    return f"{file}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")


def is_ours(filename: str) -> bool:
    return LTX_HOME in Path(filename).parents


def is_hidden(filename: str) -> bool:
    """Whether tracebacks leave frames of this file out: ltx's, unless ``LTX_TRACEBACKS=full`` asks for them."""
    return os.environ.get("LTX_TRACEBACKS") != "full" and is_ours(filename)


def label(filename: str) -> str:
    """The notebook's name of the cell that is compiled as `filename`; `filename` itself for a file."""
    entry = linecache.cache.get(filename)
    return entry[3] if entry is not None and len(entry) == 4 and entry[1] is None else filename


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """`trace` without ltx's frames, unless there are no others."""
    kept, at = [], trace
    while at is not None:
        if not is_hidden(at.tb_frame.f_code.co_filename):
            kept.append(at)
        at = at.tb_next
    if not kept:
        return trace
    for each in reversed(kept):
        at = TracebackType(at, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return at


def hide_ours(shell: Any) -> None:
    """Hide ltx's frames in tracebacks of IPython's `shell`, unless another exception handler is installed already."""

    def show(self: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None) -> None:
        told, about = error, without_ours(trace)
        while (told := told.__cause__ or told.__context__) is not None:  # type: ignore[assignment]
            told.__traceback__ = without_ours(told.__traceback__)
        self.showtraceback((kind, error, about), tb_offset=tb_offset)

    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((Exception,), show)
