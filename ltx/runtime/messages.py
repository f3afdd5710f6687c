"""What a pool's driver and its workers send each other, pickled in messages of :mod:`ltx.runtime.packing`.

The driver sends one :class:`Setup`, then calls; the worker answers each with a :class:`Result` or a :class:`Failure`,
and may send what is to be seen meanwhile: anything with a method ``shown(rank, size)``, see :mod:`ltx.runtime.show`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setup:
    """What a worker takes over from the driver before its first call."""

    sys_path: list[str]
    threads: int
    shows_output: bool


@dataclass(frozen=True)
class Rendezvous:
    """The port of the store that rank 0's worker hosts: rank 0 tells the driver, the driver tells the others."""

    port: int


@dataclass(frozen=True)
class Ready:
    """The worker's world is up."""


@dataclass(frozen=True)
class Call:
    """Do a call. The same message has the function, ``(args, kwargs)``, and the sources of :mod:`ltx.runtime.calls`.

    ``inherited``: it hasn't, since the worker is a fork that has them from the driver.
    """

    number: int
    inherited: bool = False


@dataclass(frozen=True)
class Cancel:
    """Give that call up: KeyboardInterrupt is raised in it."""

    number: int


@dataclass(frozen=True)
class At:
    """Where a call was when it was asked to give up, ahead of its answer: for one that doesn't.

    ``caught``: KeyboardInterrupt was raised in it, and it goes on all the same.
    """

    where: str
    caught: bool = False


@dataclass(frozen=True)
class Renew:
    """Take the world down and make a new one, the `count`-th: a call failed in the old one."""

    count: int


@dataclass(frozen=True)
class Stop:
    """End."""


class Idle(str):
    """How a process ended that had no call to do, in words."""


@dataclass(frozen=True)
class Result:
    """A call returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """A call raised. What matters is text, so that it arrives whatever the exception is made of.

    Attributes:
        traceback_text: of the user's own frames, if there are any; the frames of ltx and of the worker are left out.
        where: the innermost of them, in words.
        at_s: on the monotonic clock, which the processes of one machine share, so the driver can tell which rank
            failed first.
        pickled: the exception itself where it pickles.
        cancelled: whether it was given up because the driver asked for it.
    """

    type_name: str
    message: str
    traceback_text: str
    at_s: float
    where: str = ""
    pickled: bytes | None = None
    cancelled: bool = False
