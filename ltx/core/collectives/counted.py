"""Calls of collectives that raise are counted, so that peers hear of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import torch

from ltx.core import comm
from ltx.core.base import errors
from ltx.core.base.errors import LtxError
from ltx.core.ranks.axis import Axis

P = ParamSpec("P")
R = TypeVar("R")

# All ranks know of these errors without being told.
_OF_THE_NETWORK = (
    *(errors.CollectiveTimeoutError, errors.DeadlockDetectedError, errors.PeerLostError, errors.RankMismatchError),
    *(errors.ReplicaDivergedError, errors.TransportError, errors.WorldError),
)


def counted(collective: Callable[P, R]) -> Callable[P, R]:
    """Decorate a collective so that a call that raises counts as a call: other ranks find out at their next call.

    If all ranks have raised, they can go on together, even if their errors differ.
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
                with suppress(TypeError):  # the arguments don't fit the signature
                    _count(inspect.signature(collective).bind(*args, **kwargs).arguments.get("axis"))
            raise

    return wrapped


def _count(axis: Any) -> None:
    # to resolve another kind of axis may open it, which all ranks have to do together
    if not isinstance(axis, Axis | str | None):
        return
    with suppress(LtxError):  # there is no such axis
        comm.resolve(axis).ranks.announce(comm.RAISED)
