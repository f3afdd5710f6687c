"""Negotiation: the ranks of an axis compare what they are about to issue, through the store.

Ranks announce signatures at places in the store (:mod:`ltx.core.comm.store_exchange`). A rank that waits there, or for
a collective, checks now and then whether it would wait forever: because a peer has died, or waits for something else
itself.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ltx.core.base.callers import called, caller
from ltx.core.base.errors import DeadlockDetectedError, PeerLostError, RankMismatchError, StoreGoneError
from ltx.core.comm.axis_comm import AxisComm
from ltx.core.comm.channel import Channel
from ltx.core.comm.peers import BUCKETS, PATIENCE_S, under_way
from ltx.core.comm.signature import Post, Signature, explain_mismatch, list_calls
from ltx.core.comm.store_exchange import EXCHANGES
from ltx.peers.diagnosis import CHECKS
from ltx.peers.members import Members, in_wait_for

# Calls are numbered through all sessions of debug_checks; each session gets a range of this size.
_CALLS = 1 << 32


class Negotiation(Members):
    """The other ranks of an axis: whether they live, and whether they agree."""

    def __init__(self, axis: AxisComm, name: str | None, heartbeat_s: float):
        super().__init__(axis, name, heartbeat_s)
        self._answered: set[str] = set()
        # the wait and the records of the last search
        self._looked: tuple[object, ...] = ()
        self._posted: deque[str] = deque()  # the places where the store still holds values of this rank, oldest first

    def exchange(self, place: str, post: Post) -> list[Post]:
        """Every rank's post at `place`, once all have posted.

        All ranks raise RankMismatchError if posts disagree or a peer waits elsewhere; a rank raises PeerLostError for a
        peer that has died, where all ranks share a machine, CollectiveTimeoutError after the axis' timeout.
        """
        self.begin()
        self.announce(place, post)
        try:
            announced = self._store.collect(
                place,
                f"{post.signature.operation} on axis {self.axis.name!r}",
                while_waiting=partial(self._check_while_comparing, place, post, time.monotonic()),
                to="compare it",
                fix=" Every rank must call the same collectives.",
            )
        finally:
            self.deadlocks.done()
        self._wait_at("")
        posts = [Post.of(fields) for fields in announced]
        self._refuse(dict(enumerate(posts)))
        return posts

    def compare(self, channel: Channel, signature: Signature, offer: Any) -> Any:
        """Compare the `signature` of the next collective on `channel`. Gives rank 0's `offer`."""
        if channel is self.axis.user:  # after a failure peers may have given up without comparing
            channel.check_in_step(signature.operation)
        place = f"{channel.name}/{channel.compared}/{channel.issued}"
        channel.compared += 1
        return self.exchange(place, self._post(signature, offer))[0].value

    def _post(self, signature: Signature, offer: Any = None) -> Post:
        """A post that says how many of the user's collectives this rank has issued."""
        return Post(signature, offer, issued={self.axis.user.name: self.axis.user.issued})

    def exchange_values(
        self, signature: Signature, value: Any, place: str | None = None, wait: bool = True
    ) -> list[Any]:
        """No collective is issued; if a peer waits in one, both ranks raise. For the main thread. `place`: one that
        :meth:`StoreExchange.new_place` returned on all ranks, or a name below it; None for a new place.
        """
        if not wait:
            self.announce(place or self._store.new_place(), Post(signature, value))
            return []
        self.axis.check_usable()
        issued = {channel.name: channel.issued for channel in self.axis.channels}
        post = Post(signature, value, issued=issued)
        self._posted.append(place or self._store.new_place())
        posts = self.exchange(self._posted[-1], post)
        # All ranks have come here, so no rank waits at, or reads, places before the last one: all have been there, or
        # have failed and gone on. A rank that failed at the last place may still seem to wait there, and this rank's
        # post says that it needs no answer.
        with suppress(PeerLostError):  # the values have arrived, even if the store is gone by now
            while len(self._posted) > 2:
                self._store.forget(self._posted.popleft(), [self._rank])
        return [peers.value for peers in posts]

    def begin_session(self) -> None:
        """Go on at a number that all ranks find, although some may have left the last session earlier than others."""
        self.next_check += _CALLS - self.next_check % _CALLS

    def take_check(self) -> tuple[str, str]:
        """The places of the next call of ltx.debug_checks() and of the call before; :attr:`next_check` moves on."""
        self.next_check += 1
        return f"{CHECKS}/call/{self.next_check - 1}", f"{CHECKS}/call/{self.next_check - 2}"

    def announce(self, place: str, post: Post) -> None:
        """Put this rank's `post` at `place`, without waiting for the others."""
        compared = {channel.name: channel.compared for channel in self.axis.channels}
        self._store.announce(place, replace(post, compared=compared).fields())

    def withdraw(self, place: str, post: Post, why: str) -> None:
        """Stop waiting at `place`, where this rank has announced `post`. A peer that comes there finds `why`."""
        self.announce(place, replace(post, signature=Signature(why, ())))
        self._wait_at("")

    def peek(self, place: str, rank: int) -> Post | None:
        fields = self._store.peek(place, rank)
        return None if fields is None else Post.of(fields)

    def _check_while_comparing(self, place: str, post: Post, began: float) -> None:
        """Raise if some peer won't come to `place`; called now and then while this rank waits there."""
        self._wait_at(place)
        what, in_pass = f"{post.signature.operation} on axis {self.axis.name!r}", self.axis.passes.inside
        in_pass |= place.startswith(BUCKETS)
        try:
            self.check_peers(what, in_pass, now=bool(self.gone("dead")))
        except (DeadlockDetectedError, PeerLostError):  # a peer may have come, and have left afterwards
            if not self._store.has(place):
                raise
        with in_wait_for(what):
            self._refuse_elsewhere(place, post)
        self.refuse_lost(place, what)
        if time.monotonic() - began > PATIENCE_S:
            self._refuse_deadlock(place, post)

    def _check_deadlock(self, key: str, number: int, what: str, of: str = "") -> None:
        def describe() -> str:
            name, how = (of, f"{what}, ") if of else (called(what), "")
            return f"{name} on axis {self.axis.name!r} ({how}{os.path.basename(caller())})"

        try:
            with suppress(StoreGoneError):  # as in answer_peers()
                self.deadlocks.check(f"{self.label}/{key}", number, self.global_ranks, describe)
        except RankMismatchError as error:
            # Peers that waited elsewhere have given up calls that this rank hasn't made: it can't go on without them.
            self.axis.user.failed = self.axis.user.failed or error
            raise

    def _refuse_deadlock(self, place: str, post: Post) -> None:
        """Raise if a peer won't come to `place` because it waits in vain itself."""
        address, number, detail, *_ = place.split("/")
        if address in (CHECKS, EXCHANGES):
            awaited = address, int(detail) + (address == CHECKS)
        else:
            awaited = f"{address}/compared", int(number) + 1
        try:
            self._check_deadlock(*awaited, post.signature.operation)
        except RankMismatchError:
            self.withdraw(place, post, "nothing any more: it has given up")
            raise

    def _who_waits(self, *here: object) -> dict[int, str]:
        """The places where peers wait, by rank; only peers that this rank, which is at `here`, hasn't looked at yet."""
        looked, self._looked = self._looked, (self.watcher.version, *here)
        if looked == self._looked or not any(record.on(self.label).at for record in self.records().values()):
            return {}
        return {rank: record.on(self.label).at for rank, record in self.records(now=True).items()}

    def _refuse_elsewhere(self, place: str, post: Post) -> None:
        """Raise if a peer waits for this rank at another place: the two would wait forever."""
        for rank, there in self._who_waits(place).items():
            if there in ("", place) or self._store.has(there, [self._rank]):
                continue
            if self._store.has(place, [rank]):  # the peer has already been at this place
                continue
            self._reply(there, rank, post)

    def _reply(self, place: str, rank: int, post: Post) -> None:
        """Tell `rank`, which waits at `place`, that this rank is at `post` instead. Both ranks raise."""
        theirs = self.peek(place, rank)
        assert theirs is not None
        if theirs.signature == post.signature:  # the call is the same, but it would pair with another one
            operation = f"{post.signature.operation} (after other calls)"
            post = replace(post, signature=replace(post.signature, operation=operation))
        self.announce(place, post)
        self._refuse(dict(sorted({self._rank: post, rank: theirs}.items())))

    def waiting(self, channel: Channel, number: int, what: str, waited_s: float, now: bool = False) -> None:
        """Answer peers that wait for this rank in the store, too: one may compare a signature where this rank has
        issued another, or stand at a call of ltx.debug_checks() and not have issued the collective.
        """
        issue = channel.name, number
        with suppress(StoreGoneError):  # pending collectives need no store; a lost peer breaks its connections
            waited_for = f"{what} (issue {number})"
            self.check_peers(waited_for, issue=issue, now=now)
            with in_wait_for(waited_for):
                self._answer(self._who_waits(issue))
        if PATIENCE_S < waited_s < channel.timeout_s:
            self._check_deadlock(channel.name, number, what, "" if channel is self.axis.user else self.axis.under_way)

    def _answer(self, waiting: dict[int, str]) -> None:
        for rank, place in waiting.items():
            if place == "" or place in self._answered:
                continue
            address, _, position = place.rsplit("/", 2)
            if address == CHECKS or address.startswith(EXCHANGES):
                self._answer_check(place, rank)
                continue
            channel = next((c for c in self.axis.channels if c.name == address), None)
            if channel is None or channel.issued <= int(position):
                continue
            self._answered.add(place)
            mine = dict(channel.recent).get(int(position))
            if mine is None or self._store.has(place, [self._rank]):
                continue  # this rank answered it when the signature was new here
            self.announce(place, self._post(mine.signature, mine.offer))
            posts = {other: self.peek(place, other) for other in range(self.axis.size)}
            self._refuse({other: said for other, said in posts.items() if said is not None})

    def _answer_check(self, place: str, rank: int) -> None:
        theirs = self.peek(place, rank)
        if theirs is None or self._store.has(place, [self._rank]):
            return
        checked = place.startswith(CHECKS)
        for channel in self.axis.channels:
            if channel is self.axis.background and not checked:
                continue  # ranks may issue at different times on this channel
            position = theirs.issued.get(channel.name, channel.issued)
            mine = dict(channel.recent).get(position) if channel.issued > position else None
            if mine is not None:
                how = "under way, unlike its peer" if under_way else "outside ltx.debug_checks()"
                operation = f"{mine.signature.operation} ({how})" if checked else mine.signature.operation
                self._reply(place, rank, self._post(replace(mine.signature, operation=operation)))

    def _refuse(self, posts: dict[int, Post]) -> None:
        """Raise if `posts` disagree. If only some ranks have made a call, it counts for all ranks, and all compare
        their next calls.

        But if one of these ranks has issued a collective that others haven't, all stop: it would pair with the others'
        next collective.
        """
        self.next_check = max(self.next_check, *(post.next_check for post in posts.values()))
        signatures = {rank: post.signature for rank, post in posts.items()}
        if len({*signatures.values()}) > 1:
            error = explain_mismatch(self.axis.name, signatures)
            if left := self.why("refused"):
                error = RankMismatchError(f"{error} {left}")
            if any(post.caller for post in posts.values()):
                error = RankMismatchError(f"{error} The calls: {list_calls(posts)}.")
            for channel in self.axis.channels:  # ranks may have compared different signatures
                channel.compared = max(post.compared.get(channel.name, channel.compared) for post in posts.values())
            user = self.axis.user
            if any(post.issued.get(user.name, user.issued) != user.issued for post in posts.values()):
                user.failed = user.failed or error
            raise error
