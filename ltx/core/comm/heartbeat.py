"""Heartbeats: how a rank learns that a peer was stopped, or that its machine or link is down.

A broken connection shows at once. Silence doesn't: a stopped process, a machine without power and an unplugged cable
look like a slow peer. So every process writes a beat into the store at regular intervals, from its own thread, and a
rank that waits reads the beats of those it waits for. Calls to the store can block forever too, and are given up after
one heartbeat timeout (:mod:`ltx.core.comm.store_exchange`).

Python computation doesn't stop the beats. C code that holds Python's lock for longer than the heartbeat timeout does.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch._C._distributed_c10d import PrefixStore, Store

from ltx.core.base.errors import PeerLostError
from ltx.core.comm.deadlock import Deadlocks
from ltx.core.comm.store_exchange import ENDING_S, StoreCaller, poll_until

#: Without a sign of life for so long, a peer counts as lost.
DEFAULT_HEARTBEAT_S = 10.0


class Heartbeat:
    """The beats of this process, which is `rank` of the world, and what it knows of those of its peers.

    A peer without a beat for `heartbeat_s` counts as lost. Beats come five times as often.
    """

    def __init__(self, store: Store, rank: int, heartbeat_s: float):
        self._rank = rank
        self._users = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._looked_s = self._polled_s = 0.0
        self._lock = threading.Lock()
        self._ended, self._woken = False, threading.Event()
        #: Through which this process calls the store, giving up after one heartbeat timeout.
        self.store_caller = StoreCaller(rank, heartbeat_s)
        self._asked = PrefixStore("ltx/beats/", store)
        # A connection of its own: calls on one connection wait for each other.
        self._connection: Store = store.clone()  # type: ignore[attr-defined]
        self._beats = PrefixStore("ltx/beats/", self._connection)
        #: Called with each beat, in the beats' thread and with their connection to `store`.
        self.on_beat: Callable[[Store], None] = lambda store: None
        #: By axis, how much its communicator has issued on each channel.
        self.reports: dict[str, Callable[[], dict[str, int]]] = {}
        #: What else goes with the beats: which thread waits for what.
        self.deadlocks = Deadlocks(self.last, self.beat, rank)
        #: Tells this world from all others; the same on all ranks.
        self.world = self._asked.compare_set("world", "", os.urandom(8).hex()).decode()
        self._beats.set(str(rank), self._sign())
        self._thread = threading.Thread(target=self._beat, name="ltx-heartbeat", daemon=True)
        self._thread.start()

    @property
    def heartbeat_s(self) -> float:
        """Without a beat for so long a peer counts as lost, and without an answer the store."""
        return self.store_caller.limit_s

    @property
    def _pause_s(self) -> float:
        """How much later the next beat comes."""
        return min(1.0, self.heartbeat_s / 5)

    def shorten(self, heartbeat_s: float) -> None:
        """Let it be `heartbeat_s` from now on, if it was longer. The beats follow at once: peers won't wait longer."""
        if heartbeat_s < self.heartbeat_s:
            self.store_caller.limit_s = heartbeat_s
            self._woken.set()

    def stale_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` whose heartbeats have stopped for too long. Called repeatedly during a wait."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_s > 3 * self._pause_s:  # a new wait begins: old beats tell nothing
                self._seen.clear()
            self._looked_s = now
            if now - self._polled_s < self._pause_s / 2 and self._seen.keys() >= set(ranks):
                return []
            self._polled_s = now
            for rank, value in zip(ranks, self.last(ranks), strict=False):
                if self._seen.get(rank, (b"", 0.0))[0] != value:
                    self._seen[rank] = (value, now)
            limit_s = self.heartbeat_s - 2 * self._pause_s  # a beat may be one interval late, and so may this check
            return [rank for rank in ranks if rank in self._seen and now - self._seen[rank][1] > limit_s]

    def last(self, ranks: Sequence[int]) -> list[bytes]:
        """The last beats of `ranks`; an empty list if one of them hasn't had any."""
        keys = [str(rank) for rank in ranks]
        return self.store_caller.ask(lambda: self._asked.multi_get(keys) if self._asked.check(keys) else [])

    def silent_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that show no beat from now on, for a little longer than one interval.

        Raises:
            PeerLostError: the store is gone or doesn't answer.
        """
        before, silent = self.last(ranks), set(ranks)

        def all_have_beaten() -> bool:
            beats = zip(ranks, before, self.last(ranks), strict=False)
            silent.difference_update(rank for rank, old, new in beats if old != new)
            return not silent

        poll_until(all_have_beaten, 1.3 * self._pause_s)
        return sorted(silent)

    def reported(self, ranks: Sequence[int], label: str) -> list[dict[str, int]]:
        """What the communicators of `label` last reported on `ranks`; empty for a rank without a report."""
        with suppress(PeerLostError):
            return [json.loads(value)[1].get(label, {}) for value in self.last(ranks)] or [{} for _ in ranks]
        return [{} for _ in ranks]

    def _sign(self) -> str:
        reports = {label: report() for label, report in list(self.reports.items())}
        return json.dumps([time.monotonic(), reports, self.deadlocks.told()])

    def beat(self) -> None:
        """Write a beat at once, to report something new."""
        value = self._sign()
        self.store_caller.tell(lambda: self._asked.set(str(self._rank), value))

    def hold(self) -> None:
        """Count one more user."""
        self._users += 1

    def release(self) -> bool:
        """Count one user less; returns whether that was the last one, and the heartbeat has ended."""
        self._users -= 1
        if self._users:
            return False
        self._ended = True
        self._woken.set()
        self.store_caller.close()
        if self._thread is not threading.current_thread():
            self._thread.join(ENDING_S)
        return True

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone: threads that call it see that
            while True:
                self._woken.wait(self._pause_s)
                self._woken.clear()
                if self._ended:
                    break
                self._beats.set(str(self._rank), self._sign())
                self.on_beat(self._connection)
        del self._beats, self._connection  # closed now, even if something still holds this heartbeat


def last_beats(store: Store, ranks: Sequence[int]) -> dict[int, bytes]:
    """The last beat of those of `ranks` that have had one."""
    held = PrefixStore("ltx/beats/", store)
    return {rank: held.get(str(rank)) for rank in ranks if held.check([str(rank)])}


_heartbeats: dict[int, tuple[Store, Heartbeat]] = {}


def hold_heartbeat(store: Store, rank: int, heartbeat_s: float) -> Heartbeat:
    """The one heartbeat of this process in the world of `store`. Call :func:`release_heartbeat` when done."""
    known = _heartbeats.get(id(store))
    if known is None:
        known = _heartbeats[id(store)] = (store, Heartbeat(store, rank, heartbeat_s))
    heartbeat = known[1]
    heartbeat.shorten(heartbeat_s)
    heartbeat.hold()
    return heartbeat


def release_heartbeat(heartbeat: Heartbeat) -> None:
    """The counterpart of :func:`hold_heartbeat`."""
    if heartbeat.release():
        for key, (_, known) in list(_heartbeats.items()):
            if known is heartbeat:
                del _heartbeats[key]
