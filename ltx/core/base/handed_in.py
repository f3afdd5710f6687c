"""What the kernel needs of other rooms, which it can't import."""

from __future__ import annotations

from typing import Any, Protocol


class Pickling(Protocol):
    """Objects as bytes for peers, which open those only that a rank of this job has sealed for this `issue`."""

    def dumps(self, obj: Any, /) -> bytes: ...
    def sealed(self, axis_comm: Any, data: bytes, issue: int) -> bytes: ...
    def opened(self, axis_comm: Any, received: bytes, rank: int, issue: int) -> bytes: ...


class HandedIn:
    """Set once, when ``ltx`` is imported, but for `messages`. The last three may be missing."""

    hooks: Any = None  # ltx.hooks
    launchers: Any = None  # ltx.runtime.launchers: where this process stands, and reports to who has started it
    strategy: Any = None  # of steps that are given none; made once: Dynamo can't make it while it traces
    meeting: Any = None  # how the ranks of a world that is made meet: ltx.peers.meeting.meet
    pickling: Pickling  # ltx.peers.pickling
    exchange: Any = None  # makes an ltx.core.comm.peers.Exchange: ltx.peers.store_exchange.StoreExchange
    peers: Any = None  # (communicator, axis' name, heartbeat_s) -> who knows them, an ltx.core.comm.peers.Peers
    #: (rank, exchange) -> an ltx.core.comm.transport.Transport, which is among `open_transports` there until it is
    #: closed; None if the ranks share nothing.
    transport: Any = lambda rank, exchange: None
    #: While messages are recorded or replayed (ltx.record): hears of each channel that opens and each step that begins.
    messages: Any = None
