"""The errors of a pool's runs, and what they say about the ranks that failed."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from ltx.errors import WorkerError
from ltx.runtime.messages import Failure, Result

#: After one rank failed, how long the others get to answer before they are given up.
GRACE_S = 2.0


class CallFailedError(WorkerError):
    """A call raised, or its process ended, on at least one rank; the fields are about the first to fail.

    Attributes:
        rank: the first rank to fail.
        type_name: the name of its exception's class; "" if its process ended without one.
        traceback_text: its traceback, with the worker's own frames left out.
    """

    rank: int = -1
    type_name: str = ""
    traceback_text: str = ""


class CallTimeoutError(WorkerError, TimeoutError):
    """A call didn't return on all ranks within its ``timeout_s``."""


def failure_error(name: str, answers: Mapping[int, Any], size: int, timeout_s: float | None) -> WorkerError:
    """The error for a run that didn't succeed everywhere: the first failure in full, the others in a line."""
    silent = [rank for rank in range(size) if rank not in answers]
    # An ended process comes first: peers that fail because of it do so after it.
    failed = {rank: (0.0 if isinstance(a, str) else a.at_s) for rank, a in answers.items() if not isinstance(a, Result)}
    if not failed:
        done = sorted(answers)
        return CallTimeoutError(
            f"{name} didn't return on rank{'s' * (len(silent) > 1)} {_listed(silent)} of {size} within {timeout_s:g} s"
            + (f", while it returned on {_listed(done)}" if done else "")
            + ". A rank that waits in a collective waits for one that doesn't take part. The workers were ended; the "
            "next run starts new ones. Give a larger timeout_s if it only needs longer."
        )
    first = min(failed, key=lambda rank: (failed[rank], rank))
    answer = answers[first]
    others = [f"rank {rank} {_in_short(answers[rank])}" for rank in sorted(failed) if rank != first]
    if silent:
        others.append(f"no answer from {_listed(silent)} within {GRACE_S:g} s after it (waiting in a collective?)")
    rest = f"\nOther ranks: {'; '.join(others)}." if others else ""
    error = CallFailedError()
    error.rank = first
    if isinstance(answer, str):
        error.args = (f"rank {first} of {size} {answer} while it ran {name}.{rest}",)
        return error
    error.type_name, error.traceback_text = answer.type_name, answer.traceback_text
    error.args = (
        f"rank {first} of {size} raised {answer.type_name}: {answer.message}\n\nOn rank {first}: "
        f"{answer.traceback_text.rstrip()}\n{rest}".rstrip(),
    )
    error.__cause__ = _original(answer)
    return error


def _in_short(answer: Failure | str) -> str:
    if isinstance(answer, str):
        return answer
    line = answer.message.partition("\n")[0]
    return f"raised {answer.type_name}: {line[:160]}{'...' * (len(line) > 160)}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _original(failure: Failure) -> BaseException | None:
    try:
        original = pickle.loads(failure.pickled) if failure.pickled is not None else None
    except Exception:  # its class takes other arguments than it keeps, or isn't importable here
        return None
    return original if isinstance(original, BaseException) else None
