"""What a communicator asks about the other ranks of its axis.

A communicator sends and waits. Who its peers are, whether they live, what they wait for, and whether they call the
same, is asked of :class:`Peers`. This one knows nothing of them, as torch DDP: calls aren't compared, a wait ends with
the backend's own error or the axis' timeout, and nobody hears of an exception. Who knows more derives from it, and is
handed in (:class:`HandedIn`) when ltx is imported.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch.distributed.distributed_c10d as c10d

from ltx.core.base.errors import LtxError
from ltx.core.base.private import PrefixStore
from ltx.core.comm.signature import Post, Signature
from ltx.core.comm.store_exchange import StoreExchange

#: A peer without a sign of life for this long counts as lost.
DEFAULT_HEARTBEAT_S = 30.0
#: A thread that has waited this long tells its peers.
PATIENCE_S = 1.0
#: The prefix of the names of bucket channels.
BUCKETS = "buckets "

#: The blocks of ltx.debug_checks() around the present code, which compare every call. Not a context variable: backward
#: passes run on threads of the engine, which don't inherit those.
under_way: list[Any] = []


class OfAxis(Protocol):
    """What :class:`Peers` and :class:`ltx.core.comm.passes.Passes` see of an axis' communicator."""

    rank: int
    size: int
    timeout_s: float
    global_ranks: list[int]  # the ranks as ranks of the world
    peers: Peers

    @property
    def channels(self) -> list[Any]: ...

    def bucket_channel(self, phase: int) -> Any: ...


class Tally:
    """The number of collectives that this process has sent on all axes of a world.

    Those of other libraries count. Comparisons don't: all ranks complete them, and raise or go on together.
    """

    sent = 0


class Peers:
    """The other ranks of an axis, of which nothing is known but that they are there.

    Attributes:
        label: the axis' place in the store, with a number, so that an axis opened again finds no old keys.
        world: a name of the world, different from all others, the same on all ranks.
        store_exchange: exchanges JSON values with the peers, out of band.
        next_check: the number of its next call under ltx.debug_checks(); the same on all ranks.
    """

    world, next_check = "", 0
    tally: Any = None

    def __init__(self, axis: OfAxis, name: str | None, heartbeat_s: float):
        self.axis, self.heartbeat_s, self.tally = axis, heartbeat_s, self.tally or Tally()
        of_ranks = f"ltx/{name or 'ranks'}/{hashlib.sha1(repr(axis.global_ranks).encode()).hexdigest()}"
        store = self.connected()
        self.world = self.world or store.compare_set("ltx/world", "", os.urandom(8).hex()).decode()
        self.count = f"{of_ranks}/opened by {axis.rank}"
        self.number: int = store.add(self.count, 1)
        self.label = f"{of_ranks}/{self.number}"
        part = self.part_of(f"{self.label}/")
        self.store_exchange = StoreExchange(part, axis.rank, axis.size, axis.timeout_s, self.gone)

    def connected(self) -> Any:
        """The store of the world, as this process asks it."""
        return c10d._get_default_store()

    def part_of(self, prefix: str) -> Any:
        return PrefixStore(prefix, self.connected())

    # --- the axis opens and closes

    def meet(self) -> None:
        """Wait until all ranks have come to open the axis."""

    def opened(self) -> None:
        """The axis' channels are open."""

    def end(self) -> None:
        """This rank has ended its part of the axis, before it waits for the device."""

    def close(self) -> None:
        """The axis is closed."""

    # --- calls

    def begin(self) -> None:
        """This rank begins something new."""

    def compare(self, channel: Any, signature: Signature, offer: Any) -> Any:
        """Raise on every rank unless all are about to issue `signature` on `channel`; rank 0's `offer`."""
        channel.compared += 1
        place = f"{channel.name}/{channel.compared}"
        return self.store_exchange.exchange(place, offer, signature.operation)[0]

    def exchange_values(self, signature: Signature, value: Any, place: str | None = None) -> list[Any]:
        """Every rank's `value`, which is JSON; raise on every rank unless all call the same."""
        return self.store_exchange.exchange(place or self.store_exchange.new_place(), value, signature.operation)

    def announce(self, place: str, post: Post) -> None:
        """Let the peers have this rank's part of :meth:`exchange_values` at `place`, without waiting for them."""
        self.store_exchange.announce(place, post.value)

    # --- waits

    def waiting(self, channel: Any, number: int, what: str, waited_s: float, now: bool = False) -> None:
        """Raise if this rank would wait for ever for `what`, issue `number` of `channel`.

        Called now and then in a wait. `now`: read what peers have written, since they may have ended.
        """

    def done(self) -> None:
        """This thread has ended its wait."""

    @property
    def gone_on(self) -> str:
        """What this rank has left by an exception before it went on, in words; "" if nothing."""
        return ""

    def diagnosed(self, in_pass: bool, issue: tuple[str, int] | None = None) -> LtxError | None:
        """The error if this rank waits in vain for an `issue`; `in_pass`: for the rest of a pass."""
        return None

    def missing_peers(self) -> str:
        """A text that names the peers that are gone after a connection broke."""
        return "a peer is gone, or the link to it is down"

    def describe_lost(self, lost: list[int]) -> str:
        """A text that says which of the `lost` ranks are gone, and which have ended in good order."""
        return f"rank {', '.join(map(str, lost))} is gone"

    def stragglers(self, channel: Any, number: int) -> str:
        """A text that says which ranks haven't come to issue `number` of `channel`."""
        return "a peer hasn't issued it"

    # --- who is there

    def lost(self) -> list[int]:
        """The peers whose processes are known to have died."""
        return []

    def gone(self) -> list[int]:
        """Those that are lost, have ended, or show no sign of life."""
        return []

    def refuse(self, why: str) -> None:
        """This process is a fork of the rank's own, whose messages would look like the rank's."""

    def have_failed(self) -> bool:
        """Whether a rank of the world has said by now that an exception has ended it, or seems to be gone."""
        return bool(self.lost())

    def processes(self) -> dict[int, list[str]]:
        """The processes of the world's other ranks, as the kernel knows them, so far as they have said."""
        return {}

    def tell(self, wait: bool = False) -> None:
        """This rank has news of itself, such as an exception; `wait`: until peers can read it."""

    def wait_until_heard(self, dead: Iterable[int]) -> None:
        """Wait briefly until all peers but the `dead` have read the news: the store may end with this process."""

    @property
    def axes(self) -> Iterable[Any]:
        """The communicators of the axes of this axis' world that this process has opened."""
        return (self.axis,)


class HandedIn:
    """What ltx hands in: who knows the peers of an axis, and how the ranks of a world that is made meet."""

    peers: Callable[[Any, str | None, float], Peers] = Peers
    meeting: Any = None
