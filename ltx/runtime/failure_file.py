"""Which rank of a launcher's failed first: ranks write what they raise, and when, to files that the launcher names."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ltx.errors import message_of
from ltx.runtime.described import place_of_error

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_NOTED = "_ltx_noted"
# Of what a rank raises because a peer has failed.
_CONSEQUENCES = ("PeerLostError", "StoreGoneError", "DeadlockDetectedError", "CollectiveTimeoutError")


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
    genuine = [rank for rank, end in told.items() if end.kind not in _CONSEQUENCES]
    silent = [rank for rank, end in ended.items() if not end.kind]
    unasked = [rank for rank in silent if "SIGTERM" not in ended[rank].text]  # by which the launcher ends the others
    return min(genuine or unasked or told or silent, key=lambda rank: (ended[rank].at_s, rank))


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


def told_failures(logs: Path, failures: Mapping[int, Any]) -> str:
    """What to say of a run that failed: the first failure, and the others' in a line.

    Args:
        logs: where the launcher has the ranks leave word.
        failures: torch's, by rank: of those that had ended when the launcher looked.
    """
    ended = {rank: Ended(_exit_text(failure.exitcode)) for rank, failure in failures.items()}
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
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


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"was killed by {name}"
