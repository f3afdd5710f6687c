"""A thread that continues what is pending while its process does something else.

A collective through shared memory goes on when its ranks do its phases, so something has to check: peers that wait for
theirs depend on it. A running step checks, and so does a wait; but a process may also be in another library's barrier,
or at the prompt of a notebook. So once a future is older than a step should take, a thread checks.
"""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from ltx.core.comm.shared_memory import progress_everywhere

_PATIENCE_S = 0.1
_PAUSE_S = 0.01


class _Mover:
    """The thread, and since when it has looked after each future."""

    def __init__(self) -> None:
        self._watched = WeakKeyDictionary[Any, float]()
        self._ends = False
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, future: Any) -> None:
        """Do this rank's part now and then, once `future` has been pending for long, until it is ``over`` or gone."""
        with self._more:
            self._watched[future] = time.monotonic()
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._ends = False
                self._thread = threading.Thread(target=self._run, name="ltx: progress", daemon=True)
                self._thread.start()
                atexit.unregister(self._end)
                atexit.register(self._end)
            if len(self._watched) == 1:  # else the thread wakes in time for the oldest
                self._more.notify()

    def _forget(self) -> bool:
        """Forget what is over; returns whether something isn't. It takes no time."""
        for future in list(self._watched):
            if future.over:
                del self._watched[future]
        return bool(self._watched)

    def _end(self) -> None:
        """Python must not exit while the thread frees tensors: torch releases the interpreter there, and aborts."""
        with self._more:
            self._ends = True
            self._more.notify()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._ends or self._forget())
                due_s = min(self._watched.values(), default=0.0) + _PATIENCE_S
                if self._more.wait_for(lambda: self._ends, max(_PAUSE_S, due_s - time.monotonic())):
                    return
            if time.monotonic() >= due_s:
                with suppress(BaseException):  # a wait raises
                    progress_everywhere()


_mover = _Mover()
look_after = _mover.watch
