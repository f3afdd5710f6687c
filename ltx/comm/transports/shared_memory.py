"""A lane: collectives between processes of one machine through shared memory, instead of through its loopback device.

Sockets copy each byte through the kernel twice and keep a thread busy; shared memory is a copy. What n ranks exchange
goes in pieces, each in three strides:

    1. every rank copies what it gives of its piece into its own arena                         -> filled
    2. in a reduction, rank r reduces part r of the piece over all arenas, in rank order,
       into its own arena                                                                      -> reduced
    3. every rank copies what it takes out of the arenas                                       -> emptied

Each rank owns three counters that only it writes, of the pieces it has filled, reduced and emptied; it takes a stride
when its peers' counters say that it may. Strides are taken by whoever issues or waits, so there is no thread for them;
of several threads that wait for something, be it elsewhere, one at a time strides in a lane, and the others let it.
Nothing ever blocks but a wait, which looks every 0.1 s whether its peers live: each holds a lock on a file of its own,
which the kernel lets go when the process dies.

Beside each piece lies a tag: the digest of all that its rank has issued on the channel so far, and how many buffers.
Where tags differ, ranks have issued different things, and the piece is refused on all of them. If asked for, there lies
also the sum of what its rank has reduced, taken while that is in the core's cache: it says whether all of it is finite.

An exception may come at any point of a stride: an interrupt, or one from a signal's handler. A rank's counters say
which strides it has taken, and one that hasn't been counted can be taken again, from its beginning. So an exception
leaves the ranks in step. One that comes again when the stride is taken again is the stride's own: then the lane has
failed, and says so to its peers, who raise too.

The memory has no name in any file system, so that nothing is left behind, whatever happens. Counters are aligned words;
that others see them in the order of the writes before them is what x86-64 promises, so other processors take the
sockets.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import threading
import time
from dataclasses import dataclass

import torch

from ltx.comm.chunks import CHUNK_BYTES, NO_CHUNK, Chunk, part
from ltx.comm.operations import OPERATIONS
from ltx.comm.transports.layout import COUNTERS_BYTES, EMPTIED, FAILED, FILLED, REASON, REDUCED, SLOTS, SUMS, TAGS
from ltx.errors import message_of

_TAG_MASK = (1 << 62) - 1
_TAG_PRIME = 1_000_003


@dataclass(eq=False)
class SharedMemoryWork:
    """A buffer on its way through a lane, piece by piece."""

    transport: SharedMemoryTransport
    end: int = 0  # the place behind its last piece
    completed_s: float = 0.0
    refused: bool = False  # ranks have issued different things
    sums: dict[int, float] | None = None  # of the elements of each piece, by its place, if they were asked for

    @property
    def completed(self) -> bool:
        """Whether its value is there."""
        return self.transport.emptied >= self.end

    @property
    def total(self) -> float | None:
        """The sum of all elements of the value, if asked for; NaN where a rank hasn't added its part up."""
        return None if self.sums is None else sum(self.sums.values())


class _Entry:
    """A piece in the queue of a lane; its place there counts all pieces since the lane was opened."""

    __slots__ = ("chunk", "next", "place", "tag", "work")

    def __init__(self, place: int, chunk: Chunk, work: SharedMemoryWork, tag: int):
        self.place, self.chunk, self.work, self.tag = place, chunk, work, tag
        self.next: _Entry | None = None


class SharedMemoryTransport:
    """This rank's end of the shared memory between the ranks of a channel.

    Attributes:
        error: what has come up in a stride each time it was taken: the lane has failed.
    """

    def __init__(self, rank: int, segments: list[mmap.mmap], locks: list[int], files: list[int]):
        self.rank = rank
        self.size = len(segments)
        self.error: Exception | None = None
        self._maps = segments
        self._locks = locks  # each rank's lock file, by descriptors of this process
        self._files = files
        self._counters = [memoryview(segment).cast("q") for segment in segments]
        self._sums = [memoryview(segment).cast("d") for segment in segments]
        self._bytes = [torch.frombuffer(segment, dtype=torch.uint8, offset=COUNTERS_BYTES) for segment in segments]
        self._begun = 0
        self._emptied_at_close = 0
        self._forget_queue()
        # An interrupt may come between taking and releasing it: its own thread can take it again.
        self._turn = threading.RLock()

    def _forget_queue(self) -> None:
        # A chain, to which one assignment appends: an interrupt comes before or after it.
        self._tail = _Entry(-1, NO_CHUNK, SharedMemoryWork(self), 0)
        # The last entry known to have been through each stride. The counters are the truth: an interrupt may come
        # between the two.
        self._through = {FILLED: self._tail, REDUCED: self._tail, EMPTIED: self._tail}
        self._overwritten = -1  # the place of the piece whose reduction has begun

    def begin(
        self, operation: str, buffer: torch.Tensor, arguments: tuple[int, ...], tag: int, summed: bool = False
    ) -> tuple[SharedMemoryWork, torch.Tensor]:
        """Begin `operation` on a contiguous `buffer`: its passage, and what will hold the value. Never blocks.

        What it raises has made the lane fail, unless it is an interrupt: then peers are told at the next piece.

        `summed`: a reduction's passage is to know the sum of all elements of the value.
        """
        self._begun += 1  # first: if nothing comes of it on this rank alone, all that follows is refused
        work = SharedMemoryWork(self)
        try:
            with torch._C._DisableFuncTorch(), torch.no_grad():
                row = OPERATIONS[operation]
                out = row.new_result(buffer, self.size)
                chunks = list(row.chunks(buffer, out, arguments, self.rank, self.size))
        except Exception as error:  # no memory, say: the peers would wait for this rank
            self._fail(error)
            raise
        if summed and any(chunk.reduce is not None for chunk in chunks):
            work.sums = {}
        while self._tail.next is not None:
            self._tail = self._tail.next
        tag = (tag * _TAG_PRIME + self._begun) & _TAG_MASK
        before = first = _Entry(self._tail.place, NO_CHUNK, work, tag)
        for chunk in chunks:
            before.next = _Entry(before.place + 1, chunk, work, tag)
            before = before.next
        work.end = before.place + 1
        self._tail.next = first.next  # all at once: another thread may take a piece as soon as it is there
        self.progress()
        return work, out

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        return self.error is None and self._through[EMPTIED].next is not None

    @property
    def emptied(self) -> int:
        """How many pieces have come out on this rank."""
        counters = self._counters
        return counters[self.rank][EMPTIED] if counters else self._emptied_at_close

    def progress(self) -> bool:
        """Take every stride that may be taken; whether there was one. Takes none while another thread is at it."""
        moved = False
        if self.error is not None or not self._turn.acquire(blocking=False):
            return moved
        try:
            # Whoever waits strides, perhaps under a transform; these are the wire's own bytes. Not torch.no_grad(): an
            # interrupt comes to who waits, so probably here, and in the middle of Python's code for it would leave
            # the caller without gradients.
            with torch._C._DisableFuncTorch(), torch._C._AutoDispatchBelowAutograd():
                try:
                    while self._empty() or self._reduce() or self._fill():
                        moved = True
                except Exception:
                    if self._fails_again():
                        return moved
                    raise
        finally:
            self._turn.release()
        return moved

    def _fails_again(self) -> bool:
        """Whether the stride in which an exception came up has one of its own; then the lane has failed."""
        try:
            while self._empty() or self._reduce() or self._fill():
                pass
        except Exception as error:
            self._fail(error)
            return True
        return False

    def _fail(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {message_of(error)}".encode()[: COUNTERS_BYTES - REASON]
        self._maps[self.rank][REASON : REASON + len(reason)] = reason
        self._counters[self.rank][FAILED] = len(reason)
        self.error = error

    def failures(self) -> dict[int, str]:
        """The ranks whose ends have failed, and why."""
        lengths = {rank: words[FAILED] for rank, words in enumerate(self._counters)}
        return {
            rank: self._maps[rank][REASON : REASON + length].decode(errors="replace")
            for rank, length in lengths.items()
            if length
        }

    def _next(self, counter: int) -> _Entry | None:
        """The first piece that hasn't been through a stride."""
        entry = self._through[counter].next
        while entry is not None and entry.place < self._counters[self.rank][counter]:
            self._through[counter] = entry
            entry = entry.next
        return entry

    def _least(self, counter: int) -> int:
        return min([words[counter] for words in self._counters])  # a list takes half the time of a generator

    def _tell(self, entry: _Entry, counter: int) -> None:
        self._counters[self.rank][counter] = entry.place + 1
        self._through[counter] = entry

    def _slots(self, entry: _Entry) -> list[torch.Tensor]:
        chunk = entry.chunk
        start = (entry.place % SLOTS) * CHUNK_BYTES
        end = start + chunk.numel * chunk.dtype.itemsize
        return [segment[start:end].view(chunk.dtype) for segment in self._bytes]

    def _fill(self) -> bool:
        entry = self._next(FILLED)
        # A slot is free once every rank has emptied the piece that lay in it.
        if entry is None or entry.place >= self._least(EMPTIED) + SLOTS:
            return False
        self._counters[self.rank][TAGS + entry.place % SLOTS] = entry.tag
        entry.chunk.give(self._slots(entry)[self.rank])
        self._tell(entry, FILLED)
        return True

    def _reduce(self) -> bool:
        entry = self._next(REDUCED)
        if entry is None or self._least(FILLED) <= entry.place:
            return False
        chunk, work, slot = entry.chunk, entry.work, entry.place % SLOTS
        work.refused |= len({words[TAGS + slot] for words in self._counters}) > 1
        if chunk.reduce is not None and not work.refused:
            slots = self._slots(entry)
            shares = [part(slot, self.rank, self.size) for slot in slots]
            if shares[0].numel():
                if self._overwritten == entry.place:  # an exception came in the middle of what follows
                    chunk.give(slots[self.rank])
                self._overwritten = entry.place
                # In rank order, whoever does it; the last step writes into this rank's own arena.
                total = shares[0]
                for share in shares[1:-1]:
                    total = chunk.reduce(total, share)
                chunk.reduce(total, shares[-1], out=shares[self.rank])
            self._sums[self.rank][SUMS + slot] = math.nan if work.sums is None else _sum(shares[self.rank])
        self._tell(entry, REDUCED)
        return True

    def _empty(self) -> bool:
        entry = self._next(EMPTIED)
        if entry is None or self._least(REDUCED) <= entry.place:
            return False
        chunk, work = entry.chunk, entry.work
        if not work.refused:
            chunk.take(self._slots(entry))
            if work.sums is not None:
                work.sums[entry.place] = sum(words[SUMS + entry.place % SLOTS] for words in self._sums)
        work.completed_s = time.perf_counter()
        self._tell(entry, EMPTIED)  # last: whoever waits goes on, maybe in another thread
        entry.chunk = NO_CHUNK
        return True

    def lost_peers(self) -> list[int]:
        """The ranks whose processes have died."""
        lost = []
        for rank, lock in enumerate(self._locks):
            if rank == self.rank:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            fcntl.flock(lock, fcntl.LOCK_UN)
            lost.append(rank)
        return lost

    def close(self) -> None:
        """Give the memory back."""
        _transports[:] = [transport for transport in _transports if transport is not self]
        with self._turn:  # nobody is in the middle of a stride
            self._emptied_at_close = self.emptied
            self._forget_queue()
            self._bytes = []
            for words in self._counters:
                words.release()
            for sums in self._sums:
                sums.release()
            self._counters, self._sums = [], []
        for descriptor in (*self._locks, *self._files):
            os.close(descriptor)
        self._locks, self._files, self._maps = [], [], []


def _sum(x: torch.Tensor) -> float:
    x = torch.view_as_real(x) if x.is_complex() else x
    return float(x.sum(dtype=torch.float32 if x.dtype.itemsize < 4 else None).item())


# A rank that waits for one thing may be what its peers wait for in another: whoever waits strides in every lane.
_transports: list[SharedMemoryTransport] = []


def register(transport: SharedMemoryTransport) -> None:
    """From now on a thread that waits advances `transport` too, until :meth:`SharedMemoryTransport.close`."""
    _transports.append(transport)


def progress_everywhere() -> bool:
    """Take every stride that may be taken in any lane of this process; whether there was one."""
    return sum(transport.progress() for transport in tuple(_transports) if transport.busy) > 0


def any_transport_busy() -> bool:
    """Whether anything is on its way in a lane of this process."""
    return any(transport.busy for transport in tuple(_transports))


def wait_for(work: SharedMemoryWork, pause_s: float) -> bool:
    """Take strides until `work` has landed, for at most `pause_s` and while its lane works; whether it has."""
    began = time.perf_counter()
    idle_since = began
    while not work.completed:
        if progress_everywhere():
            idle_since = time.perf_counter()
            continue
        now = time.perf_counter()
        if now - began > pause_s or work.transport.error is not None:
            return False
        if now - idle_since < 0.0005:
            os.sched_yield()
        else:
            time.sleep(0.0001)
    return True
