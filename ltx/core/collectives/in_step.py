"""Collectives that raise on this rank before they are issued: its next one mustn't pair with that of the peers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import torch

from ltx.core import comm
from ltx.core.base.errors import (
    CollectiveTimeoutError,
    DeadlockDetectedError,
    LtxError,
    PeerLostError,
    RankMismatchError,
    TransportError,
    WorldError,
)
from ltx.core.ranks.axis import Axis

P = ParamSpec("P")
R = TypeVar("R")

# Their ranks know it without being told.
_OF_THE_NETWORK = (
    CollectiveTimeoutError,
    DeadlockDetectedError,
    PeerLostError,
    RankMismatchError,
    TransportError,
    WorldError,
)


def in_step(collective: Callable[P, R]) -> Callable[P, R]:
    """Mark a collective: a call that raises counts as one, so that ranks of which some raised find out at the next.

    Where all ranks have raised they go on together, whatever each of them said.
    """

    @functools.wraps(collective)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return collective(*args, **kwargs)
        try:
            return collective(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, _OF_THE_NETWORK) and not hasattr(error, "_ltx_counted"):
                error._ltx_counted = True  # type: ignore[attr-defined]  # once, if collectives call each other
                with suppress(TypeError):  # arguments without an axis
                    _count(inspect.signature(collective).bind(*args, **kwargs).arguments.get("axis"))
            raise

    return wrapped


def _count(axis: Any) -> None:
    if isinstance(axis, comm.InBackground):
        axis = axis.axis
    if not isinstance(axis, Axis | str | None):  # others may have to be opened, by all ranks together
        return
    with suppress(LtxError):  # there is no such axis
        found = comm.resolve(axis)
        if found.threads:
            found.threads.announce(comm.RAISED.signature)
        elif found.comm is not None:
            found.comm.user.advance(comm.RAISED)
