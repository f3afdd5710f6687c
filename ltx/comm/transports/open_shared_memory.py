"""Opening shared memory between the processes of one machine."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import platform
import sys
from typing import TYPE_CHECKING

from ltx.comm.chunks import CHUNK_BYTES
from ltx.comm.transports.layout import COUNTERS_BYTES, SLOTS
from ltx.comm.transports.shared_memory import SharedMemoryTransport, register

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_SETTING = "LTX_SHARED_MEMORY"


def open_transport(rank: int, size: int, store: Store) -> SharedMemoryTransport | None:
    """A transport between the ranks that share `store`, or None if not all of them share this machine's memory.

    Ranks in different network namespaces count as different machines, because such namespaces exist to try a network.
    The environment variable LTX_SHARED_MEMORY=0, on any rank, turns shared memory off.
    """
    # These wait in the store itself, as making a process group does: an axis that is being opened has no exchange yet.
    mine: dict[str, object] = {"machine": None}
    files: list[int] = []
    machine = _machine()
    if machine is not None:
        files = [os.memfd_create("ltx segment"), os.memfd_create("ltx lock")]
        os.ftruncate(files[0], COUNTERS_BYTES + SLOTS * CHUNK_BYTES)
        fcntl.flock(files[1], fcntl.LOCK_EX)
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
        transport = SharedMemoryTransport(rank, segments, locks, files)
        register(transport)
        return transport
    for descriptor in (*locks, *files):
        os.close(descriptor)
    return None


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
