"""The parts of a communicator and of its channels that the comparison of calls uses. Both are built on top of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from ltx.core.base.errors import LtxError
from ltx.core.comm.heartbeat import Heartbeat
from ltx.core.comm.recovery import Recovery
from ltx.core.comm.signature import Agreement
from ltx.core.comm.store_exchange import StoreExchange

#: How the names and addresses of bucket channels begin.
BUCKETS = "buckets "


class ComparedChannel(Protocol):
    """:class:`ltx.core.comm.channel.Channel`, as far as its collectives are compared."""

    address: str
    issued: int
    compared: int
    begun: int
    threads: set[int]
    recent: deque[tuple[int, Agreement]]
    failed: LtxError | None

    def check_in_step(self, label: str) -> None: ...


class Communicator(Protocol):
    """:class:`ltx.core.comm.axis_comm.AxisComm`, as far as its ranks compare calls."""

    name: str
    rank: int
    size: int
    label: str
    global_ranks: list[int]
    closed: bool
    under_way: str
    heartbeat: Heartbeat
    store_exchange: StoreExchange
    recovery: Recovery
    negotiation: Any

    @property
    def user(self) -> ComparedChannel: ...

    @property
    def background(self) -> ComparedChannel: ...

    @property
    def channels(self) -> Sequence[ComparedChannel]: ...

    def lost(self) -> list[int]: ...

    def check_not_forked(self) -> None: ...
