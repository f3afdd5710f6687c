"""Segments of shared memory: one of each process of a machine, what lies where in it, and how they are opened.

A segment holds counters, tags, sums, a failure's text, and slots for chunks. Words have 8 bytes. Each counter has a
cache line of its own.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import platform
import sys
from typing import TYPE_CHECKING

from ltx.core.base.errors import message_of
from ltx.core.comm.chunks import CHUNK_BYTES

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: Slots for chunks.
SLOTS = 8
#: Bytes before the first slot.
COUNTERS_BYTES = 4096

_LINE_WORDS = 64 // 8
#: Counters of the chunks that the rank has filled, reduced and emptied.
FILLED, REDUCED, EMPTIED = (i * _LINE_WORDS for i in range(3))
#: One tag for each slot.
TAGS = 3 * _LINE_WORDS
#: One sum for each slot.
SUMS = TAGS + SLOTS
#: The length of the text that says why the rank's end has failed; 0 as long as it hasn't.
FAILED = SUMS + SLOTS
#: The byte at which that text begins.
REASON = COUNTERS_BYTES // 2

_SETTING = "LTX_SHARED_MEMORY"
# The lock files that this process has locked. Its forks share the locks, and a fork that lets go of one would let the
# rank's peers think that the rank has died.
_locked: set[int] = set()
os.register_at_fork(after_in_child=_locked.clear)


def tag_of(tag: int, begun: int) -> int:
    """What ranks compare in a slot: the caller's `tag` of a collective, mixed with how many have `begun`."""
    return (tag * 1_000_003 + begun) & ((1 << 62) - 1)


def write_reason(segment: mmap.mmap, error: Exception) -> int:
    """Write why this rank's end has failed into its segment; the length in bytes."""
    reason = f"{type(error).__name__}: {message_of(error)}".encode()[: COUNTERS_BYTES - REASON]
    segment[REASON : REASON + len(reason)] = reason
    return len(reason)


def read_reason(segment: mmap.mmap, length: int) -> str:
    """Why a peer's end has failed."""
    return segment[REASON : REASON + length].decode(errors="replace")


def open_segments(rank: int, size: int, store: Store) -> tuple[list[mmap.mmap], list[int], list[int]] | None:
    """All ranks' segments, descriptors of their lock files, and those of this rank's own files.

    None if not all of the ranks that share `store` share this machine's memory. Ranks in different network namespaces
    count as different machines, because such namespaces exist to try a network. The environment variable
    LTX_SHARED_MEMORY=0, on any rank, turns shared memory off.
    """
    # These wait in the store itself, as making a process group does: an axis that is being opened has no exchange yet.
    mine: dict[str, object] = {"machine": None}
    files: list[int] = []
    machine = _machine()
    if machine is not None:
        files = [os.memfd_create("ltx segment"), os.memfd_create("ltx lock")]
        os.ftruncate(files[0], COUNTERS_BYTES + SLOTS * CHUNK_BYTES)
        fcntl.flock(files[1], fcntl.LOCK_EX)
        _locked.add(files[1])
        mine = {"machine": machine, "pid": os.getpid(), "files": files}
    store.set(f"shared memory/{rank}", json.dumps(mine))
    entries = [json.loads(store.get(f"shared memory/{other}")) for other in range(size)]
    segments: list[mmap.mmap] = []
    locks: list[int] = []
    if machine is not None and all(entry["machine"] == machine for entry in entries):
        try:
            for entry in entries:
                segment, lock = (
                    os.open(f"/proc/{entry['pid']}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
                    for descriptor in entry["files"]
                )
                locks.append(lock)
                segments.append(mmap.mmap(segment, COUNTERS_BYTES + SLOTS * CHUNK_BYTES))
                os.close(segment)
        except OSError:
            segments = []
    store.set(f"shared memory/{rank}/open", str(len(segments)))
    if all(int(store.get(f"shared memory/{other}/open")) == size for other in range(size)):
        return segments, locks, files
    close_files(locks, files)
    return None


def close_files(locks: list[int], files: list[int]) -> None:
    """Close what :func:`open_segments` has opened, and let go of this rank's lock."""
    for descriptor in files:
        if descriptor in _locked:
            # Closing isn't enough: the lock would last as long as any fork that has inherited the file, such as a
            # DataLoader's worker.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            _locked.discard(descriptor)
    for descriptor in (*locks, *files):
        os.close(descriptor)


def _machine() -> list[object] | None:
    """What ranks that can share memory have in common; None where shared memory doesn't work."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or os.environ.get(_SETTING, "1") == "0":
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return [boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid"), os.getuid()]
    except OSError:
        return None
