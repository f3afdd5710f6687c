"""Regroup: the processes of an elastic run agree which of them make the next world; newcomers are taken in.

A process that comes is alive, and goes on. They agree through the store of the first world, whose host has to live.
:class:`WatchedStore` is where they make the next one.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, cast

from torch._C._distributed_c10d import Store

from ltx.core.comm.store_exchange import poll_until
from ltx.core.world.placement import Placement
from ltx.errors import PeerLostError


class Member(NamedTuple):
    """A process of a run, and where it computes.

    Attributes:
        number: the process' number in the run, which it keeps. Ranks change.
        node: its node's index in the world that it comes from; -1 for a newcomer, which comes from none.
        local_rank: among those of its node.
        host: the node's name.
    """

    number: int
    node: int
    local_rank: int
    host: str

    @staticmethod
    def of(number: int, place: Placement) -> Member:
        """Member `number`, whose place in the world before is `place`."""
        newcomer = place.joins is not None
        return Member(number, -1 if newcomer else place.node_rank, place.local_rank, platform.node())


@dataclass(frozen=True)
class Decision:
    """The result of a regroup: the same for all processes that read it.

    Attributes:
        members: the processes that go on, by rank.
        known: the numbers of processes that are no newcomers any more: they were taken in, or lost.
    """

    members: tuple[Member, ...]
    known: frozenset[int]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the members, by rank."""
        return [member.number for member in self.members]

    def place(self, number: int, before: Placement) -> Placement:
        """The new place of member `number`. Ranks and nodes are counted anew; local ranks stay where they can."""
        members = _on_nodes(self.members)
        mine = members[self.numbers.index(number)]
        nodes = sorted({member.node for member in members})
        return replace(
            before,
            rank=members.index(mine),
            size=len(members),
            local_rank=mine.local_rank,
            local_size=sum(member.node == mine.node for member in members),
            node_rank=nodes.index(mine.node),
            num_nodes=len(nodes),
            master=before.master or before.joins,
            joins=None,
            agreed=True,
        )

    def to_json(self) -> str:
        """Text for the store."""
        return json.dumps([self.members, sorted(self.known)])

    @staticmethod
    def from_json(text: bytes) -> Decision:
        """Inverse of :meth:`to_json`."""
        members, known = json.loads(text)
        return Decision(tuple(Member(*member) for member in members), frozenset(known))


def _on_nodes(members: Sequence[Member]) -> list[Member]:
    """The members, with newcomers on the node of their host, at a free local rank if theirs is taken."""
    found = [member for member in members if member.node >= 0]
    for member in members[len(found) :]:
        new = 1 + max((other.node for other in found), default=-1)
        node = next((other.node for other in found if other.host == member.host), new)
        taken = {other.local_rank for other in found if other.node == node}
        free = next(local for local in range(len(members)) if local not in taken)
        found.append(member._replace(node=node, local_rank=free if member.local_rank in taken else member.local_rank))
    return found


class Regroup:
    """How the processes of a run agree on its `count`-th world.

    Args:
        store: the run's, or an :class:`ltx.core.comm.store_exchange.TimeoutStore` for it.
        count: the number of the new world, the same on all ranks.
    """

    def __init__(self, store: Any, count: int):
        self.count = count
        self._store, self._at = store, f"regroup/{count}"

    def come(self, member: Member) -> None:
        """Say that the process of `member` is here."""
        self._store.append(f"{self._at}/log", f"{json.dumps(member)}\n")

    def decline(self, number: int) -> None:
        """Say that member `number` won't come, so that the others don't wait for it."""
        self._store.append(f"{self._at}/log", f"{json.dumps([number])}\n")

    def decision(self) -> Decision | None:
        """The decision, once there is one."""
        key = f"{self._at}/decided"
        return Decision.from_json(self._store.get(key)) if self._store.check([key]) else None

    def decide(
        self,
        mine: Member,
        members: Sequence[int],
        gone: Callable[[Sequence[int]], Collection[int]],
        limit_s: float,
        known: Collection[int] = (),
        asking: Callable[[], Sequence[int]] = tuple,
        room: Callable[[int, int], int] = lambda here, asking: asking,
    ) -> Decision:
        """Announce the process of `mine`, and wait until it is decided which processes go on.

        The first process to decide decides for all: once every process has come that isn't known to be gone, or at the
        end of `limit_s`.

        Args:
            members: the numbers of the processes of the world before, by rank.
            gone: returns those of some processes that are known to be gone. It is called repeatedly, also for those
                that have come.
            known: see :class:`Decision`.
            asking: the newcomers that want to be taken in.
            room: how many newcomers are taken in, given how many others have come and how many newcomers ask.
        """
        self.come(mine)

        def is_decided(at_the_limit: bool = False) -> bool:
            """Whether it is decided; this process decides it once it can."""
            if self.decision() is not None:
                return True
            came, declined = self._read()
            new = [number for number in asking() if number not in known and number not in members]
            lost = set(gone([number for number in (*members, *new) if number != mine.number]))
            here = [number for number in members if number in came and number not in lost]
            ready = [number for number in new if number in came and number not in lost]
            taken = ready[: room(len(here), len(ready))]
            missing = [number for number in members if number not in came]
            if room(len(here), len(new)) > len(taken):
                missing += [number for number in new if number not in came]
            if not (at_the_limit or lost.union(declined).issuperset(missing)):
                return False
            absent = [number for number in new if number in lost or number in missing]
            chosen = tuple(came[number] for number in (*here, *taken))
            decided = Decision(chosen, frozenset((*known, *members, *taken, *absent)))
            self._store.compare_set(f"{self._at}/decided", "", decided.to_json())
            return True

        if not poll_until(is_decided, limit_s):
            is_decided(at_the_limit=True)
        decision = self.decision()
        assert decision is not None
        return decision

    def _read(self) -> tuple[dict[int, Member], set[int]]:
        """The members that have come, and the numbers of those that declined."""
        came, declined = dict[int, Member](), set[int]()
        for line in self._store.get(f"{self._at}/log").splitlines():
            number, *rest = json.loads(line)
            if rest:
                came[number] = Member(number, *rest)
            else:
                declined.add(number)
        return came, declined


def _forwarded(name: str) -> Any:
    """A method that calls the underlying store's of that name."""

    def method(self: WatchedStore, *args: Any) -> Any:
        return getattr(self.underlying_store, name)(*args)

    return method


class WatchedStore(Store):
    """`store`, except that a wait in it checks for trouble: process groups are made by waiting in a store.

    Args:
        store: the one that answers.
        trouble: returns why a wait would never end; "" if it may.
        limit_s: no group that is made in it waits for its peers for longer. Those that have regrouped are about to
            come, and one that connects to a rank that has given up meanwhile can't learn that.
    """

    def __init__(self, store: Store, trouble: Callable[[], str], limit_s: float = 300.0):
        super().__init__()
        self.limit = timedelta(seconds=limit_s)
        super().set_timeout(self.limit)
        self.underlying_store: Any = store  # torch's stubs leave half of it out
        self._trouble = trouble

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there. Raises PeerLostError if they won't be."""
        limit_s = (timeout or self.limit).total_seconds()

        def look() -> None:
            if text := self._trouble():
                raise PeerLostError(text)

        if not poll_until(lambda: self.check(keys), limit_s, look):
            raise PeerLostError(f"peers haven't come within {limit_s:g} s")

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        self.wait([key])
        return cast(bytes, self.underlying_store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values, once they are there."""
        self.wait(keys)
        return cast(list[bytes], self.underlying_store.multi_get(keys))

    # The rest is the store's own. By the last two names torch's C++ code calls the two before.
    set, multi_set, compare_set, append, add, check, delete_key, num_keys = map(
        _forwarded, ("set", "multi_set", "compare_set", "append", "add", "check", "delete_key", "num_keys")
    )
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self.limit = min(timeout, self.limit)
        super().set_timeout(self.limit)

    clone = _forwarded("clone")
