"""The communicator of one axis whose ranks are threads of this process that take turns (:func:`ltx.simulate`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ltx.axis import Axis
from ltx.backings import Part, ThreadBacking
from ltx.comm.signature import Agreement, ComparedFunctions, Signature
from ltx.comm.turns import Call, Combine, Turns


class ThreadComm:
    """What one rank needs to meet the others on an axis.

    Ranks are in one process, so nothing is sent: each brings a value, and one of them computes what all get.

    Args:
        turns: the threads.
        name: the axis'.
        members: the numbers of its ranks' threads.
        rank: this rank's place among them.
    """

    def __init__(self, turns: Turns, name: str, members: tuple[int, ...], rank: int):
        self.name = name
        self.rank = rank
        self.size = len(members)
        self._turns = turns
        self._members = members
        self._announced: list[Signature] = []
        self._known: dict[Any, Agreement] = {}
        self.compared = ComparedFunctions()
        self._parts: dict[Part, Axis] = {}

    @property
    def closed(self) -> bool:
        """Whether the ranks have ended."""
        return self._turns.closed

    def announce(self, signature: Signature) -> None:
        """Let the ranks compare `signature` at their next exchange: what this rank calls, which leads to that."""
        self._announced.append(signature)

    def exchange(self, signature: Signature, value: Any = None, combine: Combine | None = None) -> Any:
        """Wait for all ranks, and return what `combine` makes of their values for this one; all values without it.

        What comes back may be shared with other ranks, so nothing may write to it.

        Raises:
            RankMismatchError: ranks disagree in their signatures, or some never come; on all ranks that wait.
            PeerLostError: another rank has raised something.
            UnsupportedError: under forward mode, or in a thread that isn't the rank's.
        """
        signatures = (*self._announced, signature)
        self._announced.clear()
        call = Call(self.name, self._members, signatures, value, combine)
        return self._turns.wait_in(self._members[self.rank], call)

    def negotiate(
        self, key: Hashable, describe: Callable[[], Signature], offer: Callable[[], Any] = lambda: None
    ) -> Agreement:
        """As :meth:`ltx.comm.AxisComm.negotiate`: what all ranks are about to do, compared the first time."""
        if key not in self._known:
            signature = describe()
            self._known[key] = Agreement(signature, signature.fingerprint, self.exchange(signature, offer())[0])
        return self._known[key]

    def part(self, name: str, part: Part) -> Axis:
        """The axis of those ranks of this one that `part` puts together with this rank."""
        if part not in self._parts:
            places = part.members(self.rank)
            members = tuple(self._members[place] for place in places)
            opened = ThreadComm(self._turns, name, members, places.index(self.rank))
            self._parts[part] = Axis(name, opened.size, ThreadBacking(opened.rank, opened))
        return self._parts[part]
