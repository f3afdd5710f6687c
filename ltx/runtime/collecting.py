"""A call's answers from all ranks, or from as many as answer in time.

The first failure, the time limit and an interrupt end the waiting alike: the ranks that are still busy are asked to
give up, and get a moment to say where they were.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ltx.errors import CallInterruptedError
from ltx.runtime.failures import told_where
from ltx.runtime.messages import At, Failure, Idle, Result
from ltx.runtime.packing import Message
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
        _be_patient(workers, waiting, answers, grace_s)
        kept = all(isinstance(answers.get(rank), Result | Failure) for rank in ranks)
        raise CallInterruptedError(_where(name, answers, ranks, kept), kept) from None


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
    """Wait until `waiting` have given up, `grace_s` at most; who interrupts that has had enough."""
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
        with suppress(KeyboardInterrupt):
            _wait(workers, waiting, answers, end)


def _wait(workers: WorkerGroup, waiting: set[int], answers: dict[int, Any], end: float) -> None:
    while waiting and time.monotonic() < end:
        waiting -= _receive(workers, waiting, answers, end).keys()


def _receive(workers: WorkerGroup, waiting: set[int], answers: dict[int, Any], end: float) -> dict[int, Any]:
    came = workers.receive(waiting, None if end == float("inf") else max(0.0, end - time.monotonic()))
    answers.update(came)
    return {rank: answer for rank, answer in came.items() if not isinstance(answer, At)}


def _where(name: str, answers: dict[int, Any], ranks: Sequence[int], kept: bool) -> str:
    places = "; ".join(f"rank {rank} {told_where(answers.get(rank))}" for rank in ranks)
    after = "The workers keep their state." if kept else "The workers were ended; the next run starts new ones."
    return f"{name} was interrupted: {places}. {after}"
