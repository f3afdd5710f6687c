"""The watcher: one thread of a process that checks on its peers, through the store.

A broken connection shows at once that a peer is gone. Silence doesn't: a stopped process, a machine without power and
an unplugged cable look like a slow peer. And a peer that has raised an error may still be alive. So each process keeps
a record of itself in the store (:mod:`ltx.peers.diagnosis`), and its watcher writes the record again and again:
each time is a beat. A counter beside the records moves when a record has news. So waiting costs one look at the
counter, however many ranks there are; all records are read when the counter has moved.

On each axis a rank checks the beats of the rank after it, and if that one is silent, the beats of all others. It tells
which ranks it finds silent. So every rank learns of a silent rank, and no rank reads all beats.

A rank that waits asks its watcher, not the store. Where a device waits no thread asks: the watcher aborts collectives.

The store may end first, with the launcher that held it. Then a broken connection still shows who is gone, and silence
no longer does: waits end by their timeout. Calls to the store can block forever too, and are given up after one
heartbeat timeout. Python computation doesn't stop the beats, but C code that holds Python's lock does. So a rank
without a beat is silent only if the kernel says that its process is stopped or gone, or can't, as on another machine.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ltx.core.base import kernel
from ltx.core.base.errors import LtxError, RankMismatchError
from ltx.core.comm.signature import list_values
from ltx.core.comm.transport import poll_until
from ltx.peers.diagnosis import INIT, RECORDS, Node, Record, Status, ThreadWait, Told, Watched, silent_of, stuck
from ltx.peers.patient_store import ENDING_S, YIELD_S, StoreCaller

_PAUSE_S, _LINGER_S = 0.5, 3.0  # between looks of a waiting thread; for the first to find a deadlock until others know
_FIRST_TICK_S, _LAST_TICK_S = 0.1, 1.0  # between looks at the counter, in a new wait and in a long one
_LEASE_S = 1.0  # a thread that hasn't called check() for this long doesn't wait any more
_HEARD_S = 2.0  # how long a rank that leaves by an exception, or takes the store with it, waits until its peers know
_PAST = 16  # a record keeps this many axes that have ended


class Watcher:
    """The watcher of this process, which is `rank` of the world. A peer without a beat for `heartbeat_s` is lost.

    Calls on one connection wait for each other. So the watcher's thread has its own connection, and other threads of
    ltx use that of `store`. torch mustn't connect groups on either.
    """

    def __init__(self, store: Store, rank: int, heartbeat_s: float, answer_s: float = 0.0):
        self._rank = rank
        self.users = 1  # who has made it
        self.heartbeat_s = heartbeat_s  #: also of a silent store, unless `answer_s` is longer
        self.store = store
        self._connection: Store = store.clone()  # type: ignore[attr-defined]
        self._own = PrefixStore(RECORDS, self._connection)
        self.axes: dict[str, Watched] = {}  #: the axes that the watcher looks after, by label
        self.deadlocks = Deadlocks(self, rank)
        self.records: Mapping[int, Record] = {}  #: of all ranks, as last read: replaced as a whole
        self.version = 0  # of them
        self._news = True  # whether this process' record has news
        self._wanted_s, self._tick_s = 0.0, _FIRST_TICK_S
        self.refresh = False  # whether the next tick reads all records even if none has news
        self._mine = Record(process=kernel.identity())
        self._past: dict[str, Status] = {}  # the statuses of the axes that were closed last
        self._rounds = 0  # how many rounds the watcher has made
        self._round = threading.Condition()
        self._under_way_s: float | None = None  # the time at which the pending call to the store began
        self._with_record: set[int] = set()
        self._beats: dict[int, tuple[float, float]] = {}  # (beat, since when) of all ranks whose record was read
        self._silent: dict[int, tuple[float, str]] = {}
        self._looked_s = 0.0
        self._ended, self._gone, self._gone_s, self._woken = False, False, 0.0, threading.Event()
        # This comes after the fields above, which its thread reads.
        #: Whether rank 0 holds the store of the world, not its launcher.
        self.held_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        #: All calls to the store go through it, and can time out.
        self.store_caller = StoreCaller(
            rank, max(heartbeat_s, answer_s), self._why_gone, self._when_idle, self._what_became_of_the_host
        )
        self.store_caller.host = 0 if self.held_by_rank_0 else None
        self.call = 0  # the call of a Pool that this process is in
        self._write()
        self._thread = threading.Thread(target=self._watch, name="ltx-watcher", daemon=True)
        self._thread.start()

    # --- for the threads of this process ---

    @property
    def without_store(self) -> bool:
        """Whether the store is gone, or doesn't answer."""
        began = self._under_way_s
        if self.store_caller.is_late:
            return True
        if not self._gone and began is not None and time.monotonic() - began > self.store_caller.limit_s:
            time.sleep(YIELD_S)  # the watcher's thread may have the answer, and wait for Python's lock
            return self._gone or self._under_way_s == began
        return self._gone

    def host_gone(self, for_s: float = 0.0) -> bool:
        """Whether rank 0's process has been gone for `for_s`; False if another process holds the store."""
        return self.held_by_rank_0 and self._gone_s > 0 and time.monotonic() - self._gone_s >= for_s

    def _what_became_of_the_host(self) -> str:
        """What the kernel says of the process that holds the store, in words."""
        rank = self.store_caller.host
        return kernel.state([] if rank is None else self.records.get(rank, Record()).process) or kernel.UNKNOWN

    def _when_idle(self) -> None:
        """Called now and then by threads that wait for the store, in case the watcher's thread is stuck or ended."""
        if self.without_store:
            self._look_after_devices()

    def _look_after_devices(self) -> None:
        for axis in list(self.axes.values()):
            axis.look_after_device()

    @property
    def _pause_s(self) -> float:
        return min(0.5, self.heartbeat_s / 10)

    def shorten(self, heartbeat_s: float) -> None:
        """Lower the timeout to `heartbeat_s`, if it was longer. A beat follows at once: peers won't wait longer."""
        if heartbeat_s < self.heartbeat_s:
            self.heartbeat_s = heartbeat_s
            self.expect_answers()
            self._woken.set()

    def expect_answers(self) -> None:
        """From now on a store counts as lost too if it doesn't answer for as long as a peer may be silent."""
        self.store_caller.limit_s = self.heartbeat_s

    def tell(self, wait: bool = False) -> None:
        """This process' record has news: let the peers know. `wait`: until they can."""
        self._news = True
        self._go_round(wait)

    def look(self) -> Mapping[int, Record]:
        """The records of all ranks, at most a tick old, for a thread that waits. Raises if the store doesn't answer."""
        now = time.monotonic()
        if self.without_store and not self._gone:
            raise self.store_caller.unanswered()
        if now - self._wanted_s > _LEASE_S:
            self._tick_s = _FIRST_TICK_S
            self._woken.set()
        self._wanted_s = now
        return self.records

    def look_now(self) -> Mapping[int, Record]:
        """The records of all ranks now, if the store answers."""
        self.refresh = True
        self._go_round(wait=True)
        return self.records

    def _go_round(self, wait: bool) -> None:
        """Make the watcher do one more round; `wait`: until it has done it, or can't."""
        with self._round:
            after = self._rounds + 1 + (self._under_way_s is not None)
            self._woken.set()
            end = time.monotonic() + self.heartbeat_s
            while wait and not self._ended and threading.current_thread() is not self._thread:
                if self._rounds >= after or self.without_store or time.monotonic() > end:
                    break
                self._round.wait(_PAUSE_S)  # nobody tells that the store doesn't answer

    def wait_until_heard(self, dead: Collection[int] = ()) -> None:
        """Wait briefly until all peers but the `dead` have read this record: the store may end with this process."""

        def is_heard() -> bool:
            silent = {*silent_of(self.look_now()), *dead, self._rank}
            alive = [record for rank, record in self.records.items() if record.beat and rank not in silent]
            return self._gone or all(record.seen >= self.version for record in alive)

        with suppress(LtxError):
            poll_until(is_heard, _HEARD_S)

    def failed(self, now: bool = False) -> dict[int, str]:
        """The exceptions by which ranks have left an axis, as far as this process knows; `now`: it reads the store."""
        if now:
            self.look_now()
        said = [(rank, at) for rank, record in self.records.items() for at in record.axes.values()]
        return {rank: at.failed.why for rank, at in said if at.failed is not None and at.failed.matters(self.call)}

    def _why_gone(self) -> str:
        """The peers' reasons to leave, for the error of a rank that finds the store gone."""
        self._gone_s = self._gone_s or time.monotonic()
        why = {rank: why for rank, why in self.failed().items() if rank != self._rank}
        return "".join(f" Rank {rank} had left because of an exception ({said})." for rank, said in sorted(why.items()))

    def without_beat(self, ranks: Sequence[int]) -> set[int]:
        """The ranks among `ranks` that show no beat for about an interval from now on; for several it waits longer."""
        before, silent = self.look_now(), {*ranks}

        def are_silent(at_most: int) -> bool:
            now = self.look_now()
            silent.difference_update(r for r in now.keys() & before.keys() if now[r].beat != before[r].beat)
            return len(silent) <= at_most

        if not poll_until(lambda: are_silent(0), max(1.3 * self._pause_s, 0.25)):
            poll_until(lambda: are_silent(1) or self.without_store, 0.2 * self.heartbeat_s)
        return {rank for rank in silent if kernel.state(self.records.get(rank, Record()).process)}

    def leave(self, axis: Watched) -> None:
        """`axis` has ended. The axis' last status stays in the record until many other axes have ended."""
        if self.axes.pop(axis.label, None) is not None:
            self._past[axis.label] = axis.status()
            for label in [past for past in self._past if past != INIT][:-_PAST]:
                del self._past[label]

    def watch_for(self, store: Store) -> None:
        """Be the watcher of this process in the world of `store`."""
        _watchers[store] = self

    def release(self) -> None:
        """Count one user less. After the last one the watcher ends."""
        self.users -= 1
        if self.users:
            return
        self._ended = self._news = True
        self._woken.set()
        self.store_caller.close()
        if self._thread is not threading.current_thread() and not self.without_store:
            self._thread.join(ENDING_S)
        del self.store  # close connections now, even if something still refers to this watcher
        for store in [store for store, known in _watchers.items() if known is self]:
            del _watchers[store]

    # --- the watcher's own thread ---

    def _watch(self) -> None:
        with suppress(dist.DistError):  # the store is gone, which threads that call it will see
            self._go_round_by_round()
        self._gone, self._gone_s, self._under_way_s = True, self._gone_s or time.monotonic(), None
        with self._round:
            self._round.notify_all()
        del self._own, self._connection  # closed now, even if something still refers to this watcher

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
                self._under_way_s = time.monotonic()
            if self.axes:
                self._read()
                self._under_way_s = time.monotonic()
                if beats:
                    self._look_after_peers(now)
            if beats:
                due_s = now + self._pause_s
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
        self._mine = Record(beat, self.version, self._silent, axes, told, self._mine.process)
        self._own.set(str(self._rank), self._mine.text())
        if news:
            self._own.add("version", 1)

    def _read(self) -> None:
        version = self._own.add("version", 0)
        if version == self.version and not self.refresh:
            return
        self.refresh = False
        wanted = {rank for axis in list(self.axes.values()) for rank in axis.global_ranks} | self.deadlocks.wanted
        self.records = self._records_of(wanted) | {self._rank: self._mine}
        if version != self.version:
            self._tick_s, self.version = _FIRST_TICK_S, version
            if self.failed():  # a rank with news may wait until peers have read it
                self._write()

    def _records_of(self, ranks: set[int]) -> dict[int, Record]:
        """The records of `ranks`, read from the store, or else the last known ones. This rank's own isn't read."""
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
        """Find out which of the ranks that this rank checks are silent."""
        if now - self._looked_s > self.heartbeat_s / 2:  # this watcher itself was delayed, so old beats prove nothing
            self._beats.clear()
        self._looked_s = now
        records = self._records_of({rank for axis in list(self.axes.values()) for rank in self._after(axis)})
        late_s = self.heartbeat_s + self._pause_s  # a beat may be one interval late
        silent = dict[int, tuple[float, str]]()
        for rank, record in records.items():
            why, late = kernel.state(record.process), now - self._beats[rank][1] > late_s
            if record.beat and (why == kernel.GONE or (why and late)):
                silent[rank] = record.beat, why
        if silent != self._silent:
            self._silent, self._news = silent, True
            self._write()
            self._read()

    def _after(self, axis: Watched) -> list[int]:
        """The ranks that follow this rank on `axis`, up to the first one that is alive; all ranks if one is silent."""
        ranks = axis.global_ranks
        place = ranks.index(self._rank)
        order = ranks[place + 1 :] + ranks[:place]
        if not {*order}.isdisjoint({*silent_of(self.records), *self._silent}):
            return order
        for number, rank in enumerate(order):
            if rank in self._with_record and (rank not in self.records or self.records[rank].beat):
                return order[: number + 1]
        return order


class Deadlocks:
    """The waits of the threads of this process, `rank` of the world, and whether a wait can never end."""

    def __init__(self, watcher: Watcher, rank: int):
        self._watcher, self._rank = watcher, rank
        self._serials = count()
        self.waits: dict[int, ThreadWait] = {}
        self._looked_s: dict[int, float] = {}
        #: By thread, a deadlock that was seen once: the waits of its threads, and the beats of its ranks at that time.
        self._suspected: dict[int, tuple[dict[Node, int], dict[int, float]]] = {}
        self._found: tuple[list[tuple[int, int, int]], str] | None = None
        self._said: Any = None
        self.wanted: set[int] = set()  #: ranks of other axes for which this rank's peers wait
        #: By axis: (issues made, threads that have made them) of each key.
        self.counts: dict[str, Callable[[], dict[str, tuple[int, Iterable[int]]]]] = {}

    def told(self) -> Told:
        """The threads' part of the record; empty unless a thread has waited for long."""
        # Read the waits before the counts, so that counts may be newer than the waits, but never older.
        waits = list(self.waits.values())
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
        """Whether the waits `told` now can be a deadlock if those told before weren't."""
        said = told.waits, {key: threads for key, (_, threads) in told.counts.items()}, told.found
        new, self._said = bool(told.waits) and said != self._said, said
        return new

    def check(self, key: str, number: int, ranks: list[int], describe: Callable[[], str]) -> None:
        """Called now and then by a thread that has waited long: RankMismatchError on all ranks that wait for ever."""
        thread, now = threading.get_ident(), time.monotonic()
        wait = self.waits.get(thread)
        if wait is None or (wait.key, wait.number) != (key, number):
            self._suspected.pop(thread, None)
            self._found = None
            wait = ThreadWait(thread, next(self._serials), key, number, ranks, describe())
            self.waits[thread] = wait
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
            self._watcher.refresh = True

    def done(self) -> None:
        if self.waits:
            self.waits.pop(threading.get_ident(), None)

    def _all_told(self, ranks: Iterable[int]) -> tuple[dict[int, Told], dict[int, float]]:
        """The waits of `ranks`, of the ranks that they wait for, and so on; and the beats of these records."""
        records = self._watcher.look()
        told, said_s, wanted = dict[int, Told](), dict[int, float](), set(ranks)
        while missing := sorted(wanted - told.keys()):
            for rank in missing:
                record = records.get(rank, Record())
                said_s[rank], told[rank] = record.beat, record.told
                wanted.update(*(wait.ranks for wait in told[rank].waits))
        if not wanted <= records.keys() | {self._rank}:
            self.wanted |= wanted
            self._watcher.refresh = True
        told[self._rank] = self.told()
        return told, said_s

    def _raise(self, nodes: list[tuple[int, int, int]], text: str) -> NoReturn:
        """Raise once all ranks in the deadlock know of it: the first one to raise may end, and the store with it."""
        self._found = (nodes, text)
        with suppress(LtxError):  # the error to raise is known
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


_watchers: dict[Store, Watcher] = {}  # the watchers by the store of their world's process group


def _refuse_fork() -> None:
    """Ask the store nothing in this process, a fork of the rank's own, whose messages would look like the rank's."""
    for watcher in _watchers.values():
        watcher.store_caller.refuse("this process is a fork of the rank's own")


os.register_at_fork(after_in_child=_refuse_fork)


def hold_watcher(store: Store, rank: int, heartbeat_s: float) -> Watcher:
    """The one watcher of this process in the world of `store`. Call :meth:`Watcher.release` when done."""
    if (watcher := _watchers.get(store)) is None:
        watcher = Watcher(store.clone(), rank, heartbeat_s)  # type: ignore[attr-defined]
        watcher.watch_for(store)
    else:
        watcher.shorten(heartbeat_s)
        watcher.users += 1
    return watcher
