"""``ltx.launch``: run a function once on n new processes, and get every rank's result."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from ltx.arguments import checked
from ltx.errors import WorkerError
from ltx.runtime.calls import inherited_call, name_of, pack_call
from ltx.runtime.collecting import collect, failure_error
from ltx.runtime.messages import Result
from ltx.runtime.pool import check_size
from ltx.runtime.starting import StartMethod, starter
from ltx.runtime.worker_group import WorkerGroup

T = TypeVar("T")

_START_TIMEOUT_S = 60.0


@checked("fn", "timeout")
def launch(
    fn: Callable[..., T],
    nprocs: int,
    *args: Any,
    start_method: StartMethod | None = None,
    timeout: timedelta | float | None = None,
    threads: int | None = None,
    strategy: Any = None,
) -> list[T]:
    """Start `nprocs` processes on this machine, call ``fn(*args)`` on each, end them, and return what each returned.

    The processes are one world, initialised already, as ranks 0 to ``nprocs - 1``. They meet at a free port.

    Args:
        fn: the function.
        nprocs: the number of processes.
        args: its arguments, the same on every rank.
        start_method: how the processes start; None is the strategy's ``start_method``, or "popen":
            "popen": fresh interpreters. Nothing needs to be guarded by ``if __name__ == "__main__"``, functions of
            notebook cells work, and nothing is shared with this process.
            "fork": copies of this process, up at once. `fn` and what it refers to are there as they are, without being
            pickled. Refused if CUDA or torch.distributed is initialised.
            "spawn", "forkserver": multiprocessing's, which import the main script again: it must be guarded.
        timeout: how long the call may take: seconds or a timedelta; None is without limit.
        threads: the number of threads that each computes on; None is ``OMP_NUM_THREADS`` if that is set, else an equal
            share of the processors. Forks compute on one: OpenMP hangs in a fork of a process that has used it.
        strategy: whose ``start_method`` is used where that is left out.

    Returns:
        A list of what it returned, by rank.

    Raises:
        CallFailedError: (a WorkerError) about the first rank to fail. The others are cancelled.
        CallTimeoutError: (a WorkerError and TimeoutError) that took too long.
        WorkerError: the processes don't start, or this one is itself a worker.

    Example:
        >>> import torch, ltx
        >>> ltx.launch(lambda x: float(ltx.psum(x)), 2, torch.tensor(1.5))
        [3.0, 3.0]
    """
    __tracebackhide__ = True
    check_size("ltx.launch", nprocs)
    method: str = start_method if start_method is not None else getattr(strategy, "start_method", "popen")
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    threads = _threads(threads, nprocs, method)
    # A fork has the function already, and all that it refers to.
    call = pack_call(1, fn, args, {}) if method != "fork" else inherited_call(1)
    handed = (fn, args) if method == "fork" else None
    workers = WorkerGroup(nprocs, starter(method, nprocs, threads, handed), threads, _START_TIMEOUT_S)
    try:
        answers = collect(workers, 1, call, range(nprocs), name_of(fn), limit_s)
        complete = all(isinstance(answers.get(rank), Result) for rank in range(nprocs))
        if complete:
            workers.stop()
    finally:
        call.close()
        workers.finish_output()
        workers.kill()
    if not complete:
        raise failure_error(name_of(fn), answers, range(nprocs), nprocs, limit_s, kept=None)
    return [answers[rank].value for rank in range(nprocs)]


def _threads(asked: int | None, nprocs: int, start_method: str) -> int:
    if start_method == "fork":
        if asked not in (None, 1):
            raise WorkerError(
                f'ltx.launch(threads={asked!r}, start_method="fork"): a fork can\'t compute on several threads, since '
                'OpenMP hangs in a fork of a process that has used it. Leave threads out, or use "popen".'
            )
        return 1
    if asked is not None and (not isinstance(asked, int) or asked < 1):
        raise WorkerError(f"ltx.launch(threads={asked!r}): expected a number of threads of at least 1.")
    said = os.environ.get("OMP_NUM_THREADS", "")
    return asked or (int(said) if said.isdecimal() and int(said) else max(1, (os.cpu_count() or 1) // nprocs))
