"""A thread that continues pending steps while their process does something else.

A hook with several phases issues a bucket's next collective when the last one is complete, so something has to check.
Peers that read their states wait for it. A running step checks; but a process may also be in another library's barrier,
or at the prompt of a notebook. So once a pending step is older than a step should take, a thread checks.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

_PATIENCE_S = 0.1
_PAUSE_S = 0.01


class _Mover:
    def __init__(self) -> None:
        self._watched: list[tuple[float, weakref.ref[Any]]] = []
        self._ends = False
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, pending_step: Any) -> None:
        with self._more:
            self._forget()
            self._watched.append((time.monotonic(), weakref.ref(pending_step)))
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._ends = False
                self._thread = threading.Thread(target=self._run, name="ltx: later phases", daemon=True)
                self._thread.start()
                atexit.unregister(self._end)
                atexit.register(self._end)
            self._more.notify()

    def _forget(self) -> None:
        alive = ((since, ref, ref()) for since, ref in self._watched)
        self._watched = [(since, ref) for since, ref, step in alive if step is not None and not step.over]

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


def _poll(ref: weakref.ref[Any]) -> None:
    pending_step = ref()
    if pending_step is not None:
        with suppress(BaseException):  # a read of the state raises
            pending_step.poll()


_mover = _Mover()


def look_after(pending_step: Any) -> None:
    """Call ``pending_step.poll()`` now and then, once it has been pending for a while, until it is ``over``.

    `poll` goes on as far as it can without waiting, and does nothing while another thread is in it.
    """
    _mover.watch(pending_step)
