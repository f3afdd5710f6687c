"""The members of an axis: they open it together, and each knows whether the others live.

A rank that waits asks now and then whether it would wait for ever: because a peer has died, has left a pass, or has
ended. What it knows is in the ranks' records (:mod:`ltx.peers.watcher`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ltx.core.base.callers import caller
from ltx.core.base.errors import DeadlockDetectedError, LtxError, PeerLostError, ReplicaDivergedError
from ltx.core.comm.axis_comm import AxisComm
from ltx.core.comm.backends import look_out
from ltx.core.comm.channel import Channel
from ltx.core.comm.peers import PATIENCE_S, Peers
from ltx.core.comm.store_exchange import EXCHANGES, TimeoutStore
from ltx.peers.diagnosis import CHECKS, OPENED, Record, Status, Waiter, describe_lost, diagnose, silent_of
from ltx.peers.watcher import hold_watcher, release_watcher


@contextmanager
def in_wait_for(what: str) -> Iterator[None]:
    """A context in which an error that ends a wait names what the wait was for."""
    try:
        yield
    except (PeerLostError, DeadlockDetectedError, ReplicaDivergedError) as error:
        error.args = (f"{error} It waited for {what}.",)
        raise


class Members(Peers):
    """The other ranks of an axis, whose records are read."""

    axis: AxisComm

    def __init__(self, axis: AxisComm, name: str | None, heartbeat_s: float):
        self._rank, self._ended = axis.rank, False
        self.watcher = hold_watcher(c10d._get_default_store(), dist.get_rank(), heartbeat_s)
        self.deadlocks = self.watcher.deadlocks
        asked = partial(TimeoutStore, caller=self.watcher.store_caller)
        super().__init__(axis, name, heartbeat_s, self.watcher.store, asked)
        self._store = self.store_exchange
        self._at = ""  # the place at which this rank has waited long enough to tell its peers
        self._gone = ""  # what :meth:`_missing` has found

    def meet(self) -> None:
        """Wait in the store until all ranks have come to open the axis.

        torch makes groups in C++. A rank whose peers don't come waits there for as long as the axis' timeout, and
        neither Ctrl-C nor the end of a peer interrupts that wait.
        """
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
            # Undo the count, so that the next attempt gets the same number; a peer that comes meanwhile mustn't think
            # that this rank still waits.
            del self.deadlocks.counts[self.label], self.watcher.axes[self.label]
            with suppress(PeerLostError):
                self._store.forget(OPENED, [self._rank])
                self._uncount()
            release_watcher(self.watcher)
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

    def end(self) -> None:
        """Tell the peers that this rank has ended its part in order, or why it failed, before links close."""
        if not self._gone:
            self._ended = self.axis.passes.failed is None
            self.watcher.tell(wait=True)

    def close(self) -> None:
        self.watcher.leave(self)
        self.deadlocks.counts.pop(self.label, None)
        release_watcher(self.watcher)
        self._store.close()
        del self._uncount  # which refers to the store

    def refuse(self, why: str) -> None:
        self.watcher.store_caller.refuse(why)

    # --- for the watcher

    @property
    def global_ranks(self) -> list[int]:
        return self.axis.global_ranks

    def status(self) -> Status:
        """This rank's status on this axis."""
        passes, issued = self.axis.passes, {channel.name: channel.begun for channel in self.axis.channels}
        return Status(self._at, passes.raised, passes.failed, self._ended, issued)

    def look_after_device(self) -> None:
        """Abort collectives for which the device (and so the host) waits in vain. The watcher calls it with each tick.

        The wait that finds the abort says why. Without the store all that is known is that rank 0, which held it, is
        gone.
        """
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

    def done(self) -> None:
        self.deadlocks.done()

    def begin(self) -> None:
        """Clear the place where this rank failed, since it begins something new, and peers may find it there."""
        if self._at:
            self._wait_at("")

    def _wait_at(self, place: str) -> None:
        if place != self._at:
            self._at = place
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
        return diagnose(self.watcher.records, Waiter(*of_axis, call, issue, self.watcher.call))

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

    def tell(self, wait: bool = False, heard: bool = False) -> None:
        self.watcher.tell(wait)
        if heard:
            dead = {axis.global_ranks[peer] for axis in self.own.axes for peer in axis.peers.gone("dead")}
            self.watcher.wait_until_heard(dead)
