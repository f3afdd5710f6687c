"""A thread that continues what is pending while its process does something else.

A collective through shared memory goes on when its ranks do its phases, so something has to check: peers that wait for
theirs depend on it. A running step checks, and so does a wait; but a process may also be in another library's barrier,
or at the prompt of a notebook. So once a future is older than a step should take, a thread checks.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from contextlib import suppress
from typing import Protocol

_PATIENCE_S = 0.1
_PAUSE_S = 0.01


class Unfinished(Protocol):
    """What the thread continues."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do. It takes no time."""
        ...

    def poll(self) -> None:
        """Go on as far as possible without waiting; nothing, while another thread is in it."""
        ...


class _Mover:
    """The thread, and what it continues."""

    def __init__(self) -> None:
        self._watched: list[tuple[float, weakref.ref[Unfinished]]] = []
        self._ends = False
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, pending: Unfinished) -> None:
        """Call ``pending.poll()`` now and then, once it has been pending for a while, until it is ``over`` or gone."""
        with self._more:
            self._watched.append((time.monotonic(), weakref.ref(pending)))
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._ends = False
                self._thread = threading.Thread(target=self._run, name="ltx: progress", daemon=True)
                self._thread.start()
                atexit.unregister(self._end)
                atexit.register(self._end)
            if len(self._watched) == 1:  # else the thread wakes in time for the oldest
                self._more.notify()

    def _forget(self) -> None:
        alive = ((since, ref, ref()) for since, ref in self._watched)
        self._watched = [(since, ref) for since, ref, pending in alive if pending is not None and not pending.over]

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
                self._forget()
                self._more.wait_for(lambda: self._watched or self._ends)
                oldest, watched = self._watched[0][0] if self._watched else 0.0, list(self._watched)
                due = max(_PAUSE_S, oldest + _PATIENCE_S - time.monotonic())
                if self._more.wait_for(lambda: self._ends, due):
                    return
            for since, ref in watched:
                if time.monotonic() - since >= _PATIENCE_S:
                    _poll(ref)


def _poll(ref: weakref.ref[Unfinished]) -> None:
    if (pending := ref()) is not None:
        with suppress(BaseException):  # a wait raises
            pending.poll()


_mover = _Mover()
look_after = _mover.watch
