"""The watcher: the one thread of a process that looks after its peers, in the store.

A broken connection shows at once that a peer is gone. Silence doesn't: a stopped process, a machine without power and
an unplugged cable look like a slow peer. And a peer that has raised something may be alive all the same. So each
process keeps a record of itself in the store (:mod:`ltx.core.comm.diagnosis`), which its watcher writes again and
again: a beat. A counter beside the records says that one of them says something new. So a look at the counter is all
that waiting costs, however many ranks there are; all records are read when it has moved.

On each axis a rank looks after the beats of the one that follows it, and, where that one is silent, of all others. It
says whom it finds silent. So every rank knows of a silent one, and none reads the beats of all.

A rank that waits asks its watcher, not the store. Where a device waits, and the host with it, nobody asks: there the
watcher aborts what the device waits for.

The store may end before the ranks do, with the launcher that held it. Then their records go to a second one, which a
rank has held since their world was made, empty: nothing is compared there, but who lives is known.

Calls to the store can block forever too, and are given up after one heartbeat timeout. Python computation doesn't stop
the beats. C code that holds Python's lock for longer than the heartbeat timeout does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch.distributed as dist

from ltx.core.base.errors import LtxError, RankMismatchError
from ltx.core.base.private import PrefixStore, Store
from ltx.core.comm.diagnosis import INIT, RECORDS, Node, Record, Status, ThreadWait, Told, Watched, silent_of, stuck
from ltx.core.comm.signature import list_values
from ltx.core.comm.store_exchange import ENDING_S, StoreCaller, poll_until

#: Without a sign of life for so long, a peer counts as lost.
DEFAULT_HEARTBEAT_S = 10.0
#: A thread that has waited for so long says so.
PATIENCE_S = 1.0
# How often it looks then, and how long the first to find a deadlock waits for the others to hear of it.
_PAUSE_S, _LINGER_S = 0.5, 3.0
# How soon a look at the counter follows another one, in a wait that has just begun and in a long one.
_FIRST_TICK_S, _LAST_TICK_S = 0.1, 1.0
# Who hasn't asked for so long waits no longer.
_LEASE_S = 1.0
# How long a rank that leaves by an exception waits until its peers have heard of that.
_HEARD_S = 2.0
_PAST = 16  # axes that have ended, of which a record still tells


class Watcher:
    """The watcher of this process, which is `rank` of the world. A peer without a beat for `heartbeat_s` is lost.

    Calls on one connection wait for each other. So it has one for its own thread, and threads of ltx ask on that of
    `store`. On neither may torch have groups connect.
    """

    def __init__(self, store: Store, rank: int, heartbeat_s: float, answer_s: float = 0.0):
        self._rank = rank
        self._users = 0
        #: Without a beat for so long a peer counts as lost; the store without an answer, unless `answer_s` is longer.
        self.heartbeat_s = heartbeat_s
        self.store = store
        self._connection: Store = store.clone()  # type: ignore[attr-defined]
        self._own = PrefixStore(RECORDS, self._connection)
        #: Called with each beat, in the watcher's thread and with its connection to `store`.
        self.on_beat: Callable[[Store], None] = lambda store: None
        #: The rank that holds a second store, and how to connect to that; and it itself, on that rank.
        self.second: tuple[int, Callable[[], Store]] | None = None
        self.held: Store | None = None
        #: The axes that it looks after, by label.
        self.axes: dict[str, Watched] = {}
        self.deadlocks = Deadlocks(self, rank)
        #: What all ranks say, as far as this process has looked: replaced as a whole.
        self.records: Mapping[int, Record] = {}
        self.version = 0  # of them
        self._news = True  # there is something new to say
        self._wanted_s, self._tick_s, self._refresh = 0.0, _FIRST_TICK_S, False
        self._mine = Record()
        self._past: dict[str, Status] = {}  # of the axes that were closed last
        self._rounds = 0  # how many times it has gone round
        self._round = threading.Condition()
        self._under_way_s: float | None = None  # since when a call to the store has been
        self._with_record: set[int] = set()
        self._beats: dict[int, tuple[float, float]] = {}  # of all whose record it has read: (beat, since when)
        self._silent: dict[int, float] = {}
        self._looked_s = 0.0
        self._ended, self._gone, self._gone_s, self._woken = False, False, 0.0, threading.Event()
        # After all of the above, which its thread looks at.
        #: Through which this process calls the store, and gives up after a while.
        self.store_caller = StoreCaller(rank, max(heartbeat_s, answer_s), self._why_gone, self._when_idle)
        #: Tells this world from all others; the same on all ranks.
        self.world = self._own.compare_set("world", "", os.urandom(8).hex()).decode()
        self._write()
        self._thread = threading.Thread(target=self._watch, name="ltx-watcher", daemon=True)
        self._thread.start()

    # --- for the threads of this process ---

    @property
    def without_store(self) -> bool:
        """Whether the store is gone, or doesn't answer."""
        began = self._under_way_s
        return self._gone or (began is not None and time.monotonic() - began > self.store_caller.limit_s)

    def host_gone(self, for_s: float = 0.0) -> bool:
        """Whether the process of rank 0 has been gone `for_s`, as the store tells: of no other that holds it."""
        of_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return of_rank_0 and self._gone_s > 0 and time.monotonic() - self._gone_s >= for_s

    def _when_idle(self) -> None:
        """Called now and then by the thread that asks the store, while this one's own is stuck there, or has ended."""
        if self.without_store:
            self._look_after_devices()

    def _look_after_devices(self) -> None:
        for axis in list(self.axes.values()):
            axis.look_after_device()

    @property
    def _pause_s(self) -> float:
        """How much later the next beat comes."""
        return min(0.5, self.heartbeat_s / 10)

    def shorten(self, heartbeat_s: float) -> None:
        """Let it be `heartbeat_s` from now on, if it was longer. The beats follow at once: peers won't wait longer."""
        if heartbeat_s < self.heartbeat_s:
            self.heartbeat_s = heartbeat_s
            self.expect_answers()
            self._woken.set()

    def expect_answers(self) -> None:
        """From now on a store that doesn't answer for as long as a peer may be silent counts as lost too."""
        self.store_caller.limit_s = self.heartbeat_s

    def tell(self, wait: bool = False) -> None:
        """This process' record has something new: let the peers know. `wait`: until they can."""
        self._news = True
        self._go_round(wait)

    def look(self) -> Mapping[int, Record]:
        """What all ranks say, at most a tick old. Called again and again by a thread that waits.

        Raises:
            PeerLostError: the store doesn't answer.
        """
        now = time.monotonic()
        if self.without_store and not self._gone:
            raise self.store_caller.unanswered()
        if now - self._wanted_s > _LEASE_S:
            self._tick_s = _FIRST_TICK_S
            self._woken.set()
        self._wanted_s = now
        return self.records

    def look_again(self) -> None:
        """Have all records read with the next tick, though none of them says something new."""
        self._refresh = True

    def look_now(self) -> Mapping[int, Record]:
        """What all ranks say now, if the store answers."""
        self._refresh = True
        self._go_round(wait=True)
        return self.records

    def _go_round(self, wait: bool) -> None:
        """Have the watcher go round once more; `wait`: until it has, or it can't."""
        with self._round:
            after = self._rounds + 1 + (self._under_way_s is not None)
            self._woken.set()
            if wait and not self._ended and threading.current_thread() is not self._thread:
                self._round.wait_for(lambda: self._rounds >= after or self.without_store, self.heartbeat_s)

    def wait_until_heard(self, dead: Collection[int] = ()) -> None:
        """Wait, a little, until the peers but the `dead` know what this process has said: with it the store may end."""
        with suppress(LtxError):
            poll_until(partial(self._is_heard, dead), _HEARD_S)

    def _is_heard(self, dead: Collection[int]) -> bool:
        silent = silent_of(self.look_now()).union(dead, {self._rank})
        alive = [record for rank, record in self.records.items() if record.beat and rank not in silent]
        return self._gone or all(record.seen >= self.version for record in alive)

    def _abandoned(self) -> dict[int, str]:
        """Why ranks have left an axis by an exception, as far as this process knows."""
        said = [(rank, status) for rank, record in self.records.items() for status in record.axes.values()]
        return {rank: status.abandoned[0] for rank, status in said if status.abandoned is not None}

    def _why_gone(self) -> str:
        """What the peers have said, for one that finds the store gone."""
        self._gone_s = self._gone_s or time.monotonic()
        why = {rank: why for rank, why in self._abandoned().items() if rank != self._rank}
        return "".join(f" Rank {rank} had left because of an exception ({said})." for rank, said in sorted(why.items()))

    def gone(self) -> set[int]:
        """Who has ended, or shows no beats any more, as far as the ranks that have a record say. As :meth:`look`."""
        said = self.look()
        return silent_of(said) | {rank for rank, record in said.items() if not record.beat}

    def without_beat(self, ranks: Sequence[int]) -> set[int]:
        """Those of `ranks` that show no beat from now on, for about an interval; several for longer: some are late."""
        before, silent = self.look_now(), {*ranks}

        def are_silent(at_most: int) -> bool:
            now = self.look_now()
            silent.difference_update(r for r in now.keys() & before.keys() if now[r].beat != before[r].beat)
            return len(silent) <= at_most

        if not poll_until(lambda: are_silent(0), max(1.3 * self._pause_s, 0.25)):
            poll_until(lambda: are_silent(1) or self.without_store, 0.2 * self.heartbeat_s)
        return silent

    def leave(self, axis: Watched) -> None:
        """`axis` has ended. What this rank said last of it stays in its record, as long as few have ended since."""
        if self.held is not None and self._gone_s:  # the peers may lose it next
            self.wait_until_heard()
        if self.axes.pop(axis.label, None) is not None:
            self._past[axis.label] = axis.status()
            for label in [past for past in self._past if past != INIT][:-_PAST]:
                del self._past[label]

    def hold(self) -> None:
        """Count one more user."""
        self._users += 1

    def release(self) -> bool:
        """Count one user less; returns whether that was the last one, and the watcher has ended."""
        self._users -= 1
        if self._users:
            return False
        self._ended = self._news = True
        self._woken.set()
        self.store_caller.close()
        if self._thread is not threading.current_thread():
            self._thread.join(ENDING_S)
        del self.store, self.held  # connections may be closed, even if something still holds this watcher
        return True

    # --- the watcher's own thread ---

    def _watch(self) -> None:
        with suppress(dist.DistError):  # the store is gone: threads that call it see that
            self._go_round_by_round()
        if not self._ended and self.second is not None:
            (holder, connect), self._gone_s = self.second, self._gone_s or time.monotonic()
            self.store_caller.held_by = f"rank {holder}'s"
            with suppress(dist.DistError):
                self._connection = connect()
                self._own = PrefixStore(RECORDS, self._connection)
                # Nobody has a record there yet, and how long peers are silent counts from now on.
                self.on_beat, self.version, self._news, self._with_record = lambda store: None, 0, True, set()
                self._looked_s = 0.0
                self._go_round_by_round()
            lost = self.records.get(holder, Record())
            if lost.beat and not all(lost.on(label).ended for label in list(self.axes)):  # with the second store
                said = replace(self._mine, silent={**self._silent, holder: lost.beat})
                self.records = {**self.records, self._rank: said}
        self._gone, self._gone_s, self._under_way_s = True, self._gone_s or time.monotonic(), None
        with self._round:
            self._round.notify_all()
        del self._own, self._connection  # closed now, even if something still holds this watcher

    def _go_round_by_round(self) -> None:
        due_s = 0.0
        while not self._ended:
            now = time.monotonic()
            waited_for = now - self._wanted_s < _LEASE_S
            self._woken.wait(max(0.0, min(due_s, now + self._tick_s if waited_for else due_s) - now))
            self._woken.clear()
            now = self._under_way_s = time.monotonic()
            beats = now >= due_s
            if beats or self._news:
                self._write()
            if self.axes:
                self._read()
                if beats:
                    self._look_after_peers(now)
            if beats:
                due_s = now + self._pause_s
                self.on_beat(self._connection)
            self._under_way_s = None
            self._tick_s = min(1.3 * self._tick_s, _LAST_TICK_S, self.heartbeat_s / 4)
            self._look_after_devices()
            with self._round:
                self._rounds += 1
                self._round.notify_all()
        self._under_way_s = time.monotonic()
        self._write()

    def _write(self) -> None:
        news, self._news = self._news, False
        told = self.deadlocks.told()
        news |= self.deadlocks.is_new(told)
        axes = self._past | {label: axis.status() for label, axis in list(self.axes.items())}
        beat = 0.0 if self._ended else time.monotonic()
        self._mine = Record(beat, self.version, self._silent, axes, told)
        self._own.set(str(self._rank), self._mine.text())
        if news:
            self._own.add("version", 1)

    def _read(self) -> None:
        """Read all records if something new is in them."""
        version = self._own.add("version", 0)
        if version == self.version and not self._refresh:
            return
        self._refresh = False
        wanted = {rank for axis in list(self.axes.values()) for rank in axis.global_ranks} | self.deadlocks.wanted
        self.records = self._records_of(wanted) | {self._rank: self._mine}
        if version != self.version:
            self._tick_s, self.version = _FIRST_TICK_S, version
            if self._abandoned():  # who has said so may wait until it has been heard
                self._write()

    def _records_of(self, ranks: set[int]) -> dict[int, Record]:
        """The records of `ranks`: here, else the last one known, as far as there is one. Its own isn't asked for."""
        new = sorted(ranks - self._with_record - {self._rank})
        if new and self._own.check([str(rank) for rank in new]):
            self._with_record.update(new)
        else:
            self._with_record.update(rank for rank in new if self._own.check([str(rank)]))
        there = sorted(ranks & self._with_record)
        texts = self._own.multi_get([str(rank) for rank in there]) if there else []
        known = {rank: self.records[rank] for rank in ranks & self.records.keys()}
        records = known | {rank: Record.of(text) for rank, text in zip(there, texts, strict=True)}
        now = time.monotonic()
        for rank, record in records.items():
            if self._beats.get(rank, (-1.0, 0.0))[0] != record.beat:
                self._beats[rank] = record.beat, now
        return records

    def _look_after_peers(self, now: float) -> None:
        """Find out who is silent among those that this rank looks after."""
        if now - self._looked_s > self.heartbeat_s / 2:  # it was held up itself: old beats tell nothing
            self._beats.clear()
        self._looked_s = now
        records = self._records_of({rank for axis in list(self.axes.values()) for rank in self._after(axis)})
        late_s = self.heartbeat_s + self._pause_s  # a beat may be one interval late
        late = [rank for rank, record in records.items() if record.beat and now - self._beats[rank][1] > late_s]
        silent = {rank: records[rank].beat for rank in late}
        if silent != self._silent:
            self._silent, self._news = silent, True
            self._write()
            self._read()

    def _after(self, axis: Watched) -> list[int]:
        """The ranks that follow this rank on `axis`, up to the first one that is alive; all ranks if one is silent."""
        ranks = axis.global_ranks
        place = ranks.index(self._rank)
        order = ranks[place + 1 :] + ranks[:place]
        if not {*order}.isdisjoint(silent_of(self.records) | self._silent.keys()):
            return order
        for number, rank in enumerate(order):
            if rank in self._with_record and (rank not in self.records or self.records[rank].beat):
                return order[: number + 1]
        return order


class Deadlocks:
    """What the threads of this process, which is `rank` of the world, wait for, and whether they may for ever."""

    def __init__(self, watcher: Watcher, rank: int):
        self._watcher, self._rank = watcher, rank
        self._serials = count()
        self._waits: dict[int, ThreadWait] = {}
        self._looked_s: dict[int, float] = {}
        #: By thread, the deadlock that it has seen once: everybody's wait, and when the ranks in it had said so.
        self._suspected: dict[int, tuple[dict[Node, int], dict[int, float]]] = {}
        self._found: tuple[list[tuple[int, int, int]], str] | None = None
        self._said: Any = None
        #: Ranks of other axes, which this one's peers wait for.
        self.wanted: set[int] = set()
        #: By axis: (issues made, threads that have made them) of each key.
        self.counts: dict[str, Callable[[], dict[str, tuple[int, Iterable[int]]]]] = {}

    def told(self) -> Told:
        """What goes with the record; nothing while no thread has waited for long."""
        # Before the counts: in between a thread may only have issued more, never less, than it had when it waited.
        waits = list(self._waits.values())
        if not waits and self._found is None:
            return Told()
        alive = set(sys._current_frames())
        counts = {
            key: (number, sorted(alive.intersection(threads)))
            for of_axis in list(self.counts.values())
            for key, (number, threads) in of_axis().items()
        }
        return Told(waits, counts, self._found)

    def is_new(self, told: Told) -> bool:
        """Whether what is `told` now can be a deadlock where what was told before wasn't."""
        said = told.waits, {key: threads for key, (_, threads) in told.counts.items()}, told.found
        new, self._said = bool(told.waits) and said != self._said, said
        return new

    def check(self, key: str, number: int, ranks: list[int], describe: Callable[[], str], told_of: str = "") -> None:
        """Called now and then by a thread that has waited for :data:`PATIENCE_S`: will it for ever?

        Raises:
            RankMismatchError: it would; on all ranks that would.
            PeerLostError: the store doesn't answer.
        """
        thread, now = threading.get_ident(), time.monotonic()
        wait = self._waits.get(thread)
        if wait is None or (wait.key, wait.number) != (key, number):
            self._suspected.pop(thread, None)
            self._found = None
            wait = ThreadWait(thread, next(self._serials), key, number, ranks, describe(), told_of)
            self._waits[thread] = wait
            self._watcher.tell()
        elif now - self._looked_s.get(thread, 0.0) < _PAUSE_S:
            return
        self._looked_s[thread] = now
        told, said_s = self._all_told(ranks)
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
        if seen:
            self._watcher.look_again()

    def done(self) -> None:
        """This thread waits no longer."""
        if self._waits:
            self._waits.pop(threading.get_ident(), None)

    def _all_told(self, ranks: Iterable[int]) -> tuple[dict[int, Told], dict[int, float]]:
        """What `ranks` say, and those that they wait for, and so on; and when each has."""
        records = self._watcher.look()
        told, said_s, wanted = dict[int, Told](), dict[int, float](), set(ranks)
        while missing := sorted(wanted - told.keys()):
            for rank in missing:
                record = records.get(rank, Record())
                said_s[rank], told[rank] = record.beat, record.told
                wanted.update(*(wait.ranks for wait in told[rank].waits))
        if not wanted <= records.keys() | {self._rank}:
            self.wanted |= wanted
            self._watcher.look_again()
        told[self._rank] = self.told()
        return told, said_s

    def _raise(self, nodes: list[tuple[int, int, int]], text: str) -> NoReturn:
        """Raise, once all ranks in the deadlock know of it: the first one to raise may end, and the store with it."""
        self._found = (nodes, text)
        with suppress(LtxError):  # it is known what to raise
            self._watcher.tell(wait=True)
            poll_until(lambda: self._have_heard(nodes), _LINGER_S)
        raise RankMismatchError(
            f"rank {self._rank}: ranks disagree on what they call, and wait for each other: {text}. Fix: call the same "
            "collectives in the same order on every rank: one that some ranks alone call, as under `if rank == 0:`, "
            "waits for the others for ever. If ranks have unequal numbers of batches: ltx.uneven(batches)."
        )

    def _have_heard(self, nodes: list[tuple[int, int, int]]) -> bool:
        self._watcher.look_now()
        told, _ = self._all_told({rank for rank, _, _ in nodes})
        still = {(rank, w.thread, w.serial) for rank, said in told.items() for w in said.waits if not said.found}
        return still.isdisjoint(nodes)


# By the store of a world's process group.
_watchers: dict[int, tuple[Store, Watcher]] = {}


def watch_by(watcher: Watcher, store: Store) -> None:
    """`watcher` is the one in the world of `store`, from now on."""
    _watchers[id(store)] = store, watcher


def hold_watcher(store: Store, rank: int, heartbeat_s: float) -> Watcher:
    """The one watcher of this process in the world of `store`. Call :func:`release_watcher` when done."""
    if id(store) not in _watchers:
        watch_by(Watcher(store.clone(), rank, heartbeat_s), store)  # type: ignore[attr-defined]
    _, watcher = _watchers[id(store)]
    watcher.shorten(heartbeat_s)
    watcher.hold()
    return watcher


def release_watcher(watcher: Watcher) -> None:
    """The counterpart of :func:`hold_watcher`."""
    if watcher.release():
        for key in [key for key, (_, known) in _watchers.items() if known is watcher]:
            del _watchers[key]
