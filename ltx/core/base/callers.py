"""Which line of the program, and which call of it, an error is about."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from traceback import walk_stack

import torch

_LTX = Path(__file__).parents[2]
_LIBRARIES = (
    *(os.path.join(at, "") for at in (_LTX / "core", _LTX / "peers", Path(torch.__file__).parent)),
    contextlib.__file__,
)
# The functions of ltx and torch between the program's call and the collective that it issues.
_INSIDE = ("apply", "collective", "forward", "backward", "jvp", "vmap", "told", "wait", "wrapped")


def caller() -> str:
    """File and line of the innermost call from outside ltx and torch."""
    for frame, line in walk_stack(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return f"{frame.f_code.co_filename}:{line}"
    return "no line of the program (a thread of the autograd engine)"


def called(issued: str) -> str:
    """The call in the program that `issued` this collective: pmean, for example, issues a psum."""
    name = ""
    for frame, _ in walk_stack(sys._getframe(1)):
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            break
        if frame.f_globals["__name__"].startswith("ltx.core.collectives.") and code.co_name not in _INSIDE:
            name = code.co_name if code.co_name.isidentifier() and code.co_name[0] != "_" else name
    return issued if not name or issued.startswith(f"{name} ") else name
