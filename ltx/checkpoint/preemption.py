"""preemption: a signal to one process stops all ranks after the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from ltx.core import collectives
from ltx.core.base.arguments import checked, whole
from ltx.errors import InputError

RESUMABLE = os.EX_TEMPFAIL  #: the exit code (EX_TEMPFAIL) of a process that stopped on request and may be restarted


class Preemption:
    """Asks all ranks whether to stop; see :func:`preemption`."""

    def __init__(self, every: int, axis: Any):
        self._every, self._axis = every, axis
        self._calls = 0
        self._stops = False
        self.received: signal.Signals | None = None

    def __call__(self) -> bool:
        """Whether any rank has been told to stop: the same answer on all ranks. Every rank calls it after each step."""
        self._calls += 1
        if not self._stops and self._calls % self._every == 0:
            self._stops = collectives.reduce_boolean_decision(self.received is not None, all=False, axis=self._axis)
        return self._stops

    def exit(self) -> NoReturn:
        """End this process with the exit code :data:`ltx.checkpoint.RESUMABLE`, 75, so that it is restarted."""
        raise SystemExit(RESUMABLE)


@checked("signals")
@contextmanager
def preemption(
    *, signals: Sequence[signal.Signals] = (signal.SIGTERM,), every: int = 1, axis: Any = None
) -> Iterator[Preemption]:
    """If any process gets a signal to stop, all ranks learn of it after the same step.

    Schedulers send SIGTERM some time before they take a machine away. Inside the ``with`` block a signal is only noted;
    the step goes on, and the loop asks after the step. After the block, signals have their old handlers.

    Args:
        signals: the signals. every: the number of calls between two that ask the peers, by a small all-reduce.
        axis: the ranks that stop together, as in :func:`ltx.psum`.

    Returns: A :class:`Preemption`: call it after each step, on every rank. ``.exit()`` ends the process with code 75
    (EX_TEMPFAIL), which tells schedulers to restart it.

    Raises:
        InputError: `every` isn't a positive number, or this isn't the main thread, which alone can handle signals.

    Example:
        >>> import ltx
        >>> with ltx.checkpoint.preemption() as preempted:
        ...     for step in range(3):
        ...         # state, metrics = train(state, batch)
        ...         if preempted():
        ...             # ltx.checkpoint.save(path, state)
        ...             preempted.exit()
    """
    every = whole("checkpoint.preemption: every", every, 1)
    if threading.current_thread() is not threading.main_thread():
        raise InputError("checkpoint.preemption: signals are handled by the main thread alone. Call it there.")
    asked = Preemption(every, axis)

    def note(number: int, frame: object) -> None:
        asked.received = signal.Signals(number)

    with ExitStack() as handlers:  # if a later signal can't be set, restore this one
        for number in dict.fromkeys(signals):
            handler = signal.signal(number, note)
            handlers.callback(signal.signal, number, signal.SIG_DFL if handler is None else handler)
        yield asked
