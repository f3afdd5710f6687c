"""What the kernel of this machine says about a process: whether it runs, has been stopped, or is gone."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

STOPPED, GONE = "has been stopped", "is gone"
#: What to say of a process that the kernel knows nothing of.
UNKNOWN = "has been stopped, or its machine or the link to it is down"


def machine() -> list[str] | None:
    """A name that is equal for processes which see each other by their ids; None if the kernel can't be asked."""
    with suppress(OSError):
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return None


def identity() -> list[str]:
    """A name of this process for others: its machine, its id, and when it was started. Ids are used again."""
    return [*(machine() or ["?"]), str(os.getpid()), stat(os.getpid())[1]]


def state(process: list[str]) -> str:
    """What has become of the process with this :func:`identity`: "" if it runs, :data:`UNKNOWN` on another machine."""
    *where, pid, since = process or ["", ""]
    if where != machine():
        return UNKNOWN
    now, started = stat(int(pid))
    return GONE if started != since or now in "ZX" else STOPPED if now in "Tt" else ""


def stat(pid: int) -> tuple[str, str]:
    """The state of process `pid`, as a letter, and the time of its start; "X" for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "X", ""
