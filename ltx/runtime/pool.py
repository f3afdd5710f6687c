"""Functions on worker processes: ``ltx.Pool``, whose workers stay between calls, and ``ltx.launch``, for one call.

After a failure, a timeout or an interrupt busy ranks are asked to give up (KeyboardInterrupt is raised in them), and
before the next run all make a new world, as they may have issued different numbers of collectives. If a worker is gone,
or doesn't give up, the next run has new workers.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any, TypeVar

from ltx.core.base.arguments import brief, checked, name_of, seconds, whole
from ltx.core.base.readable import Table
from ltx.errors import ArgumentError, CallInterruptedError, WorkerError
from ltx.runtime.failures import OF_WORKERS, failure_error
from ltx.runtime.launchers import POOL_VARIABLE
from ltx.runtime.messages import Call, Failure, Message, Result, pack, pack_call
from ltx.runtime.per_rank import PerRank
from ltx.runtime.worker import StartMethod, starter
from ltx.runtime.worker_group import GRACE_S, WorkerGroup
from ltx.strategies import Strategy

T = TypeVar("T")

_START_TIMEOUT_S = 60.0


class Pool:
    """`n` worker processes that run functions together, as ranks 0 to ``n - 1`` of one world.

    Use it where there is no launcher: in a notebook, a test, a script. ``pool.run(f)`` calls `f` on every rank. The
    workers are fresh interpreters, so nothing needs ``if __name__ == "__main__"``. They start in parallel, stay alive
    between calls and keep their state, also after a call that failed or was interrupted; each computes on one thread.
    They end with :meth:`close`, the ``with`` block or this process.

    Args:
        n: the number of workers.
        start_timeout_s: how long the workers may take to start, in seconds or as a timedelta.
        timeout_s: how long a run may take unless it says otherwise; None is without limit.
        threads: the number of threads that each worker computes on.
        show_output: True shows what workers print, line by line and with their rank, where this process prints. False
            lets workers print to where this process was started. None is True in IPython and notebooks.
        grace_s: after an interrupt, a failure or a timeout, how long workers that are in code that Python can't
            interrupt (a long computation in C) may take to return. After it all workers are ended, and the state they
            keep is lost; a warning comes before. None is 3 s.

    Raises:
        WorkerError: the workers don't start, or this process is itself a worker of a pool.

    Example:
        >>> import torch, ltx
        >>> with ltx.Pool(2) as pool:
        ...     pool.run(lambda x: ltx.psum(x + ltx.axis_index()), torch.tensor(1.0)).replicated()
        tensor(3.)
    """

    @checked("threads", "show_output")
    def __init__(
        self,
        n: int,
        *,
        start_timeout_s: timedelta | float = _START_TIMEOUT_S,
        timeout_s: timedelta | float | None = None,
        threads: int = 1,
        show_output: bool | None = None,
        grace_s: timedelta | float | None = None,
    ) -> None:
        self._size = check_size("ltx.Pool", n)
        self._start_timeout_s = seconds("ltx.Pool: start_timeout_s", start_timeout_s)
        self._timeout_s = None if timeout_s is None else seconds("ltx.Pool: timeout_s", timeout_s)
        self._threads = whole("ltx.Pool: threads", threads, 1)
        self._grace_s = GRACE_S if grace_s is None else seconds("ltx.Pool: grace_s", grace_s, zero=True)
        self._show_output = "IPython" in sys.modules if show_output is None else show_output
        self._lock = threading.Lock()
        self._closed = False
        self._calls = 0
        self._workers: WorkerGroup | None = None
        self._ready()

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        open_now = f"pids {self.pids}" if self.pids else "starts new workers at the next run"
        return f"<ltx.Pool of {self._size}: {'closed' if self._closed else open_now}>"

    def _repr_html_(self) -> str | None:
        rows = [(f"rank {rank}", str(pid)) for rank, pid in enumerate(self.pids)]
        return Table((f"Pool of {self._size}", "process"), rows, (False, True))._repr_html_() if rows else None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank; empty while no workers run."""
        return [] if self._workers is None else self._workers.pids

    def close(self) -> None:
        """End the workers and wait for them. Harmless the second time."""
        with self._lock:
            self._closed = True
            if self._workers is not None:
                self._workers.stop()
                self._workers = None

    def run(
        self, fn: Callable[..., T], *args: Any, timeout_s: timedelta | float | None = None, **kwargs: Any
    ) -> PerRank[T]:
        """Call ``fn(*args, **kwargs)`` on every worker and wait for all of them.

        `fn` and everything its own module defines is sent by value: functions of notebook cells and of test files work,
        and each call sees their latest definition. Other modules that aren't installed are imported by the workers,
        which use this process' ``sys.path`` at the time of the call. Tensors are copied. An interrupt (Ctrl-C) reaches
        all workers, also those that wait in a collective.

        Args:
            fn: the function. Globals that it assigns are lost at the next call; what an imported module holds stays.
            args: its arguments, the same on every rank.
            timeout_s: how long the run may take; None is the pool's own limit.
            kwargs: its keyword arguments.

        Returns:
            What `fn` returned on each rank.

        Raises:
            CallFailedError: (a WorkerError) the function raised; it tells of the first rank that failed, and has that
                rank's exception as its ``__cause__`` if it could be pickled.
            CallTimeoutError: (a WorkerError and TimeoutError) the call took too long.
            WorkerError: `fn` or its arguments can't be pickled, the pool is closed, or workers don't start.
        """
        __tracebackhide__ = True
        return PerRank(self._call(range(self._size), fn, args, kwargs, timeout_s))

    def _call(self, ranks: Sequence[int], fn: Callable[..., T], args: Any, kwargs: Any, timeout_s: Any) -> list[T]:
        __tracebackhide__ = True
        if not callable(fn):
            raise ArgumentError(f"ltx.Pool: what workers run must be a function, got {brief(fn)}.")
        with self._lock:
            if self._closed:
                raise WorkerError(f"this {self!r} can't run {name_of(fn)}. Make a new one: ltx.Pool({self._size}).")
            if self._workers is not None and self._workers.owner != os.getpid():
                raise WorkerError(
                    f"this ltx.Pool was started by the process of which {os.getpid()} is a fork. Make one in the fork."
                )
            self._calls += 1
            limit_s = self._timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
            with closing(pack_call(self._calls, fn, args, kwargs)) as call:
                answers = self._do(call, ranks, name_of(fn), limit_s)
            return [answers[rank].value for rank in ranks]

    def _do(self, call: Message, ranks: Sequence[int], name: str, limit_s: float | None) -> dict[int, Result]:
        __tracebackhide__ = True
        workers = self._ready()
        kept, kinds = False, set[type]()
        try:
            answers = workers.collect(self._calls, call, ranks, name, limit_s, self._grace_s)
            kinds = {type(answers.get(rank)) for rank in ranks}
            kept = kinds <= {Result, Failure}
            # Where all ranks have raised and sent nothing, as for a typo, their world is as it was.
            workers.failed = len(kinds) > 1 or not (kept and all(answers[rank].in_world for rank in ranks))
        except CallInterruptedError as interrupt:
            kept = workers.failed = interrupt.kept
            interrupt.args = (f"{interrupt} {OF_WORKERS[kept]}",)
            raise
        finally:
            if not kept:
                self._drop()
        if kinds != {Result}:
            raise failure_error(name, answers, ranks, self._size, limit_s, kept)
        return answers

    def _ready(self) -> WorkerGroup:
        """The workers, after making a new world if the last call failed or ended it; new workers if there are none."""
        if self._workers is not None and self._workers.failed:
            try:
                self._workers.renew()
            except BaseException as error:
                self._drop()
                if not isinstance(error, WorkerError):
                    raise
                warnings.warn(
                    f"after the failure before, {error} All workers were ended, with what they had kept, and new ones "
                    "are started.",
                    stacklevel=5,
                )
        if self._workers is None:
            start = starter("popen", self._size, self._threads)
            self._workers = WorkerGroup(self._size, start, self._start_timeout_s, self._show_output)
        return self._workers

    def _drop(self) -> None:
        if self._workers is not None:
            self._workers.kill()
            self._workers = None


def check_size(caller: str, n: object) -> int:
    """`n`; raises :class:`ltx.errors.WorkerError` if it is no valid number, or this process is itself a worker."""
    if POOL_VARIABLE in os.environ:
        raise WorkerError(
            f"rank {os.environ.get('RANK')}: {caller}({n}) was called inside a worker of an ltx.Pool, and a pool "
            "of pools is refused: its processes would multiply. Make the pool in the driver, and let workers "
            "communicate through collectives."
        )
    return whole(f"{caller}: the number of workers", n, 1, WorkerError)


@checked("fn", "timeout", "strategy")
def launch(
    fn: Callable[..., T],
    nprocs: int,
    *args: Any,
    start_method: StartMethod | None = None,
    timeout: timedelta | float | None = None,
    threads: int | None = None,
    strategy: Strategy | None = None,
) -> list[T]:
    """Start `nprocs` processes on this machine, call ``fn(*args)`` on each, end them, and return what each returned.

    The processes are one world, initialised already, as ranks 0 to ``nprocs - 1``. They meet at a free port.

    Args:
        fn: the function.
        nprocs: the number of processes.
        args: its arguments, the same on every rank.
        start_method: how the processes start; None is the strategy's ``start_method``, or "popen":
            "popen": fresh interpreters, which share nothing with this process. Functions of notebook cells work, and
            ``if __name__ == "__main__"`` isn't needed.
            "fork": copies of this process, which start at once. They have `fn` and what it refers to without pickling.
            Refused if CUDA or torch.distributed is initialised.
            "spawn", "forkserver": multiprocessing's, which import the script; guard it: ``if __name__ == "__main__"``.
        timeout: how long the call may take: seconds or a timedelta; None is without limit.
        threads: the number of threads that each process computes on; None is ``OMP_NUM_THREADS`` if that is set, else
            an equal share of the processors. A fork computes on one thread: OpenMP would hang if it was used before.
        strategy: its ``start_method`` is used if `start_method` is left out.

    Returns:
        A list of what `fn` returned, by rank.

    Raises:
        CallFailedError: (a WorkerError) `fn` raised; it tells of the first rank that failed. Others are cancelled.
        CallTimeoutError: (a WorkerError and TimeoutError) the call took too long.
        WorkerError: the processes don't start, or this process is itself a worker.

    Example:
        >>> import torch, ltx
        >>> ltx.launch(lambda x: float(ltx.psum(x)), 2, torch.tensor(1.5))
        [3.0, 3.0]
    """
    __tracebackhide__ = True
    nprocs = check_size("ltx.launch", nprocs)
    method: str = start_method if start_method is not None else getattr(strategy, "start_method", "popen")
    limit_s = None if timeout is None else seconds("ltx.launch: timeout", timeout)
    said, fork = os.environ.get("OMP_NUM_THREADS", ""), method == "fork"
    if fork and threads not in (None, 1):
        raise WorkerError(
            f'ltx.launch(threads={threads!r}, start_method="fork"): a fork can\'t compute on several threads, since '
            'OpenMP hangs in a fork of a process that has used it. Leave threads out, or use "popen".'
        )
    if threads is None:
        threads = 1 if fork else int(said) if said.isdecimal() and int(said) else max(1, cores() // nprocs)
    threads = whole("ltx.launch: threads", threads, 1, WorkerError)
    call, handed = (pack(Call(1)), (fn, args)) if fork else (pack_call(1, fn, args, {}), None)  # a fork has all of it
    with closing(call):
        workers = WorkerGroup(nprocs, starter(method, nprocs, threads, handed), _START_TIMEOUT_S)
        try:
            answers = workers.collect(1, call, range(nprocs), name_of(fn), limit_s, GRACE_S)
            if complete := all(isinstance(answers.get(rank), Result) for rank in range(nprocs)):
                workers.stop()
        except CallInterruptedError as interrupt:
            interrupt.kept = False
            raise
        finally:
            workers.kill()
    if not complete:
        raise failure_error(name_of(fn), answers, range(nprocs), nprocs, limit_s, kept=None)
    return [answers[rank].value for rank in range(nprocs)]


def cores() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
