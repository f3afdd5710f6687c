"""What a communicator asks about the other ranks of its axis.

A communicator sends and waits. Who its peers are, whether they live, what they wait for, and whether they call the
same, is asked of :class:`Peers`. This one knows nothing of them, as torch DDP: calls aren't compared, a wait ends with
the backend's own error or the axis' timeout, and nobody hears of an exception. Who knows more derives from it, and is
handed in (:mod:`ltx.core.base.handed_in`).
"""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import torch.distributed.distributed_c10d as c10d

from ltx.core.base.errors import LtxError, RankMismatchError
from ltx.core.base.handed_in import HandedIn
from ltx.core.comm.signature import Signature

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

    name: str
    rank: int
    size: int
    timeout: timedelta
    global_ranks: list[int]  # the ranks as ranks of the world
    peers: Peers
    channels: list[Any]
    user: Any  # its channel
    first_phase: Any  # the channel of the buckets' first collectives
    unread: Any


class Exchange(Protocol):
    """How the ranks of an axis tell each other values, which are JSON, beside the network: each at a named place."""

    begun: int  # the number of places that :meth:`new_place` has returned

    def new_place(self) -> str: ...
    def announce(self, place: str, value: Any) -> None: ...
    def exchange(self, place: str, value: Any, what: str, timeout_s: float | None = None) -> list[Any]: ...
    def hold(self, thread: Any) -> None: ...  # which uses it
    def finish(self) -> None: ...  # wait for the end of these threads


class OwnPart:
    """This process' part of a world."""

    def __init__(self) -> None:
        self.axes: list[Any] = []  # the communicators of its open axes
        #: Of collectives sent on them, other libraries' too. Not of comparisons: all ranks raise or go on together.
        self.sent, self.pid = 0, os.getpid()


#: By the name of the world.
own_parts: WeakValueDictionary[str, OwnPart] = WeakValueDictionary()


class Peers:
    """The other ranks of an axis, of which nothing is known but that they are there."""

    store_exchange: Exchange
    replayed: ClassVar[bool] = False  # they aren't there, and what they once sent is recorded
    habit: ClassVar[Any] = type(None)  # makes what tells which known calls of a channel ranks compare again
    at: str = ""  # the place at which this rank has told that it waits: :meth:`begin` ends that
    waits: Any = ()  # of this rank's threads, those that it has told of: :meth:`done` ends the thread's

    def __init__(
        self, axis: OfAxis, name: str | None, heartbeat_s: float, store: Any = None, asked: Any = lambda store: store
    ):
        self.axis, self.heartbeat_s = axis, heartbeat_s
        self.next_check = 0  # the number of its next call under ltx.debug_checks(); the same on all ranks
        of_ranks = f"ltx/{name or 'ranks'}/{hashlib.sha1(repr(axis.global_ranks).encode()).hexdigest()}"
        store = store or c10d._get_default_store()
        whole, count = asked(store), f"{of_ranks}/opened by {axis.rank}"
        #: A name of the world, different from all others, the same on all ranks.
        self.world: str = whole.compare_set("ltx/world", "", os.urandom(8).hex()).decode()
        self.own = own_parts.setdefault(self.world, OwnPart())
        #: The axis' place in the store, with a number, so that an axis opened again finds no old keys.
        self.label = f"{of_ranks}/{whole.add(count, 1)}"
        self._uncount = partial(whole.add, count, -1)
        part, limit_s = asked(c10d.PrefixStore(f"{self.label}/", store)), axis.timeout.total_seconds()
        self.store_exchange = HandedIn.exchange(part, axis.rank, axis.size, limit_s, partial(self.gone, "left"))

    def meet(self) -> None:
        """Wait until all ranks have come to open the axis."""

    def close(self) -> None:
        """The axis is closed."""

    def begin(self) -> None:
        """This rank begins something new."""

    def compare(self, channel: Any, signature: Signature, offer: Any) -> Any:
        """Raise on every rank unless all are about to issue `signature` on `channel`; rank 0's `offer`."""
        channel.compared += 1
        return self.store_exchange.exchange(f"{channel.name}/{channel.compared}", offer, signature.operation)[0]

    def exchange(self, signature: Signature, value: Any, place: str | None = None, wait: bool = True) -> list[Any]:
        """Every rank's `value`, which is JSON; raise on every rank unless all call the same. `wait`: for theirs."""
        place = place or self.store_exchange.new_place()
        if not wait:
            self.store_exchange.announce(place, value)
            return []
        return self.store_exchange.exchange(place, value, signature.operation)

    def waiting(self, channel: Any, number: int, what: str, waited_s: float, now: bool = False) -> None:
        """Called now and then in a wait: raise if issue `number` of `channel` won't come. `now`: read the store."""

    def done(self) -> None:
        """This thread has ended its wait."""

    def diagnosed(self, in_pass: bool, issue: tuple[str, int] | None = None) -> LtxError | None:
        """The error if this rank waits in vain for an `issue`; `in_pass`: for the rest of a pass."""
        return None

    def why(self, what: str, *of: Any) -> str:
        """The part of an error's text that says what peers have done.

        * "broken": a connection broke. Which peers are gone?
        * "lost", ranks: which of them are gone, and which have ended in good order?
        * "late", a channel, a number: which ranks haven't come to this issue?
        * "refused": ranks have issued different collectives. What has this rank left by an exception before it went
          on? "" if nothing.
        """
        if what == "lost":
            return f"rank {', '.join(map(str, of[0]))} is gone"
        broken = "a peer is gone, or the link to it is down"
        return {"broken": broken, "late": "a peer hasn't issued it", "refused": ""}[what]

    def explain_apart(self, place: str, said: Any, late: bool) -> LtxError:
        """The error where digests of a step differ, of which this rank's :class:`ltx.core.comm.step_summary.Said` is
        `said`. Peers are asked for theirs at `place`, a new one if it is "". `late`: the host has gone on meanwhile.
        """
        return RankMismatchError(f"axis {self.axis.name!r}: ranks have issued different collectives.")

    def gone(self, how: str) -> list[int]:
        """The ranks that are gone, by what is known.

        * "dead": their processes are known to have died, without asking the store.
        * "left": these, and those that have ended or show no sign of life.
        * "failed": those that are dead, show no sign of life, or have said by now that an exception has ended them.
        """
        return []

    def processes(self) -> dict[int, list[str]]:
        """The processes of the world's other ranks, as the kernel knows them, so far as they have said."""
        return {}

    def tell(self, wait: bool = False, heard: bool = False, ended: bool = False) -> None:
        """This rank has news of itself, such as an exception. `wait`: until peers can read it. `heard`: then wait
        briefly until all that aren't dead have read it: the store may end with this process. `ended`: its part of the
        axis, before it waits for the device.
        """
