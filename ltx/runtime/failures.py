"""The errors of a pool's runs, and what they say about the ranks that failed."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from ltx.errors import CallFailedError, CallTimeoutError, WorkerError
from ltx.runtime.messages import At, Failure, Idle, Result

_ENDED = "The workers were ended, with what they had kept; the next run starts new ones."
_KEPT = "The workers keep their state, and the next run begins with a new world."


def failure_error(
    name: str, answers: Mapping[int, Any], ranks: Sequence[int], size: int, timeout_s: float | None, kept: bool | None
) -> WorkerError:
    """The error for a run that didn't succeed everywhere: the first failure in full, the others in a line.

    Args:
        name: what ran.
        answers: what came from each rank; those that didn't answer are absent.
        ranks: those that it ran on, of `size`.
        size: the number of workers.
        timeout_s: how long it could take.
        kept: whether the workers are still there; None if nobody expects it.
    """
    after = "" if kept is None else _KEPT if kept else _ENDED
    # An ended process comes first: peers that fail because of it do so after it. One that gave up when it was asked to
    # comes last.
    silent = [rank for rank in ranks if isinstance(answers.get(rank), At | None)]
    came = {rank: answer for rank, answer in answers.items() if rank not in silent}
    failed = {rank: _came(answer) for rank, answer in came.items() if not isinstance(answer, Result)}
    genuine = [rank for rank in failed if not getattr(came[rank], "cancelled", False)]
    if not genuine:
        late = sorted({*silent, *failed})
        done = sorted(came.keys() - failed.keys())
        return CallTimeoutError(
            f"{name} didn't return on rank{'s' * (len(late) > 1)} {_listed(late)} of {size} within {timeout_s:g} s"
            + (f", while it returned on {_listed(done)}" if done else "")
            + f": {'; '.join(f'rank {rank} {told_where(answers.get(rank))}' for rank in late)}. A rank that waits in a "
            "collective waits for one that doesn't take part. Give a longer timeout if it only needs that."
            + f" {after}".rstrip()
        )
    first = min(genuine, key=lambda rank: (failed[rank], rank))
    answer = answers[first]
    others = [f"rank {rank} {_in_short(answers[rank])}" for rank in sorted(failed) if rank != first]
    others += [f"rank {rank} {told_where(answers.get(rank))}" for rank in silent]
    rest = f"\nOther ranks: {'; '.join(others)}." if others else ""
    if kept is False:
        rest += f"\n{after}"
    error = CallFailedError()
    error.rank = first
    if isinstance(answer, str):
        when = f"before it could run {name}" if isinstance(answer, Idle) else f"while it ran {name}"
        error.args = (f"rank {first} of {size} {answer} {when}.{rest}",)
        return error
    error.type_name, error.traceback_text = answer.type_name, answer.traceback_text
    error.args = (
        f"rank {first} of {size} raised {answer.type_name}: {answer.message}\n\nOn rank {first}: "
        f"{answer.traceback_text.rstrip()}\n{rest}".rstrip(),
    )
    error.__cause__ = _original(answer)
    return error


def told_where(answer: Any) -> str:
    """Where a rank was that was asked to give up, in words; `answer` is None or an At if it didn't."""
    if answer is None:
        return "didn't give up (it is in code that Python can't interrupt)"
    if isinstance(answer, At) and answer.caught:
        return f"didn't give up (it catches KeyboardInterrupt, as BaseException, and goes on, at {answer.where})"
    if isinstance(answer, At):
        return f"didn't give up (it is in code that Python can't interrupt, at {answer.where})"
    if isinstance(answer, Result):
        return "had returned"
    if isinstance(answer, Failure) and answer.cancelled:
        return f"was at {answer.where}" if answer.where else "was given up"
    return _in_short(answer)


def _came(answer: Failure | str) -> float:
    return 0.0 if isinstance(answer, str) else answer.at_s


def _in_short(answer: Failure | str) -> str:
    if isinstance(answer, str):
        return answer
    if answer.cancelled:
        return f"was given up{f' at {answer.where}' if answer.where else ''}"
    line = answer.message.partition("\n")[0].rstrip(".")
    return f"raised {answer.type_name}: {line[:160]}{'...' * (len(line) > 160)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _original(failure: Failure) -> BaseException | None:
    try:
        original = pickle.loads(failure.pickled) if failure.pickled is not None else None
    except Exception:  # its class takes other arguments than it keeps, or isn't importable here
        return None
    return original if isinstance(original, BaseException) else None
