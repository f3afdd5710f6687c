"""Collectives between processes of one machine through shared memory.

Sockets copy each byte through the kernel twice and keep a thread busy; shared memory is one copy. A buffer is cut into
chunks, and each chunk goes through three phases:

    1. every rank copies its input into a slot of its own segment, unless it lies there already -> filled
    2. in a reduction, rank r reduces part r of the chunk over all segments, in rank order,
       into its own slot                                                                        -> reduced
    3. every rank copies its result out of the slots, or reduces a small chunk out of them      -> emptied

Each rank owns three counters that only it writes: how many chunks it has filled, reduced and emptied. A rank does the
next phase of a chunk when its peers' counters allow it. There is no thread for this: any thread that issues or waits
advances the transport, and a lock admits one at a time. Only a wait blocks, and it checks every 0.1 s whether its
peers live: each process holds a lock on a file of its own, which the kernel releases when the process dies.

Beside each chunk lies a tag: a digest of the collectives that its rank has issued on the channel so far, the number
of buffers, and whether this one has a note: a few numbers that are summed over ranks, which takes no time beside a
chunk. Where tags differ, ranks have issued different collectives, and all ranks refuse the chunk. On request the rank
also stores the sum of the numbers that it has reduced, taken while they are in the cache: it tells if all are finite.

An exception (an interrupt, or one from a signal handler) may come at any point of a phase. The counters say which
phases are done, and a phase that isn't counted can be done again from its beginning, so an exception leaves the ranks
in step. If it comes again on the second attempt, the phase itself fails: the transport has failed, and peers raise too.

The memory has no name in any file system, so nothing is left behind. Counters are aligned words; x86-64 guarantees that
others see them after the writes before them. Other processors use sockets.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import platform
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ltx.core.base import kernel, private
from ltx.core.base.errors import message_of
from ltx.core.comm.ledger import NOTHING
from ltx.core.comm.operations import OPERATIONS
from ltx.core.comm.transport import TransportWork, open_transports
from ltx.shared_memory.chunks import CHUNK_BYTES, CUTS, NO_CHUNK, Chunk, Job, in_rank_order, part, sum_of

SLOTS = 8  # for chunks
COUNTERS_BYTES = 4096  # before the first slot
#: After the slots: the room for inputs of reductions, such as buckets of gradients, which needn't be copied. Untouched
#: pages of it take no memory.
ROOM = SLOTS * CHUNK_BYTES
SEGMENT_BYTES = COUNTERS_BYTES + ROOM + (1 << 30)
_PAGE_BYTES = 4096
_LINE_WORDS = 64 // 8
FILLED, REDUCED, EMPTIED = (i * _LINE_WORDS for i in range(3))
TAGS = 3 * _LINE_WORDS  # one for each slot
SUMS = TAGS + SLOTS  # one for each slot
WHERE = SUMS + SLOTS  # one for each slot: the byte at which the rank's input begins
FAILED = WHERE + SLOTS  # the length of the text that says why the rank's end has failed; 0 if it hasn't failed
NOTES = FAILED + _LINE_WORDS  # NOTE_WORDS for each slot
NOTE_WORDS = 8
_VIEWS = 256  # how many lists of slots are kept
REASON = COUNTERS_BYTES // 2  # the byte at which that text begins

# The lock files that this process has locked. Forks share the locks: if a fork released one, the rank would seem dead.
_locked: set[int] = set()
os.register_at_fork(after_in_child=_locked.clear)


def close_files(locks: list[int], files: list[int]) -> None:
    """Close a segment and its lock file, and release this rank's lock."""
    for descriptor in files:
        if descriptor in _locked:
            # Closing isn't enough: the lock would last as long as a fork that has inherited it (a DataLoader's worker).
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            _locked.discard(descriptor)
    for descriptor in (*locks, *files):
        os.close(descriptor)


def _machine() -> list[object] | None:
    """A name that is equal on ranks which can share memory; None if shared memory doesn't work here."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or os.environ.get("LTX_SHARED_MEMORY", "1") == "0":
        return None
    here = kernel.machine()
    return None if here is None else [*here, os.readlink("/proc/self/ns/net"), os.getuid()]


@dataclass(eq=False, slots=True)
class _Entry:
    """A chunk in the transport's queue. `place` counts all chunks since the transport was opened."""

    place: int
    chunk: Chunk
    work: TransportWork
    tag: int
    note: Sequence[float] = ()
    next: _Entry | None = None


class SharedMemoryTransport:
    """This rank's end of the shared memory between the ranks of a channel."""

    def __init__(self, rank: int, segments: list[mmap.mmap], locks: list[int], files: list[int]):
        self.rank = rank
        self.size = len(segments)
        self.error: Exception | None = None  # the error that a phase has raised twice: the transport has failed
        self._maps = segments
        self._locks = locks  # each rank's lock file, by descriptors of this process
        self._files = files
        self._counters = [memoryview(segment).cast("q") for segment in segments]
        self._sums = [memoryview(segment).cast("d") for segment in segments]
        self._bytes = [torch.frombuffer(segment, dtype=torch.uint8, offset=COUNTERS_BYTES) for segment in segments]
        self._base = self._bytes[rank].data_ptr()
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}  # of all ranks' slots, as they recur
        #: Where the part of the room begins that was never used, and the parts that are used no more, by their size.
        self._untouched, self._unused = ROOM, defaultdict[int, list[int]](list)
        self._begun = 0
        self._emptied_at_close = 0
        self._forget_queue()
        self._turn = threading.RLock()  # reentrant: an interrupt may come between acquiring and releasing it

    def _forget_queue(self) -> None:
        self._tail = _Entry(-1, NO_CHUNK, TransportWork(self), 0)  # a linked list: an interrupt comes before or after
        # The last entry known to be through each phase. The counters count: an interrupt may come between the updates.
        self._through = {FILLED: self._tail, REDUCED: self._tail, EMPTIED: self._tail}
        self._overwritten = -1  # the place of the chunk whose reduction has begun

    def begin(
        self, operation: str, buffer: Tensor, arguments: tuple[int, ...], tag: int, summed: bool, note: Sequence[float]
    ) -> tuple[TransportWork, Tensor]:
        """Start `operation` on a contiguous `buffer`; return its work and the memory of the result. Never blocks.

        `note`: nothing, or NOTE_WORDS numbers. After an exception, but an interrupt, the transport has failed.
        """
        self._begun += 1  # this comes first: if it fails on this rank alone, the peers refuse all later chunks
        work = TransportWork(self)
        try:
            with private.below_all(), torch.no_grad() if torch.is_grad_enabled() else NOTHING:
                out = OPERATIONS[operation].new_result(buffer, self.size)
                chunks = list(CUTS[operation](Job(buffer, out, arguments, self.rank, self.size)))
        except Exception as error:  # for example without memory; peers would wait for this rank
            self._fail(error)
            raise
        if summed and operation == "psum":
            work.sums = {}
        while self._tail.next is not None:
            self._tail = self._tail.next
        tag = (tag * 1_000_003 + 2 * self._begun + bool(note)) & ((1 << 62) - 1)
        before = first = _Entry(self._tail.place, NO_CHUNK, work, tag)
        for chunk in chunks:
            before.next = _Entry(before.place + 1, chunk, work, tag)
            before = before.next
        work.end = before.place + 1
        if note and first.next is not None:
            first.next.note = note
        self._tail.next = first.next  # all at once: another thread may process a chunk as soon as it is queued
        self.progress()
        return work, out

    @property
    def busy(self) -> bool:
        return self.error is None and self._through[EMPTIED].next is not None

    @property
    def emptied(self) -> int:
        counters = self._counters
        return counters[self.rank][EMPTIED] if counters else self._emptied_at_close

    def progress(self) -> bool:
        """Do every phase that can be done now, unless another thread is doing it; returns whether there was one."""
        moved = False
        if self.error is not None or not self._turn.acquire(blocking=False):
            return moved
        try:
            # A waiting thread may be under transforms and modes, which must not see these bytes. In inference mode the
            # thread may write to all tensors, also to those made in that mode. torch.inference_mode() isn't used: an
            # interrupt, which probably comes here, during a wait, might leave the mode on.
            with private.below_all(), private.inference(True):
                try:
                    while self._through[EMPTIED].next and (self._empty() or self._reduce() or self._fill()):
                        moved = True
                except Exception:
                    try:  # a phase that raises again when it is repeated has failed
                        while self._empty() or self._reduce() or self._fill():
                            pass
                    except Exception as error:
                        self._fail(error)
                        return moved
                    raise
        finally:
            self._turn.release()
        return moved

    def _fail(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {message_of(error)}".encode()[: COUNTERS_BYTES - REASON]
        self._maps[self.rank][REASON : REASON + len(reason)] = reason
        self._counters[self.rank][FAILED] = len(reason)
        self.error = error

    def failures(self) -> dict[int, str]:
        return {
            rank: self._maps[rank][REASON : REASON + words[FAILED]].decode(errors="replace")
            for rank, words in enumerate(self._counters)
            if words[FAILED]
        }

    def _next(self, counter: int) -> _Entry | None:
        """The first chunk that hasn't been through a phase."""
        entry = self._through[counter].next
        while entry is not None and entry.place < self._counters[self.rank][counter]:
            self._through[counter] = entry
            entry = entry.next
        return entry

    def _least(self, counter: int) -> int:
        return int(min(map(itemgetter(counter), self._counters)))

    def _tell(self, entry: _Entry, counter: int) -> None:
        self._counters[self.rank][counter] = entry.place + 1
        self._through[counter] = entry

    def _slots(self, entry: _Entry) -> list[Tensor]:
        """The ranks' slots for a chunk. Only :meth:`progress` has these tensors, which are made in inference mode."""
        kind = slot, numel, dtype = entry.place % SLOTS, entry.chunk.numel, entry.chunk.dtype
        if (views := self._views.get(kind)) is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            start = slot * CHUNK_BYTES
            views = [each[start : start + numel * dtype.itemsize].view(dtype) for each in self._bytes]
            self._views[kind] = views
        return views

    def _fill(self) -> bool:
        entry = self._next(FILLED)
        if entry is None or entry.place >= self._least(EMPTIED) + SLOTS:  # a slot is free once all have emptied it
            return False
        slot, mine = entry.place % SLOTS, self._counters[self.rank]
        mine[TAGS + slot] = entry.tag
        mine[WHERE + slot] = self._give(entry)
        for place, number in enumerate(entry.note, NOTES + slot * NOTE_WORDS):
            self._sums[self.rank][place] = number
        self._tell(entry, FILLED)
        return True

    def _give(self, entry: _Entry) -> int:
        """Where this rank's input lies in its segment: in its slot, as a copy, or in the room for reductions' inputs,
        which no peer reads once the reduction is complete.
        """
        chunk, start = entry.chunk, entry.place % SLOTS * CHUNK_BYTES
        if (given := chunk.given) is None:
            return start
        place = given.data_ptr() - self._base
        if chunk.reduce is not None and ROOM <= place < self._untouched:
            return place
        slot = self._slots(entry)[self.rank]
        (slot if given.ndim == 1 else slot.view(given.shape)).copy_(given)
        return start

    def _reduce(self) -> bool:
        entry = self._next(REDUCED)
        if entry is None or self._counters[self.rank][FILLED] <= entry.place or self._least(FILLED) <= entry.place:
            return False
        chunk, work, slot = entry.chunk, entry.work, entry.place % SLOTS
        work.refused |= len({*map(itemgetter(TAGS + slot), self._counters)}) > 1
        if chunk.reduce is not None and not work.refused:
            begins, nbytes = [words[WHERE + slot] for words in self._counters], chunk.numel * chunk.dtype.itemsize
            inputs = [each[at : at + nbytes].view(chunk.dtype) for each, at in zip(self._bytes, begins, strict=True)]
            shares = [part(each, self.rank, self.size) for each in inputs]
            result = part(self._slots(entry)[self.rank], self.rank, self.size)
            if result.numel():
                if self._overwritten == entry.place:  # an exception interrupted the lines below
                    self._give(entry)
                self._overwritten = entry.place
                in_rank_order(chunk.reduce, shares, result)
            self._sums[self.rank][SUMS + slot] = math.nan if work.sums is None else sum_of(result)
        self._tell(entry, REDUCED)
        return True

    def _empty(self) -> bool:
        entry = self._next(EMPTIED)
        if entry is None:
            return False
        chunk, work = entry.chunk, entry.work
        # A chunk that this rank has reduced, all ranks have filled. Parts that others reduce have to be waited for.
        if self._counters[self.rank][REDUCED] <= entry.place:
            return False
        if chunk.reduce is not None and self._least(REDUCED) <= entry.place:
            return False
        if not work.refused:
            taken = chunk.take(self._slots(entry))
            if work.sums is not None:
                shares = [words[SUMS + entry.place % SLOTS] for words in self._sums]
                work.sums[entry.place] = sum_of(taken) if chunk.reduce is None else sum(shares)
            if entry.note:
                start = NOTES + entry.place % SLOTS * NOTE_WORDS
                notes = map(itemgetter(slice(start, start + NOTE_WORDS)), self._sums)
                work.note = [*map(sum, zip(*notes, strict=True))]
        work.completed_s = time.perf_counter()
        self._tell(entry, EMPTIED)  # must come last, since a waiting thread continues at once
        entry.chunk = NO_CHUNK
        return True

    def room(self, nbytes: int) -> torch.UntypedStorage | None:
        """Memory in this rank's segment, from which peers read a reduction's input; None if there is no room left."""
        rounded = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        unused = self._unused[rounded]
        if not (nbytes and self._maps and (unused or self._untouched + rounded <= SEGMENT_BYTES - COUNTERS_BYTES)):
            return None
        if not unused:
            unused.append(self._untouched)
            self._untouched += rounded
        start = unused.pop()
        view = memoryview(self._maps[self.rank])[COUNTERS_BYTES + start : COUNTERS_BYTES + start + nbytes]
        finalize(view, unused.append, start).atexit = False  # the storage holds the view
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def lost_peers(self) -> list[int]:
        lost = []
        for rank, lock in enumerate(self._locks):
            with suppress(BlockingIOError):  # while the peer lives
                if rank != self.rank:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    fcntl.flock(lock, fcntl.LOCK_UN)
                    lost.append(rank)
        return lost

    def close(self) -> None:
        open_transports[:] = [transport for transport in open_transports if transport is not self]
        with self._turn:  # no phase is running
            self._emptied_at_close = self.emptied
            self._forget_queue()
            for words, sums in zip(self._counters, self._sums, strict=True):
                words.release()
                sums.release()
            self._views, self._bytes, self._counters, self._sums = {}, [], [], []
        close_files(self._locks, self._files)
        self._locks, self._files, self._maps = [], [], []


def open_transport(rank: int, exchange: Callable[[str, Any], list[Any]]) -> SharedMemoryTransport | None:
    """A transport between ranks; None if they don't share this machine's memory, or one has LTX_SHARED_MEMORY=0.

    `exchange` gives all ranks' values. Network namespaces, which exist to try a network, count as machines.
    """
    mine: dict[str, object] = {"machine": None}
    files: list[int] = []
    locks: list[int] = []
    segments: list[mmap.mmap] = []
    machine, transport = _machine(), None
    try:
        if machine is not None:
            files = [os.memfd_create("ltx segment"), os.memfd_create("ltx lock")]
            os.ftruncate(files[0], SEGMENT_BYTES)
            fcntl.flock(files[1], fcntl.LOCK_EX)
            _locked.add(files[1])
            mine = {"machine": machine, "pid": os.getpid(), "files": files}
        entries = exchange("shared memory", mine)
        if machine is not None and all(entry["machine"] == machine for entry in entries):
            try:
                for entry in entries:
                    segment, lock = (
                        os.open(f"/proc/{entry['pid']}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
                        for descriptor in entry["files"]
                    )
                    locks.append(lock)
                    segments.append(mmap.mmap(segment, SEGMENT_BYTES))
                    os.close(segment)
            except OSError:
                segments = []
        if all(opened == len(entries) for opened in exchange("shared memory/open", len(segments))):
            transport = SharedMemoryTransport(rank, segments, locks, files)
            open_transports.append(transport)
    finally:
        if transport is None:
            close_files(locks, files)
    return transport
