"""Deadlocks: ranks each of which waits for something that another won't issue before its own wait is over.

A collective that one rank alone calls does it: that rank waits there, its peers wait in the next step, and none of them
has issued what another waits for. Where what they call is new to them they compare it first, and find that it differs
(:mod:`ltx.core.comm.negotiation`). Known calls, each on a channel of its own, aren't compared.

So a thread that has waited for a second says so with its process' beats (:mod:`ltx.core.comm.heartbeat`): for which
issue of which channel, and how many its process has made on each. Shorter waits cost nothing. It waits for those of its
peers that have made fewer. What is missing there may come from any thread of the peer that has issued on that channel
before, so it never comes if all of these wait for what never comes. The largest set of threads of which that is true is
a deadlock. A rank that computes, sleeps, or has waited for less than a second isn't in it, nor is one that waits for
it.

Counts never shrink, and a thread that waits issues nothing: what one rank said before another did is still true. All
the same a deadlock counts as one only when later beats of all its ranks say the same.

Not seen: waits inside compiled graphs and for NCCL, where Python doesn't wait. They end with the axis' timeout.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, NoReturn

from ltx.core.base.errors import LtxError, RankMismatchError
from ltx.core.comm.signature import list_values
from ltx.core.comm.store_exchange import poll_until

#: A thread that has waited for so long says so.
PATIENCE_S = 1.0
# How often it looks then, and how long the first to find a deadlock waits for the others to hear of it.
_PAUSE_S, _LINGER_S = 0.5, 3.0
#: How keys end for which a rank that hasn't heard of them has made no issue: it hasn't opened that axis.
OPENED = "opened"

#: A thread: the rank of its process in the world, and its number there.
Node = tuple[int, int]


@dataclass(frozen=True)
class ThreadWait:
    """What a thread waits for: that `ranks` (of the world) have all made `number` issues of `key`."""

    thread: int
    serial: int  # of the thread's waits: no progress where that is the same
    key: str
    number: int
    ranks: list[int]
    text: str  # what it is in, and on which line


@dataclass(frozen=True)
class Told:
    """What a process says of itself."""

    waits: list[ThreadWait] = field(default_factory=list)  # of those of its threads that have waited for long
    counts: dict[str, tuple[int, list[int]]] = field(default_factory=dict)  # (issues made, by which threads) by keys
    #: The waits of the deadlock that it has found, as (rank, thread, serial); and the error's text.
    found: tuple[list[tuple[int, int, int]], str] | None = None

    @staticmethod
    def of(fields: Mapping[str, Any] | None) -> Told:
        """Inverse of ``dataclasses.asdict``, through JSON."""
        if fields is None:
            return Told()
        found = fields["found"] and ([(*node,) for node in fields["found"][0]], fields["found"][1])
        counts = {key: (number, threads) for key, (number, threads) in fields["counts"].items()}
        return Told([ThreadWait(**wait) for wait in fields["waits"]], counts, found)

    def made(self, wait: ThreadWait) -> int:
        """How many issues it has made of what `wait` is for: enough, if it doesn't say."""
        return self.counts.get(wait.key, (0 if wait.key.endswith(f"/{OPENED}") else wait.number, []))[0]

    def may_issue(self, key: str) -> set[int]:
        """The threads that what is missing at `key` may come from: any that is known, if none has issued there yet."""
        return set(self.counts.get(key, (0, []))[1]) or {
            *(wait.thread for wait in self.waits),
            *(thread for _, threads in self.counts.values() for thread in threads),
        }


def stuck(told: Mapping[int, Told]) -> dict[Node, ThreadWait]:
    """The threads that wait for ever, given what each rank has told."""
    left = {(rank, wait.thread): wait for rank, said in told.items() for wait in said.waits}

    def waits_in_vain(rank: int, wait: ThreadWait) -> bool:
        return any(
            peer != rank
            and peer in told
            and told[peer].made(wait) < wait.number
            and (threads := told[peer].may_issue(wait.key))
            and all((peer, thread) in left for thread in threads)
            for peer in wait.ranks
        )

    while going_on := [node for node, wait in left.items() if not waits_in_vain(node[0], wait)]:
        for node in going_on:
            del left[node]
    return left


class Deadlocks:
    """What this process' threads wait for, and whether that may go on for ever; `rank`: its own, in the world."""

    def __init__(self, last: Callable[[list[int]], list[bytes]], beat: Callable[[], None], rank: int):
        self._last, self._beat, self._rank = last, beat, rank
        self._serials = count()
        self._waits: dict[int, ThreadWait] = {}
        self._looked_s: dict[int, float] = {}
        #: By thread, the deadlock that it has seen once: everybody's wait, and when the ranks in it had said so.
        self._suspected: dict[int, tuple[dict[Node, int], dict[int, float]]] = {}
        self._found: tuple[list[tuple[int, int, int]], str] | None = None
        #: By axis: (issues made, threads that have made them) of each key.
        self.counts: dict[str, Callable[[], dict[str, tuple[int, Iterable[int]]]]] = {}

    def told(self) -> dict[str, Any] | None:
        """What goes with the beats; None while no thread has waited for long."""
        # Before the counts: in between a thread may only have issued more, never less, than it had when it waited.
        waits = list(self._waits.values())
        if not waits and self._found is None:
            return None
        alive = set(sys._current_frames())
        counts = {
            key: (number, sorted(alive.intersection(threads)))
            for of_axis in list(self.counts.values())
            for key, (number, threads) in of_axis().items()
        }
        return asdict(Told(waits, counts, self._found))

    def check(self, key: str, number: int, ranks: list[int], describe: Callable[[], str]) -> None:
        """Called now and then by a thread that has waited for :data:`PATIENCE_S`: will it for ever?

        Raises:
            RankMismatchError: it would; on all ranks that would.
            PeerLostError: the store is gone, or doesn't answer.
        """
        thread, now = threading.get_ident(), time.monotonic()
        wait = self._waits.get(thread)
        if wait is None or (wait.key, wait.number) != (key, number):
            self._suspected.pop(thread, None)
            self._found = None
            self._waits[thread] = wait = ThreadWait(thread, next(self._serials), key, number, ranks, describe())
        elif now - self._looked_s.get(thread, 0.0) < _PAUSE_S:
            return
        self._looked_s[thread] = now
        told, said_s = self._ask(ranks)
        for said in told.values():
            if said.found is not None and (self._rank, thread, wait.serial) in said.found[0]:
                self._raise(*said.found)
        waits = stuck(told)
        seen = {node: waits[node].serial for node in waits} if (self._rank, thread) in waits else {}
        since = {rank: said_s[rank] for rank, _ in seen if rank != self._rank}
        before, then = self._suspected.get(thread, ({}, {}))
        if not seen or seen != before:
            self._suspected[thread] = (seen, since)
        elif all(since[rank] > then[rank] for rank in since):
            texts: dict[int, str] = {}
            for (rank, _), stays in sorted(waits.items()):
                texts[rank] = f"{texts[rank]} and {stays.text}" if rank in texts else stays.text
            self._raise([(*node, stays.serial) for node, stays in waits.items()], list_values(texts))

    def done(self) -> None:
        """This thread waits no longer."""
        if self._waits:
            self._waits.pop(threading.get_ident(), None)

    def _ask(self, ranks: Iterable[int]) -> tuple[dict[int, Told], dict[int, float]]:
        """What `ranks` say, and those that they wait for, and so on; and when each has."""
        told, said_s, wanted = dict[int, Told](), dict[int, float](), set(ranks)
        while missing := sorted(wanted - told.keys()):
            beats = self._last(missing)
            for rank, beat in zip(missing, beats or [b"[0, {}, null]"] * len(missing), strict=True):
                said_s[rank], _, fields = json.loads(beat)
                told[rank] = Told.of(fields)
                wanted.update(*(wait.ranks for wait in told[rank].waits))
        told[self._rank] = Told.of(json.loads(json.dumps(self.told())))
        return told, said_s

    def _raise(self, nodes: list[tuple[int, int, int]], text: str) -> NoReturn:
        """Raise, once all ranks in the deadlock know of it: the first one to raise may end, and the store with it."""
        self._found = (nodes, text)
        with suppress(LtxError):  # it is known what to raise
            self._beat()
            poll_until(lambda: self._have_heard(nodes), _LINGER_S)
        raise RankMismatchError(
            f"rank {self._rank}: ranks disagree on what they call, and wait for each other: {text}. Fix: call the same "
            "collectives in the same order on every rank: one that some ranks alone call, as under `if rank == 0:`, "
            "waits for the others for ever. If ranks have unequal numbers of batches: ltx.uneven(batches)."
        )

    def _have_heard(self, nodes: list[tuple[int, int, int]]) -> bool:
        told, _ = self._ask({rank for rank, _, _ in nodes})
        still = {(rank, w.thread, w.serial) for rank, said in told.items() for w in said.waits if not said.found}
        return still.isdisjoint(nodes)
