"""What is told of an exception: its text with the user's own frames, and where it happened.

Frames of ltx and of the interpreter's own machinery say nothing about the user's mistake. They are left out, unless
there are no others. Ranks that a launcher starts write it to files that the launcher names, so that it can tell which
rank failed first.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle

from ltx.core.base.errors import message_of
from ltx.core.world.failures import in_words, is_ours, label, place_of, place_of_error
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


def places_of(frame: FrameType) -> str:
    """Where a thread is: the innermost frame of the user's, and what it has called, whoever's that is."""
    trace = traceback.extract_stack(frame)
    own, innermost = place_of(trace), in_words(trace[-1])
    return own if own == innermost else f"{own}, which has come to {innermost}"


def _labelled(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    """`frame` itself, renamed. Its columns are those of lines that it alone has whole."""
    _ = frame.line  # read while it has the name that its lines are found by
    frame.filename = label(frame.filename)
    return frame


def _filter(told: traceback.TracebackException, seen: set[int]) -> None:
    """Leave ltx's frames out of `told` and of what it was caused by."""
    if id(told) in seen:
        return
    seen.add(id(told))
    kept = [frame for frame in told.stack if not is_ours(frame.filename)]
    told.stack = traceback.StackSummary.from_list([_labelled(frame) for frame in kept or told.stack])
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _filter(other, seen)


# Of what a rank raises because a peer has failed.
CONSEQUENCES = ("PeerLostError", "StoreGoneError", "DeadlockDetectedError", "CollectiveTimeoutError")


@dataclass(frozen=True)
class Ended:
    """How a rank has ended: by an exception that it has told of, at a time; or in words that say how."""

    text: str
    kind: str = ""
    at_s: float = 0.0


def first_failure(ended: Mapping[int, Ended]) -> int:
    """The rank whose failure is the reason for the others'.

    Example:
        >>> first_failure({0: Ended("", "PeerLostError", 1.0), 1: Ended("was killed"), 2: Ended("", "ValueError", 2.0)})
        2
    """
    told = {rank: end for rank, end in ended.items() if end.kind}
    genuine = [rank for rank, end in told.items() if end.kind not in CONSEQUENCES]
    silent = [rank for rank, end in ended.items() if not end.kind]
    unasked = [rank for rank in silent if "SIGTERM" not in ended[rank].text]  # by which the launcher ends the others
    return min(genuine or unasked or told or silent, key=lambda rank: (ended[rank].at_s, rank))


def told_failures(runs: Sequence[Path], failures: Mapping[int, Any]) -> str:
    """What to say of a run that failed: the first failure, and the others' in a line.

    Args:
        runs: where the launcher had the ranks of this run leave word. A ``--log-dir`` has those of earlier runs too.
        failures: torch's, by rank: of those that had ended when the launcher looked.
    """
    ended = {rank: Ended(exit_text(failure.exitcode)) for rank, failure in failures.items()}
    attempts = [path for run in runs for path in run.glob("attempt_*")]
    attempts.sort(key=lambda path: int(path.name.rpartition("_")[2]))
    for file in attempts[-1].glob("*/error.json") if attempts else ():
        with suppress(OSError, ValueError, LookupError, TypeError):
            message = json.loads(file.read_text())["message"]
            extra = message["extraInfo"]
            line = message["message"].partition("\n")[0]
            where = f" ({extra['where']})" if extra.get("where") else ""
            ended[int(extra["rank"])] = Ended(f"raised {extra['kind']}: {line}{where}", extra["kind"], extra["at_s"])
    first = first_failure(ended)
    others = [f"rank {rank} {end.text}" for rank, end in sorted(ended.items()) if rank != first]
    rest = f"\nOther ranks: {'; '.join(others)}" if others else ""
    return f"ltx run: rank {first} {ended[first].text}{rest}"


def exit_text(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"was killed by {name}"
