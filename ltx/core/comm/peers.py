"""What a communicator and those who watch its ranks know of each other.

A channel sends and waits. Who else is on the axis, whether they live, and what they wait for, is asked of
:class:`Peers`. In turn they see of the axis what :class:`OfAxis` says.
"""

from __future__ import annotations

from typing import Any, Protocol

from ltx.core.base.errors import LtxError


class Peers(Protocol):
    """What a channel asks about the other ranks of its axis."""

    #: The threads of this process that wait; :meth:`done` says that one of them does no more.
    deadlocks: Any

    @property
    def gone_on(self) -> str:
        """What this rank has left by an exception before it went on, in words; "" if nothing."""
        ...

    def answer_peers(self, what: str, issue: tuple[str, int], now: bool = False) -> None:
        """Raise if this rank would wait forever for `issue`, `what`; answer those that wait for it."""
        ...

    def check_deadlock(self, channel: Any, number: int, what: str) -> None:
        """Raise if a peer waits in vain before issue `number` of `channel`."""
        ...

    def diagnosed(self, in_pass: bool, issue: tuple[str, int] | None = None) -> LtxError | None:
        """The error if this rank waits in vain."""
        ...

    def missing_peers(self) -> str:
        """A text that names the peers that are gone after a connection broke."""
        ...

    def describe_lost(self, lost: list[int]) -> str:
        """A text that says which of the `lost` ranks are gone, and which have ended in good order."""
        ...

    def stragglers(self, channel: Any, number: int) -> str:
        """A text that says which ranks haven't come to issue `number` of `channel`."""
        ...


class OfAxis(Protocol):
    """What those who watch the ranks of an axis see of its communicator."""

    name: str
    label: str  # its place in the store, different from that of any other axis of this program
    rank: int
    size: int
    global_ranks: list[int]  # the ranks as ranks of the world
    closed: bool
    under_way: str  # the name, for errors, of the work on the bucket channels
    user: Any  # the channels
    background: Any
    store_exchange: Any
    watcher: Any
    negotiation: Any
    passes: Any

    @property
    def channels(self) -> list[Any]: ...

    def bucket_channel(self, phase: int) -> Any: ...

    def check_usable(self) -> None: ...

    def lost(self) -> list[int]: ...
