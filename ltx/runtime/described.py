"""What is told of an exception: its text with the user's own frames, and where it happened.

Frames of ltx and of the interpreter's own machinery say nothing about the user's mistake. They are left out, unless
there are no others.
"""

from __future__ import annotations

import linecache
import time
import traceback
from pathlib import Path
from types import FrameType

import cloudpickle

from ltx.errors import message_of
from ltx.runtime.calls import LTX_HOME, is_installed
from ltx.runtime.messages import Failure


def failure_of(error: BaseException, doing: str = "", *, cancelled: bool = False) -> Failure:
    """`error` as it is sent to the driver; `doing` is put before its message."""
    at_s = time.monotonic()
    message = message_of(error)
    try:
        text = text_of(error)
    except Exception:
        text = message
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:
        pickled = None
    where = place_of_error(error)
    return Failure(type(error).__qualname__, doing + message, text, at_s, where, pickled, cancelled)


def text_of(error: BaseException) -> str:
    """The traceback as Python prints it, without ltx's frames."""
    told = traceback.TracebackException.from_exception(error, compact=True)
    _filter(told, set())
    return "".join(told.format())


def place_of(trace: traceback.StackSummary) -> str:
    """The innermost frame of the user's in `trace`, in words; "" if there is none."""
    frames = [frame for frame in trace if not _is_ours(frame.filename)]
    own = [frame for frame in frames if not is_installed(frame.filename)] or frames
    return _in_words(own[-1]) if own else ""


def place_of_error(error: BaseException) -> str:
    """The innermost frame of the user's in which `error` was raised, in words; "" if there is none."""
    return place_of(traceback.extract_tb(error.__traceback__))


def places_of(frame: FrameType) -> str:
    """Where a thread is: the innermost frame of the user's, and what it has called, whoever's that is."""
    trace = traceback.extract_stack(frame)
    own, innermost = place_of(trace), _in_words(trace[-1])
    return own if own == innermost else f"{own}, which has come to {innermost}"


def _in_words(frame: traceback.FrameSummary) -> str:
    name = _label(frame.filename)
    file = name if name.startswith("<") else Path(name).name
    return f"{file}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")


def _is_ours(filename: str) -> bool:
    return LTX_HOME in Path(filename).parents


def _label(filename: str) -> str:
    """What the driver calls the cell that `filename` stands for; `filename` itself for a file."""
    entry = linecache.cache.get(filename)
    return entry[3] if entry is not None and len(entry) == 4 and entry[1] is None else filename


def _labelled(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    return traceback.FrameSummary(
        _label(frame.filename),
        frame.lineno,
        frame.name,
        line=getattr(frame, "_original_line", frame.line),  # the columns are those of the line with its indentation
        end_lineno=frame.end_lineno,
        colno=frame.colno,
        end_colno=frame.end_colno,
    )


def _filter(told: traceback.TracebackException, seen: set[int]) -> None:
    """Leave ltx's frames out of `told` and of what it was caused by."""
    if id(told) in seen:
        return
    seen.add(id(told))
    kept = [frame for frame in told.stack if not _is_ours(frame.filename)]
    told.stack = traceback.StackSummary.from_list([_labelled(frame) for frame in kept or told.stack])
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _filter(other, seen)
