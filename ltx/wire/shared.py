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

Beside each piece lies a tag: the digest of all that its rank has issued on the channel so far. Where tags differ, ranks
have issued different things, and the piece is refused on all of them. If asked for, there lies also the sum of what its
rank has reduced, taken while that is in the core's cache: it says whether all of it is finite.

The memory has no name in any file system, so that nothing is left behind, whatever happens. Counters are aligned words;
that others see them in the order of the writes before them is what x86-64 promises, so other processors take the
sockets.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import platform
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ltx.wire.pieces import CUTS, PIECE_BYTES, Piece, memory_for, part

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PIECES = 8
COUNTERS_BYTES = 4096
_WORD = 8
_LINE_WORDS = 64 // _WORD  # one cache line a counter
_FILLED, _REDUCED, _EMPTIED = (i * _LINE_WORDS for i in range(3))
_TAGS = 3 * _LINE_WORDS  # one a slot
_SUMS = _TAGS + PIECES  # one a slot
_TAG_MASK = (1 << 62) - 1
_SETTING = "LTX_SHARED_MEMORY"


@dataclass(eq=False)
class Passage:
    """A buffer on its way through a lane, piece by piece. Its value is there once `left` is 0."""

    summed: bool = False
    left: int = 0
    landed_s: float = 0.0
    refused: bool = False  # ranks have issued different things
    total: float = 0.0  # of all elements of the value, if `summed`; NaN where a rank hasn't added its part up


class Lane:
    """This rank's end of the shared memory between the ranks of a channel."""

    def __init__(self, rank: int, arenas: list[mmap.mmap], locks: list[int], files: list[int]):
        self.rank = rank
        self.size = len(arenas)
        self._maps = arenas
        self._locks = locks  # each rank's lock file, by descriptors of this process
        self._files = files
        self._counters = [memoryview(arena).cast("q") for arena in arenas]
        self._sums = [memoryview(arena).cast("d") for arena in arenas]
        self._bytes = [torch.frombuffer(arena, dtype=torch.uint8, offset=COUNTERS_BYTES) for arena in arenas]
        # (piece, its passage, its tag), waiting for each stride in order.
        self._to_fill: deque[tuple[Piece, Passage, int]] = deque()
        self._to_reduce: deque[tuple[Piece, Passage]] = deque()
        self._to_empty: deque[tuple[Piece, Passage]] = deque()
        self._done = [0, 0, 0]
        # An interrupt may come between taking and releasing it: its own thread can take it again.
        self._turn = threading.RLock()

    def begin(
        self, operation: str, buffer: torch.Tensor, arguments: tuple[int, ...], tag: int, summed: bool = False
    ) -> tuple[Passage, torch.Tensor]:
        """Begin `operation` on a contiguous `buffer`: its passage, and what will hold the value. Never blocks.

        `summed`: a reduction's passage is to know the sum of all elements of the value.
        """
        passage = Passage()
        with torch._C._DisableFuncTorch(), torch.no_grad():
            out = memory_for(operation, buffer, arguments, self.rank, self.size)
            pieces = list(CUTS[operation](buffer, out, arguments, self.rank, self.size))
        # All at once: another thread may take a piece as soon as it is there.
        passage.left = len(pieces)
        passage.summed = summed and any(piece.reduce is not None for piece in pieces)
        self._to_fill.extend((piece, passage, tag & _TAG_MASK) for piece in pieces)
        self.stride()
        return passage, out

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._to_fill or self._to_reduce or self._to_empty)

    def stride(self) -> bool:
        """Take every stride that may be taken; whether there was one. Takes none while another thread is at it."""
        moved = False
        if not self._turn.acquire(blocking=False):
            return moved
        try:
            # Whoever waits strides, perhaps under a transform; these are the wire's own bytes. Not torch.no_grad(): an
            # interrupt comes to who waits, so probably here, and in the middle of Python's code for it would leave
            # the caller without gradients.
            with torch._C._DisableFuncTorch(), torch._C._AutoDispatchBelowAutograd():
                while self._empty() or self._reduce() or self._fill():
                    moved = True
        finally:
            self._turn.release()
        return moved

    def _least(self, counter: int) -> int:
        return min(words[counter] for words in self._counters)

    def _tell(self, which: int, counter: int) -> None:
        self._done[which] += 1
        self._counters[self.rank][counter] = self._done[which]

    def _slots(self, place: int, piece: Piece) -> list[torch.Tensor]:
        start = (place % PIECES) * PIECE_BYTES
        end = start + piece.numel * piece.dtype.itemsize
        return [arena[start:end].view(piece.dtype) for arena in self._bytes]

    def _fill(self) -> bool:
        place = self._done[0]
        # A slot is free once every rank has emptied the piece that lay in it.
        if not self._to_fill or place >= self._least(_EMPTIED) + PIECES:
            return False
        piece, passage, tag = self._to_fill.popleft()
        self._counters[self.rank][_TAGS + place % PIECES] = tag
        piece.give(self._slots(place, piece)[self.rank])
        self._tell(0, _FILLED)
        self._to_reduce.append((piece, passage))
        return True

    def _reduce(self) -> bool:
        place = self._done[1]
        if not self._to_reduce or self._least(_FILLED) <= place:
            return False
        piece, passage = self._to_reduce.popleft()
        passage.refused |= len({words[_TAGS + place % PIECES] for words in self._counters}) > 1
        if piece.reduce is not None and not passage.refused:
            shares = [part(slot, self.rank, self.size) for slot in self._slots(place, piece)]
            if shares[0].numel():
                # In rank order, whoever does it; the last step writes into this rank's own arena.
                total = shares[0]
                for share in shares[1:-1]:
                    total = piece.reduce(total, share)
                piece.reduce(total, shares[-1], out=shares[self.rank])
            self._sums[self.rank][_SUMS + place % PIECES] = _sum(shares[self.rank]) if passage.summed else math.nan
        self._tell(1, _REDUCED)
        self._to_empty.append((piece, passage))
        return True

    def _empty(self) -> bool:
        place = self._done[2]
        if not self._to_empty or self._least(_REDUCED) <= place:
            return False
        piece, passage = self._to_empty.popleft()
        if not passage.refused:
            piece.take(self._slots(place, piece))
            if passage.summed:
                passage.total += sum(words[_SUMS + place % PIECES] for words in self._sums)
        self._tell(2, _EMPTIED)
        if passage.left == 1:
            passage.landed_s = time.perf_counter()
        passage.left -= 1  # last: whoever waits goes on, maybe in another thread
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
        _lanes[:] = [lane for lane in _lanes if lane is not self]
        with self._turn:  # nobody is in the middle of a stride
            self._to_fill.clear()
            self._to_reduce.clear()
            self._to_empty.clear()
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
_lanes: list[Lane] = []


def stride_everywhere() -> bool:
    """Take every stride that may be taken in any lane of this process; whether there was one."""
    return sum(lane.stride() for lane in tuple(_lanes) if lane.busy) > 0


def any_busy() -> bool:
    """Whether anything is on its way in a lane of this process."""
    return any(lane.busy for lane in tuple(_lanes))


def wait_for(passage: Passage, pause_s: float) -> bool:
    """Take strides until `passage` has landed, for at most `pause_s`; whether it has."""
    began = time.perf_counter()
    idle_since = began
    while passage.left:
        if stride_everywhere():
            idle_since = time.perf_counter()
            continue
        now = time.perf_counter()
        if now - began > pause_s:
            return False
        if now - idle_since < 0.0005:
            os.sched_yield()
        else:
            time.sleep(0.0001)
    return True


def open_lane(rank: int, size: int, store: Store) -> Lane | None:
    """A lane between the ranks that meet in `store`, or None if not all of them share this machine's memory.

    Ranks in different network namespaces count as different machines: they are there to try a network. The environment
    variable LTX_SHARED_MEMORY=0, on any rank, turns lanes off.
    """
    mine: dict[str, object] = {"machine": None}
    files: list[int] = []
    machine = _machine()
    if machine is not None:
        files = [os.memfd_create("ltx arena"), os.memfd_create("ltx lock")]
        os.ftruncate(files[0], COUNTERS_BYTES + PIECES * PIECE_BYTES)
        fcntl.flock(files[1], fcntl.LOCK_EX)
        mine = {"machine": machine, "pid": os.getpid(), "files": files}
    store.set(f"lane/{rank}", json.dumps(mine))
    entries = [json.loads(store.get(f"lane/{other}")) for other in range(size)]
    arenas: list[mmap.mmap] = []
    locks: list[int] = []
    if machine is not None and all(entry["machine"] == machine for entry in entries):
        try:
            for entry in entries:
                arena, lock = (
                    os.open(f"/proc/{entry['pid']}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
                    for descriptor in entry["files"]
                )
                locks.append(lock)
                arenas.append(mmap.mmap(arena, COUNTERS_BYTES + PIECES * PIECE_BYTES))
                os.close(arena)
        except OSError:
            arenas = []
    store.set(f"lane/{rank}/open", str(len(arenas)))
    if all(int(store.get(f"lane/{other}/open")) == size for other in range(size)):
        lane = Lane(rank, arenas, locks, files)
        _lanes.append(lane)
        return lane
    for descriptor in (*locks, *files):
        os.close(descriptor)
    return None


def _machine() -> list[object] | None:
    """What ranks that can share memory have in common; None where lanes don't work."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or os.environ.get(_SETTING, "1") == "0":
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return [boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid"), os.getuid()]
    except OSError:
        return None
