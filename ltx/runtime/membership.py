"""The processes of an elastic run: its ranks, newcomers that ask to join, and how they agree on a next world.

A run uses a part of the first world's store, so the host of that store has to live. In a run each process has a number,
which it keeps when its rank changes, and it sends heartbeats for as long as it takes part, since the heartbeats of a
world end with that world. After a loss the processes regroup: each process that comes is alive, and goes on.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from ltx.core.base.private import PrefixStore, Store
from ltx.core.comm.backends import looking_out
from ltx.core.comm.diagnosis import RECORDS, Watched
from ltx.core.comm.pickling import KEY, proof
from ltx.core.comm.signature import Signature, explain_mismatch
from ltx.core.comm.store_exchange import TimeoutStore, poll_until
from ltx.core.comm.watcher import Watcher
from ltx.core.world.placement import Placement
from ltx.errors import AuthenticationError, PeerLostError, WorldError

_NOW = "ltx/elastic/now"


class Member(NamedTuple):
    """A process of a run, and where it computes."""

    number: int
    node: int  # the node's index in the world that the process comes from; -1 for a newcomer
    local_rank: int  # the local rank on that node
    host: str  # the host's name
    has_state: bool = True  # whether the process has the training's state; a newcomer gets it later

    @staticmethod
    def of(number: int, place: Placement, has_state: bool = True) -> Member:
        """Member `number`, whose place in the previous world is `place`."""
        node = -1 if place.joins is not None else place.node_rank
        return Member(number, node, place.local_rank, platform.node(), has_state)


@dataclass(frozen=True)
class Decision:
    """The result of a regroup, which all processes read from the store."""

    members: tuple[Member, ...]  # the members that go on, by rank
    known: frozenset[int]  # the numbers of processes that aren't newcomers any more: they were taken in, or lost

    @property
    def numbers(self) -> list[int]:
        return [member.number for member in self.members]

    def place(self, number: int, before: Placement) -> Placement:
        """The new place of member `number`. Local ranks stay where they are free."""
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
        return json.dumps([self.members, sorted(self.known)])

    @staticmethod
    def from_json(text: bytes) -> Decision:
        members, known = json.loads(text)
        return Decision(tuple(Member(*member) for member in members), frozenset(known))


def _on_nodes(members: Sequence[Member]) -> list[Member]:
    """The members; newcomers get the node of their host, and a free local rank if their local rank is taken."""
    found = [member for member in members if member.node >= 0]
    for member in members[len(found) :]:
        new = 1 + max((other.node for other in found), default=-1)
        node = next((other.node for other in found if other.host == member.host), new)
        taken = {other.local_rank for other in found if other.node == node}
        free = next(local for local in range(len(members)) if local not in taken)
        found.append(member._replace(node=node, local_rank=free if member.local_rank in taken else member.local_rank))
    return found


class Regroup:
    """How the processes of a run agree, through its `store`, on its `count`-th world."""

    def __init__(self, store: Any, count: int):
        self.count = count
        self._store, self._at = store, f"regroup/{count}"

    def come(self, member: Member) -> None:
        self._store.append(f"{self._at}/log", f"{json.dumps(member)}\n")

    def decline(self, number: int) -> None:
        """Say that member `number` won't come, so that the others don't wait for it."""
        self._store.append(f"{self._at}/log", f"{json.dumps([number])}\n")

    def decision(self) -> Decision | None:
        key = f"{self._at}/decided"
        return Decision.from_json(self._store.get(key)) if self._store.check([key]) else None

    def decide(
        self,
        mine: Member,
        members: Sequence[int],  # the numbers of the previous world's processes, by rank
        gone: Callable[[Sequence[int]], Collection[int]],  # returns which of the given numbers are known to be gone
        limit_s: float,
        known: Collection[int] = (),  # the `known` of the previous Decision
        asking: Callable[[], Sequence[int]] = tuple,  # returns the numbers of the newcomers that ask to join
        # room(here, asking): how many newcomers can join
        room: Callable[[int, int], int] = lambda here, asking: asking,
        left: Callable[[], Collection[int]] = tuple,  # returns the processes that have left the previous world
    ) -> Decision | None:
        """Announce the process of `mine`, and wait for the decision which processes go on.

        The first process that can decide decides for all: when every process has come that isn't known to be gone, or
        after `limit_s`. Processes decide nothing if none of them has the training's state: the result is None. If a
        process with the state comes later, it decides and goes on.
        """
        self.come(mine)

        def is_decided(at_the_limit: bool = False) -> bool:
            """Whether there is a decision; this process makes it as soon as it can."""
            if self.decision() is not None:
                return True
            new = [number for number in asking() if number not in known and number not in members]
            lost, left_it = set(gone([number for number in (*members, *new) if number != mine.number])), set(left())
            came, declined = self._read()
            lost |= left_it - came.keys()
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
            if not any(member.has_state for member in chosen):
                return True
            decided = Decision(chosen, frozenset((*known, *members, *taken, *absent)))
            self._store.compare_set(f"{self._at}/decided", "", decided.to_json())
            return True

        if not poll_until(is_decided, limit_s):
            is_decided(at_the_limit=True)
        return self.decision()

    def _read(self) -> tuple[dict[int, Member], set[int]]:
        """The members that have come, and the numbers of the members that declined."""
        came, declined = dict[int, Member](), set[int]()
        for line in self._store.get(f"{self._at}/log").splitlines():
            number, *rest = json.loads(line)
            if rest:
                came[number] = Member(number, *rest)
            else:  # a member may decline after it has come
                came.pop(number, None)
                declined.add(number)
        return came, declined


def begin_run(store: Store, size: int, worlds: int, entrance: Signature, refusal: str) -> str:
    """On rank 0: open a new run of `size` processes, in their `worlds`-th world, in the first world's `store`.

    `entrance`: what newcomers must have in common with the run. `refusal`: why newcomers can't join; "" if they can.

    Returns the run's token: random text that distinguishes it from every other run.
    """
    root, token = _root(store), os.urandom(8).hex()
    run = part_of_run(root, token)
    run.set("regroup", str(worlds))
    run.set("members", json.dumps(list(range(size))))
    root.set(_NOW, json.dumps([size, entrance.to_json(), refusal, token, proof(f"run {token}")]))
    return token


class Membership(Watched):
    """Process `number` of the run `token` in `store`. Its watcher sends heartbeats and watches those of the others."""

    label = "elastic"

    def __init__(self, store: Store, token: str, number: int, members: Sequence[int], worlds: int, heartbeat_s: float):
        self.token, self.number = token, number
        # the numbers by rank in the present world; the count of worlds
        self.members, self.worlds = list(members), worlds
        self.known = frozenset(members)  # processes that aren't newcomers any more
        self.waiting = 0  # the number of living newcomers that ask to join, as the watcher's thread last found it
        self._store, self._heartbeat_s = store, heartbeat_s
        self._last: dict[int, tuple[bytes, float]] = {}
        self._asking = list[int]()  # the newcomers that ask to join, without those in `known`
        self._watcher = Watcher(store, number, heartbeat_s)
        self._watcher.on_beat = self._look
        self._watcher.axes[self.label] = self
        self._asked = TimeoutStore(store, self._watcher.store_caller)

    def close(self, over: bool) -> None:
        """This process leaves the run; `over`: the run has ended for all."""
        with suppress(PeerLostError):  # the store is gone, so no process could read it
            if over:
                self._asked.set("over", "")
            self.next_regroup.decline(self.number)
        self._watcher.release()

    @property
    def next_regroup(self) -> Regroup:
        """The regroup that makes the next world."""
        return Regroup(self._asked, self.worlds + 1)

    def gone(self, some: Sequence[int]) -> list[int]:
        """Which of `some` have ended or stopped their heartbeats. Raises PeerLostError if the store is silent."""
        return sorted(self._watcher.gone().intersection(some))

    @property
    def global_ranks(self) -> list[int]:
        """The numbers of the processes that the watcher looks after: members, newcomers, this process."""
        return list(dict.fromkeys([*self.members, *self._asking, self.number]))

    def regroup(
        self,
        has_state: bool,
        place: Placement,
        lost: Callable[[], Sequence[int]],
        limit_s: float,
        room: Callable[[int, int], int],
    ) -> Placement | None:
        """The place of this process, which was at `place`, among those that go on; None if they go on without it.

        `has_state`: see :class:`Member`. `lost`: the ranks of the present world that have left it. `limit_s`, `room`:
        see :meth:`Regroup.decide`.
        Raises PeerLostError if the process that holds the store is gone or silent, or if all with the state are gone.
        """
        regroup, mine = self.next_regroup, Member.of(self.number, place, has_state)

        def left() -> list[int]:
            return [self.members[rank] for rank in lost()]

        try:
            self._asked.compare_set("regroup", str(self.worlds), str(regroup.count))
            asking = partial(_asked, self._asked, self.token)
            decision = regroup.decide(mine, self.members, self.gone, limit_s, self.known, asking, room, left)
            if decision is not None:
                self._asked.set("members", json.dumps(decision.numbers))
        except PeerLostError as error:
            raise PeerLostError(
                f"rank {place.rank}: the process that holds the store through which the ranks meet is gone or "
                "stopped (rank 0's, or the launcher's on its machine), so those that are left can't go on "
                f"without it. Start all of them again, from the last snapshot. ({error})"
            ) from error
        if decision is None:
            raise PeerLostError("elastic: the ranks that had the training's state are gone; these are newcomers.")
        return self._take_over(decision, place)

    def _take_over(self, decision: Decision, place: Placement) -> Placement | None:
        if self.number not in decision.numbers:
            return None
        self.worlds += 1
        self.members, self.known, self.waiting = decision.numbers, decision.known, 0
        return decision.place(self.number, place)

    def world_store(self) -> Store:
        """The store in which the present members make a world."""
        return PrefixStore("worlds", self._store)

    @contextmanager
    def making_world(self, has_state: bool, place: Placement) -> Iterator[None]:
        """Use it around the making of a world of the present members: raises if one of them is lost meanwhile.

        If that fails, this process comes to the next regroup before its connections with the others end.
        """
        members, worlds = list(self.members), self.worlds

        def look() -> None:
            if lost := self.gone(members):
                who = ", ".join(str(members.index(number)) for number in lost)
                raise PeerLostError(f"rank {who} was lost while a new world was made")
            if int(self._asked.get("regroup")) > worlds:
                raise PeerLostError("the others have failed to make this world, and make another")

        try:
            with looking_out(look):
                yield
        except Exception:
            with suppress(PeerLostError):  # the store is gone
                self.next_regroup.come(Member.of(self.number, place, has_state))
            raise

    def _look(self, store: Store) -> None:
        """Count the living newcomers, whose heartbeats change. The watcher's thread calls it."""
        new = self._asking = [number for number in _asked(store, self.token) if number not in self.known]
        now, records = time.monotonic(), PrefixStore(RECORDS, store)
        for number in [number for number in new if records.check([str(number)])]:
            beat, (before, _) = records.get(str(number)), self._last.get(number, (None, 0.0))
            if before != beat:
                # the first beat that is seen may be old
                self._last[number] = (beat, now if before is not None else 0.0)
        alive = [number for number in new if number in self._last and now - self._last[number][1] < self._heartbeat_s]
        self.waiting = len([number for number in alive if number not in self.known])

    @staticmethod
    def of_newcomer(place: Placement, entrance: Signature, limit_s: float, heartbeat_s: float) -> Membership:
        """The membership of a newcomer, which asks to join the run in the store at ``place.joins``.

        Raises WorldError if nothing answers there within `limit_s`, or the training is over; RankMismatchError if its
        `entrance` isn't the run's (another model, other data, ...); AuthenticationError without the key of the ranks.
        """
        assert place.joins is not None
        where = "{}:{}".format(*place.joins)
        deadline = time.monotonic() + limit_s
        try:
            root: Store = dist.TCPStore(  # type: ignore[attr-defined]
                *place.joins, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit_s)
            )
            if not poll_until(lambda: bool(root.check([_NOW])), deadline - time.monotonic()):
                raise WorldError(
                    f"elastic: no training that can be joined has begun at {where} within {limit_s:g} s. LTX_JOIN "
                    "is the MASTER_ADDR:MASTER_PORT of the ranks that run ltx.elastic there."
                )
            size, theirs, refusal, token, proven = json.loads(root.get(_NOW))
            store = part_of_run(root, token)
            if store.check(["over"]):
                raise _over(where)
            if not hmac.compare_digest(proven, proof(f"run {token}")):
                known = f"This process' {KEY} is {'set' if os.environ.get(KEY) else 'not set'}"
                raise AuthenticationError(
                    f"elastic: the ranks of the training at {where} have another key, so this process can't join them. "
                    f"{known}: start it with the {KEY} of the ranks. `ltx run` makes a random one unless it is set."
                )
            if (signature := Signature.from_json(theirs)) != entrance:
                raise explain_mismatch("elastic", {0: signature, size: entrance})
            if refusal:
                raise WorldError(f"elastic: the training at {where} takes no newcomers: {refusal}")
            newcomer = size - 1 + int(store.add("newcomers", 1))
            # The newcomer's heartbeats start first: members ignore newcomers without heartbeats.
            membership = Membership(store, token, newcomer, [], 0, heartbeat_s)
            store.append("asked", f"{newcomer} {_asks(newcomer, token)}\n")  # type: ignore[attr-defined]
            return membership
        except dist.DistError as error:
            raise WorldError(
                f"elastic: couldn't reach the store of a training to join at {where}. "
                "Check LTX_JOIN, the MASTER_ADDR:MASTER_PORT of its ranks, and whether it is still running. "
                f"({type(error).__name__}: {error})"
            ) from error

    def be_taken(self, place: Placement) -> Placement:
        """Wait until a regroup takes this newcomer in, which a full run doesn't. Returns the newcomer's place.

        Raises WorldError if the training is over; PeerLostError if the others are gone, or have gone on without this
        process.
        """
        assert place.joins is not None
        where, member = "{}:{}".format(*place.joins), Member.of(self.number, place, has_state=False)
        regroup = Regroup(self._asked, 0)  # a stand-in: regroups of a run count from 1
        decision: Decision | None = None

        def is_decided() -> bool:
            """Come to each regroup until one has decided about this newcomer."""
            nonlocal regroup, decision
            latest = int(self._asked.get("regroup"))
            decision = regroup.decision()
            if decision is not None and self.number in decision.known:
                return True
            if latest > regroup.count:
                regroup = Regroup(self._asked, latest)
                if regroup.decision() is None:
                    regroup.come(member)
            return False

        def look() -> None:
            if self._asked.check(["over"]):
                raise _over(where)
            self.members = json.loads(self._asked.get("members"))
            if self.members and set(self.gone(self.members)) >= set(self.members):
                raise PeerLostError(f"elastic: the ranks at {where} have shown no sign of life for too long.")

        poll_until(is_decided, math.inf, look)
        assert decision is not None
        self.worlds = regroup.count - 1
        taken = self._take_over(decision, place)
        if taken is None:
            raise PeerLostError(
                f"elastic: the ranks at {where} took this newcomer for lost, and have gone on without it. Start it "
                "again."
            )
        return taken


def _over(where: str) -> WorldError:
    return WorldError(f"elastic: the training at {where} is over: there is nothing left to join.")


def _asked(store: Any, token: str) -> list[int]:
    """The newcomers that ask to join, except those that can't prove that they know the job's key."""
    lines = store.get("asked").decode(errors="replace").splitlines() if store.check(["asked"]) else []
    asked = []
    for number, _, proven in (line.partition(" ") for line in lines):
        may_be = number.isdecimal() and len(number) < 10 and proven.isascii()
        if may_be and hmac.compare_digest(proven, _asks(int(number), token)):
            asked.append(int(number))
    return asked


def _asks(number: int, token: str) -> str:
    return proof(f"newcomer {number} of run {token}")


def _root(store: Store) -> Store:
    """The store without the prefixes through which a world sees a part of it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def part_of_run(store: Store, token: str) -> Store:
    """The part of a store that run `token` has for itself."""
    return PrefixStore(f"ltx/elastic/{token}", _root(store))
