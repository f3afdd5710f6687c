"""What a rank knows of the other ranks of an axis: whether they live, and whether they agree on what they issue.

They open the axis together. A rank that waits asks now and then whether it would wait for ever: a peer has died, has
left a pass, has ended, or waits for something else. It knows that from the ranks' records (:mod:`ltx.peers.watcher`),
and from places in the store where ranks compare signatures before they issue (:mod:`ltx.peers.store_exchange`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ltx.core.base import errors
from ltx.core.base.callers import called, caller
from ltx.core.base.errors import DeadlockDetectedError, LtxError, PeerLostError, RankMismatchError, StoreGoneError
from ltx.core.comm.axis_comm import AxisComm
from ltx.core.comm.backends import look_out
from ltx.core.comm.channel import Channel
from ltx.core.comm.peers import BUCKETS, PATIENCE_S, Peers, under_way
from ltx.core.comm.signature import Signature
from ltx.core.comm.step_summary import Said
from ltx.peers.diagnosis import CHECKS, OPENED, Record, Status, describe_lost, diagnose, silent_of
from ltx.peers.habit import Habit
from ltx.peers.patient_store import TimeoutStore
from ltx.peers.posts import Post, explain_apart, explain_mismatch, list_calls
from ltx.peers.store_exchange import EXCHANGES, StoreExchange
from ltx.peers.watcher import hold_watcher

_EXPLAINING_S = 10.0  # how long ranks whose digests differ wait for each other to say why
_CALLS = 1 << 32  # calls are numbered through all sessions of debug_checks; each session gets a range of this size


@contextmanager
def in_wait_for(what: str) -> Iterator[None]:
    """A context in which an error that ends a wait names what the wait was for."""
    try:
        yield
    except (PeerLostError, DeadlockDetectedError, errors.ReplicaDivergedError) as error:
        error.args = (f"{error} It waited for {what}.",)
        raise


class Negotiation(Peers):
    """The other ranks of an axis: whether they live, and whether they agree."""

    axis: AxisComm
    store_exchange: StoreExchange

    def __init__(self, axis: AxisComm, name: str | None, heartbeat_s: float):
        self._rank, self._ended, self.global_ranks = axis.rank, False, axis.global_ranks
        self.watcher = hold_watcher(c10d._get_default_store(), dist.get_rank(), heartbeat_s)
        self.deadlocks = self.watcher.deadlocks
        self.done = self.deadlocks.done  # type: ignore[method-assign]
        asked = partial(TimeoutStore, caller=self.watcher.store_caller)
        super().__init__(axis, name, heartbeat_s, self.watcher.store, asked)
        self._store = self.store_exchange
        self.waits = self.deadlocks.waits
        self._gone = ""  # what :meth:`_missing` has found
        self._answered: set[str] = set()
        self._looked: tuple[object, ...] = ()  # the wait and the records of the last search
        self._posted: deque[str] = deque()  # the places where the store still holds values of this rank, oldest first

    def meet(self) -> None:
        """Wait in the store until all ranks have come: in C++, where torch makes groups, nothing interrupts a wait."""
        self.watcher.axes[self.label] = self
        self.deadlocks.counts[self.label] = self.counts
        what = f"opening axis {self.axis.name!r}"
        try:
            self._store.announce(OPENED, None)
            self._store.collect(
                OPENED,
                what,
                while_waiting=partial(self._check_opening, what, time.monotonic()),
                to="open it too",
                fix=f" All of its ranks, {self.global_ranks} of the world, open it together: by the first collective "
                "on a process group or DeviceMesh, or by ltx.axis_from_group.",
            )
        except BaseException:
            # Undo the count, for the next attempt's number; a peer that comes mustn't think that this rank still waits.
            del self.deadlocks.counts[self.label], self.watcher.axes[self.label]
            with suppress(PeerLostError):
                self._store.forget(OPENED, [self._rank])
                self._uncount()
            self.watcher.release()
            raise
        finally:
            self.deadlocks.done()

    def _check_opening(self, what: str, began: float) -> None:
        look_out()
        self.check_peers(what, in_pass=False, now=bool(self.gone("dead")))
        self.refuse_lost(OPENED, what)
        if time.monotonic() - began > PATIENCE_S:
            text = f"{what} ({os.path.basename(caller())})"
            self.deadlocks.check(f"{self.label}/{OPENED}", 1, self.global_ranks, lambda: text)

    def close(self) -> None:
        self.watcher.leave(self)
        self.deadlocks.counts.pop(self.label, None)
        self.watcher.release()
        self._store.close()
        del self._uncount  # which refers to the store

    # --- for the watcher

    def status(self) -> Status:
        passes, issued = self.axis.passes, {channel.name: channel.begun for channel in self.axis.channels}
        return Status(self.at, passes.raised, passes.failed, self._ended, issued)

    def look_after_device(self) -> None:
        """As :meth:`Watched.look_after_device`. Without the store only rank 0, which held it, is known to be gone."""
        group = self.axis.user.stream_group if self.axis.channels else None
        if group is None or group.aborted:
            return
        if self.watcher.without_store:
            in_vain = 0 in self.global_ranks and self.watcher.held_by_rank_0
        else:
            in_vain = self.diagnosed(in_pass=True, issue=group.issue) is not None
        if (in_vain or group.failed) and group.outstanding:  # not earlier: another thread may be capturing a CUDA graph
            group.abort()

    # --- waits

    def begin(self) -> None:
        """Clear the place where this rank failed, since it begins something new, and peers may find it there."""
        self._wait_at("")

    def _wait_at(self, place: str) -> None:
        if place != self.at:
            self.at = place
            self.watcher.tell(wait=not place)

    def records(self, now: bool = False) -> dict[int, Record]:
        """The statuses of peers that have one, by their ranks on this axis; `now`: read the store again first."""
        said = self.watcher.look_now() if now else self.watcher.look()
        ranks = enumerate(self.global_ranks)
        return {place: said[rank] for place, rank in ranks if rank in said and place != self._rank}

    def diagnosed(self, in_pass: bool, issue: tuple[str, int] | None = None) -> LtxError | None:
        ranks, heartbeat_s = self.global_ranks, self.watcher.heartbeat_s
        if 0 in ranks and self.watcher.host_gone(for_s=heartbeat_s):  # the peer's earlier messages have arrived
            return PeerLostError(
                f"rank {self._rank}: rank {ranks.index(0)} on axis {self.axis.name!r} is gone, and with it the store "
                "through which the ranks meet."
            )
        of_axis = self._rank, self.axis.name, self.label, ranks, heartbeat_s
        call = self.axis.passes.present if in_pass else -1
        return diagnose(self.watcher.records, *of_axis, call, issue, self.watcher.call)

    def check_peers(
        self, what: str, in_pass: bool = True, issue: tuple[str, int] | None = None, now: bool = False
    ) -> None:
        """Raise the :meth:`diagnosed` error, or one if the store is silent. `now`: as :meth:`Peers.waiting`."""
        with in_wait_for(what):
            if now:
                self.watcher.look_now()
            self.watcher.look()
            if error := self.diagnosed(in_pass, issue):
                raise error

    def counts(self) -> dict[str, tuple[int, Iterable[int]]]:
        """The numbers of collectives that this rank has issued and compared, and the threads that did so."""
        counts: dict[str, tuple[int, Iterable[int]]] = {OPENED: (1, ())}
        if self.axis.channels:
            counts |= {CHECKS: (self.next_check, ()), EXCHANGES: (self._store.begun, ())}
        for channel in self.axis.channels:
            threads = set(channel.threads)
            counts[channel.name] = (channel.begun, threads)
            counts[f"{channel.name}/compared"] = (channel.compared, threads)
        return {f"{self.label}/{key}": count for key, count in counts.items()}

    habit = Habit

    # --- who is there

    def refuse_lost(self, place: str, what: str) -> None:
        """Raise if a peer that `what` waits for has died or ended, unless it had come to `place` before that."""
        lost = sorted({*self.gone("dead"), *self._ended_peers()})
        if lost and not self._store.has(place, lost):
            raise PeerLostError(f"rank {self._rank}: {what} failed: {self.why('lost', lost)}.")

    def gone(self, how: str) -> list[int]:
        ranks, found = self.global_ranks, self.watcher.failed(now=True) if how == "failed" else {}
        host = ranks.index(0) if 0 in ranks and self.watcher.host_gone() else self._rank  # its store ends with it
        transports = [channel.transport for channel in self.axis.channels[:1] if channel.transport is not None]
        gone = {host, *(peer for transport in transports for peer in transport.lost_peers())} - {self._rank}
        gone |= {place for place, rank in enumerate(ranks) if rank in found}
        if how == "left" or (how == "failed" and not gone):
            silent = silent_of(self.watcher.look())
            gone |= {place for place, rank in enumerate(ranks) if rank in silent and place != self._rank}
        ended = {*self._ended_peers()} if how != "dead" else set()  # in good order, which is no failure
        return sorted(gone | ended if how == "left" else gone - ended)

    def _ended_peers(self, now: bool = False) -> list[int]:
        return [rank for rank, record in self.records(now).items() if record.on(self.label).ended]

    def why(self, what: str, *of: Any) -> str:
        said: dict[str, Callable[..., str]] = {"broken": self._missing, "late": self._late, "refused": self._left}
        return describe_lost(of[0], self._ended_peers(now=True)) if what == "lost" else said[what](*of)

    def explain_apart(self, place: str, said: Said, late: bool) -> LtxError:
        by_rank: list[Said] = []
        with suppress(LtxError):  # a peer is at another place, so it has issued other collectives
            told = self._store.exchange(place or self._store.new_place(), said, "a comparison of steps", _EXPLAINING_S)
            by_rank = [Said(*of_rank) for of_rank in told]
        return explain_apart(self.axis.name, by_rank, late)

    def _left(self) -> str:
        left = self.axis.passes.counted
        return left and f"This rank has left {left}, and has gone on; ranks leave a step out together or not at all."

    def _late(self, channel: Channel, number: int) -> str:
        said = {rank: record.on(self.label).issued for rank, record in self.records(now=True).items()}
        late = {rank: issued.get(channel.name, number) for rank, issued in said.items()}
        words = [f"rank {rank} is at issue {at} and never came to it" for rank, at in late.items() if at < number]
        return "; ".join(words) or super().why("late")

    def _missing(self) -> str:
        """Takes a second, once."""
        if self._gone:
            return self._gone
        peers = [rank for rank in range(self.axis.size) if rank != self._rank]
        gone = peers
        if len(peers) > 1:
            silent = self.watcher.without_beat([self.global_ranks[rank] for rank in peers])
            # If the peer ended because it lost this peer too, it had been there.
            ended = {rank: record.on(self.label) for rank, record in self.records().items() if not record.beat}
            left = [rank for rank, at in ended.items() if not at.ended and (at.failed is None or at.failed.lost)]
            gone = [rank for rank in peers if self.global_ranks[rank] in silent and rank not in left]
        if not gone:
            return "a connection broke, though all of them show signs of life"
        which = "one of rank" if len(gone) == len(peers) > 1 else "rank"
        self._gone = f"{which} {', '.join(map(str, gone))} is gone, or the link to it is down"
        if {*gone} & {*self._ended_peers(now=True)}:
            self._gone = self.why("lost", gone)
        return self._gone

    def processes(self) -> dict[int, list[str]]:
        return {rank: record.process for rank, record in self.watcher.records.items()}

    def tell(self, wait: bool = False, heard: bool = False, ended: bool = False) -> None:
        if ended and self._gone:
            return
        self._ended |= ended and self.axis.passes.failed is None
        self.watcher.tell(wait or ended)  # before links close
        heard |= ended and len(self.own.axes) == 1 and self.global_ranks[self._rank] == self.watcher.store_caller.host
        if heard:  # a store that this process holds ends with its world
            dead = {axis.global_ranks[peer] for axis in self.own.axes for peer in axis.peers.gone("dead")}
            self.watcher.wait_until_heard(dead)

    # --- what ranks are about to issue

    def compare_at(self, place: str, post: Post) -> list[Post]:
        """Every rank's post at `place`; all ranks raise RankMismatchError if posts differ or a peer waits elsewhere."""
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
        return self.compare_at(place, self._post(signature, offer))[0].value

    def _post(self, signature: Signature, offer: Any = None) -> Post:
        """A post that says how many of the user's collectives this rank has issued."""
        return Post(signature, offer, issued={self.axis.user.name: self.axis.user.issued})

    def exchange(self, signature: Signature, value: Any, place: str | None = None, wait: bool = True) -> list[Any]:
        """No collective is issued; if a peer waits in one, both raise. `place`: of new_place(), or below; None: new."""
        if not wait:
            self.announce(place or self._store.new_place(), Post(signature, value))
            return []
        self.axis.check_usable()
        post = Post(signature, value, issued={channel.name: channel.issued for channel in self.axis.channels})
        self._posted.append(place or self._store.new_place())
        posts = self.compare_at(self._posted[-1], post)
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
            goes_on = there in ("", place) or self._store.has(there, [self._rank])
            if not goes_on and not self._store.has(place, [rank]):  # else the peer has already been at this place
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
        """Raise if `posts` disagree. A call that only some ranks have made counts for all, who compare their next; but
        if one has issued a collective that others haven't, all stop: it would pair with the others' next one.
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
