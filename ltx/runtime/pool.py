"""``ltx.Pool``: run a function on worker processes that stay alive between calls.

The workers are one world: collectives work in the function. A failure on any rank may leave the others in the middle of
a collective, and the order in which they issue collectives torn. So the rule is simple: after a failure, a timeout or
an interrupt all workers are ended, and the next run starts new ones.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from ltx.errors import WorkerError
from ltx.runtime.calls import name_of, pickle_call, unpickle_answer
from ltx.runtime.crew import Crew
from ltx.runtime.failures import GRACE_S, failure_error
from ltx.runtime.messages import Failure, Result
from ltx.runtime.per_rank import PerRank
from ltx.runtime.world import POOL_VARIABLE

T = TypeVar("T")


class Pool:
    """`n` worker processes that run functions together, as ranks 0 to ``n - 1`` of one world.

    The workers are fresh interpreters, so nothing needs to be guarded by ``if __name__ == "__main__"``. They start in
    parallel, stay alive between calls and keep their state; each computes on one thread. They end with
    :meth:`close`, with the ``with`` block, and with this process, however it ends.

    Args:
        n: the number of workers.
        start_timeout_s: how long they may take to start.
        timeout_s: how long a run may take unless it says otherwise; None is without limit.
        threads: the number of threads that each worker computes on.

    Raises:
        WorkerError: they don't start, or this process is itself a worker of a pool.

    Example:
        >>> import torch, ltx
        >>> with ltx.Pool(2) as pool:
        ...     pool.run(lambda x: ltx.psum(x + ltx.axis_index()), torch.tensor(1.0)).replicated()
        tensor(3.)
    """

    def __init__(
        self, n: int, *, start_timeout_s: float = 60.0, timeout_s: float | None = None, threads: int = 1
    ) -> None:
        if POOL_VARIABLE in os.environ:
            raise WorkerError(
                f"rank {os.environ.get('RANK')}: ltx.Pool({n}) was called inside a worker of an ltx.Pool, and a pool "
                "of pools is refused: its processes would multiply. Make the pool in the driver, and let workers "
                "talk through collectives."
            )
        if not isinstance(n, int) or n < 1:
            raise WorkerError(f"ltx.Pool({n!r}): expected a number of workers of at least 1.")
        self._size = n
        self._start_timeout_s = start_timeout_s
        self._timeout_s = timeout_s
        self._threads = threads
        self._lock = threading.Lock()
        self._closed = False
        self._crew: Crew | None = self._start()

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        state = "starts new workers at the next run"
        if self._closed:
            state = "closed"
        elif self._crew is not None:
            state = f"pids {self._crew.pids}"
        return f"<ltx.Pool of {self._size}: {state}>"

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and wait for them. Harmless the second time."""
        with self._lock:
            self._closed = True
            if self._crew is not None:
                self._crew.stop()
                self._crew = None

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout_s: float | None = None,
        keep_on_error: bool = False,
        **kwargs: Any,
    ) -> PerRank[T]:
        """Call ``fn(*args, **kwargs)`` on every worker and wait for all of them.

        `fn`, with all that its own module defines, is sent by value: functions of notebook cells and of test files
        work, and each call sees their latest definition. Other modules that are not installed are imported by the
        workers, which have this process' ``sys.path``. Tensors travel by value.

        Args:
            fn: the function. What it assigns to globals is gone at the next call; what it keeps in an imported module
                stays.
            args: its arguments, the same on every rank.
            timeout_s: how long the run may take; None is the pool's own limit.
            keep_on_error: keep the workers after a failure if all of them have answered. Only right if no rank can
                have issued a collective that another didn't.
            kwargs: its keyword arguments.

        Returns:
            What it returned on each rank.

        Raises:
            CallFailedError: a :class:`ltx.errors.WorkerError` about the first rank to fail, with the exception there
                as its ``__cause__`` if that could be sent.
            CallTimeoutError: a :class:`ltx.errors.WorkerError` and ``TimeoutError``.
            WorkerError: `fn` or its arguments can't be pickled, the pool is closed, or workers don't start.
        """
        __tracebackhide__ = True
        call = pickle_call(fn, args, kwargs)
        with self._lock:
            if self._closed:
                raise WorkerError(f"this {self!r} can't run {name_of(fn)}. Make a new one: ltx.Pool({self._size}).")
            if self._crew is None:
                self._crew = self._start()
            elif not self._crew.is_ours:
                raise WorkerError(
                    f"this ltx.Pool was started by another process than {os.getpid()}, which is a fork of that one. "
                    "Make a pool of its own in the fork."
                )
            try:
                limit_s = self._timeout_s if timeout_s is None else timeout_s
                answers = _collect(self._crew, call, limit_s)
                by_rank = [answers.get(rank) for rank in range(self._size)]
                if all(isinstance(answer, Result) for answer in by_rank):
                    return PerRank(answer.value for answer in by_rank)  # type: ignore[union-attr]
                if not (keep_on_error and all(isinstance(answer, Result | Failure) for answer in by_rank)):
                    self._drop()
            except BaseException:  # an interrupt among others
                self._drop()
                raise
            raise failure_error(name_of(fn), answers, self._size, limit_s)

    def _start(self) -> Crew:
        return Crew(self._size, self._threads, self._start_timeout_s)

    def _drop(self) -> None:
        if self._crew is not None:
            self._crew.kill()
            self._crew = None


def _collect(crew: Crew, call: bytes, timeout_s: float | None) -> dict[int, Any]:
    """Send `call` to all ranks and gather the answers: a Result, a Failure, or words on how its process ended.

    Ranks that were silent until the time was over, or until a grace period after the first failure, are absent.
    """
    end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    answers: dict[int, Any] = {}
    waiting = set(range(crew.size))
    for rank in range(crew.size):
        crew.send(rank, call)  # one that is gone is found out below
    while waiting:
        frames = crew.receive(waiting, None if end == float("inf") else max(0.0, end - time.monotonic()))
        if not frames:
            break
        for rank, frame in frames.items():
            waiting.discard(rank)
            answers[rank] = crew.exit_text(rank) if frame is None else unpickle_answer(frame)
            if not isinstance(answers[rank], Result):
                end = min(end, time.monotonic() + GRACE_S)
    return answers
