"""What a pool's driver and its workers say to each other, each a pickled frame on their connection.

The driver sends one :class:`Setup`, then calls, each a cloudpickled ``(fn, args, kwargs)``; the worker answers each
with a :class:`Result` or a :class:`Failure`. An empty frame asks it to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STOP = b""


@dataclass(frozen=True)
class Setup:
    """What a worker takes over from the driver before its first call."""

    sys_path: list[str]
    threads: int


@dataclass(frozen=True)
class Meeting:
    """The port of the store that rank 0's worker hosts: rank 0 tells the driver, the driver tells the others."""

    port: int


@dataclass(frozen=True)
class Ready:
    """The worker's world is up."""


@dataclass(frozen=True)
class Result:
    """A call returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """A call raised. What matters is text, so that it arrives whatever the exception is made of.

    ``at_s`` is on the monotonic clock, which the processes of one machine share, so the driver can tell which rank
    failed first. ``pickled`` is the exception itself where it pickles.
    """

    type_name: str
    message: str
    traceback_text: str
    at_s: float
    pickled: bytes | None = None
