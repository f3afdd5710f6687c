"""Later phases of hooks, while their process is busy with something that knows nothing of them.

A hook with several phases issues a bucket's next collective when the last one has landed, which somebody has to look
after. Peers that read their states wait for it. A step in progress looks; but a process may as well sit in somebody
else's barrier, or in a cell that was left. So once a flight is older than a step should take, a thread looks.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Protocol

_PATIENCE_S = 0.1
_PAUSE_S = 0.01


class Pollable(Protocol):
    """What goes on when it is polled."""

    @property
    def over(self) -> bool:
        """Whether polling is no more of use."""
        ...

    def poll(self) -> None:
        """Go on where that is possible without waiting; does nothing while another thread is at it."""
        ...


class _Mover:
    def __init__(self) -> None:
        self._watched: list[tuple[float, Pollable]] = []
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, flight: Pollable) -> None:
        with self._more:
            self._watched = [(since, other) for since, other in self._watched if not other.over]
            self._watched.append((time.monotonic(), flight))
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._thread = threading.Thread(target=self._run, name="ltx: later phases", daemon=True)
                self._thread.start()
            self._more.notify()

    def _run(self) -> None:
        while True:
            with self._more:
                self._watched = [(since, flight) for since, flight in self._watched if not flight.over]
                while not self._watched:
                    self._more.wait()
                oldest, watched = self._watched[0][0], list(self._watched)
            time.sleep(max(_PAUSE_S, oldest + _PATIENCE_S - time.monotonic()))
            for since, flight in watched:
                if time.monotonic() - since >= _PATIENCE_S:
                    with suppress(BaseException):  # whoever reads the state is told
                        flight.poll()


_mover = _Mover()


def look_after(flight: Pollable) -> None:
    """Poll `flight` now and then, once it has been under way for a while."""
    _mover.watch(flight)
