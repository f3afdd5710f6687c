"""A call's answers from all ranks, or from as many as answer in time, and the errors for the ranks that failed.

The first failure, the time limit and an interrupt end the waiting alike: the ranks that are still busy are asked to
give up, and get a moment to say where they were.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ltx.errors import CallFailedError, CallInterruptedError, CallTimeoutError, WorkerError
from ltx.runtime.failures import CONSEQUENCES
from ltx.runtime.messages import At, Failure, Idle, Message, Result
from ltx.runtime.worker_group import WorkerGroup

#: After a rank failed, how long the others get to answer by themselves: most fail for the same reason, or are told.
PATIENCE_S = 0.5
#: How long a rank that was asked to give up gets to do so, unless the pool says otherwise.
GRACE_S = 3.0
# After this long of it, what is going to be lost is told.
_TELL_S = 1.0


def collect(
    workers: WorkerGroup,
    number: int,
    call: Message,
    ranks: Sequence[int],
    name: str,
    limit_s: float | None,
    grace_s: float | None = None,
) -> dict[int, Any]:
    """Send call `number` to `ranks` and gather the answers: a Result, a Failure, or words on how a process ended.

    Ranks that don't answer are absent, or said where they were when they were asked to give up: an At.

    Raises:
        CallInterruptedError: a KeyboardInterrupt came in; its ``kept`` says whether all ranks have given up.
    """
    answers: dict[int, Any] = {}
    for rank in ranks:
        if not workers.send(rank, call):  # one that goes after this is found out below
            answers[rank] = Idle(workers.exit_text(rank))
    grace_s = GRACE_S if grace_s is None else grace_s
    try:
        return _gather(workers, number, ranks, answers, limit_s, grace_s)
    except KeyboardInterrupt:
        waiting = set(ranks) - answers.keys()
        workers.cancel(waiting, number)
        with suppress(KeyboardInterrupt):  # who interrupts again has had enough
            _be_patient(workers, waiting, answers, grace_s)
        kept = all(isinstance(answers.get(rank), Result | Failure) for rank in ranks)
        places = "; ".join(f"rank {rank} {told_where(answers.get(rank))}" for rank in ranks)
        raise CallInterruptedError(f"{name} was interrupted: {places}.", kept) from None


def _gather(
    workers: WorkerGroup,
    number: int,
    ranks: Sequence[int],
    answers: dict[int, Any],
    limit_s: float | None,
    grace_s: float,
) -> dict[int, Any]:
    waiting = set(ranks) - answers.keys()
    end = float("inf") if limit_s is None else time.monotonic() + limit_s
    if answers:
        end = min(end, time.monotonic() + PATIENCE_S)
    while waiting and time.monotonic() < end:
        for rank, answer in _receive(workers, waiting, answers, end).items():
            if not isinstance(answer, Result):
                end = min(end, time.monotonic() + PATIENCE_S)
            waiting.discard(rank)
    if waiting:
        workers.cancel(waiting, number)
        _be_patient(workers, waiting, answers, grace_s)
    return answers


def _be_patient(workers: WorkerGroup, waiting: set[int], answers: dict[int, Any], grace_s: float) -> None:
    """Wait until `waiting` have given up, `grace_s` at most."""
    end = time.monotonic() + grace_s
    _wait(workers, waiting, answers, min(end, time.monotonic() + _TELL_S))
    if waiting and time.monotonic() < end:
        print(
            f"ltx: ranks {sorted(waiting)} are in code that Python can't interrupt, or that goes on. Unless they end "
            f"within {end - time.monotonic():.0f} s, all workers are ended, and what they have kept is lost. "
            "ltx.Pool(grace_s=60) waits for longer.",
            file=sys.stderr,
            flush=True,
        )
        _wait(workers, waiting, answers, end)


def _wait(workers: WorkerGroup, waiting: set[int], answers: dict[int, Any], end: float) -> None:
    while waiting and time.monotonic() < end:
        waiting.difference_update(_receive(workers, waiting, answers, end))


def _receive(workers: WorkerGroup, waiting: set[int], answers: dict[int, Any], end: float) -> dict[int, Any]:
    came = workers.receive(waiting, None if end == float("inf") else max(0.0, end - time.monotonic()))
    answers.update(came)
    return {rank: answer for rank, answer in came.items() if not isinstance(answer, At)}


def what_became_of_workers(kept: bool) -> str:
    """What a pool says of its workers after a call that failed or was interrupted."""
    if kept:
        return "The workers keep their state, and the next run begins with a new world."
    return "The workers were ended, with what they had kept; the next run starts new ones."


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
    after = "" if kept is None else what_became_of_workers(kept)
    # An ended process comes first: peers that fail because of it, in whatever words, do so after it. What says itself
    # that it comes of a peer's failure is last; one that gave up when it was asked to doesn't count.
    silent = [rank for rank in ranks if isinstance(answers.get(rank), At | None)]
    came = {rank: answer for rank, answer in answers.items() if rank not in silent}
    failed = {rank: answer for rank, answer in came.items() if not isinstance(answer, Result)}
    genuine = [rank for rank in failed if not getattr(came[rank], "cancelled", False)]
    if not genuine:
        late = sorted({*silent, *failed})
        listed, done = (", ".join(map(str, some)) for some in (late, sorted(came.keys() - failed.keys())))
        return CallTimeoutError(
            f"{name} didn't return on rank{'s' * (len(late) > 1)} {listed} of {size} within {timeout_s:g} s"
            + (f", while it returned on {done}" if done else "")
            + f": {'; '.join(f'rank {rank} {told_where(answers.get(rank))}' for rank in late)}. A rank that waits in a "
            "collective waits for one that doesn't take part. Give a longer timeout if it only needs that."
            + f" {after}".rstrip()
        )
    first = min(genuine, key=lambda rank: (*_order(failed[rank]), rank))
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


def _order(answer: Failure | str) -> tuple[bool, float]:
    return (False, 0.0) if isinstance(answer, str) else (answer.type_name in CONSEQUENCES, answer.at_s)


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


def _in_short(answer: Failure | str) -> str:
    if isinstance(answer, str):
        return answer
    if answer.cancelled:
        return f"was given up{f' at {answer.where}' if answer.where else ''}"
    line = answer.message.partition("\n")[0].rstrip(".")
    return f"raised {answer.type_name}: {line[:160]}{'...' * (len(line) > 160)}"


def _original(failure: Failure) -> BaseException | None:
    try:
        original = pickle.loads(failure.pickled) if failure.pickled is not None else None
    except Exception:  # its class takes other arguments than it keeps, or isn't importable here
        return None
    return original if isinstance(original, BaseException) else None
