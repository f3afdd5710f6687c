"""The records that ranks write about themselves, and pure functions that tell a waiting rank whether it waits in vain.

A rank has one record in the store, which its watcher writes (:mod:`ltx.peers.watcher`).

Deadlocks: if one rank alone calls a collective, it waits there while its peers wait in the next step, and no rank has
issued what another waits for. A thread that has waited for a second writes down the issue and the channel that it waits
for, and how many issues its process has made on each channel. It waits for the peers that have made fewer. A missing
issue may come from any thread of the peer that has issued on that channel before; it never comes if all these threads
wait in vain. The largest set of threads that all wait in vain is a deadlock. A rank that computes, sleeps, or has
waited for less than a second isn't in a deadlock, nor is a rank that waits for it.

Counts never shrink, and a thread that waits issues nothing: what one rank said before another did is still true. A
deadlock is reported only when later beats of all its ranks confirm it. A rank that waits for a peer which
has left isn't deadlocked: it will raise as soon as its thread looks.

Deadlocks inside compiled graphs and on devices, where Python doesn't wait, end with the axis' timeout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ltx.core.base import kernel
from ltx.core.base.errors import DeadlockDetectedError, LtxError, PeerLostError
from ltx.core.comm.passes import Failed

OPENED = "opened"  #: keys with this suffix count the axes that a rank has opened; without the key none
CHECKS = "checks"  #: the prefix of the places of calls that ltx.debug_checks() compares
RECORDS = "ltx/records/"  #: the prefix of records' keys in the store
INIT = "ltx.init"  #: the name of the axis that ranks are on while ``ltx.init`` makes their world

Node = tuple[int, int]  #: a thread: (its process' rank in the world, its number in the process)

_OR_LOCKED = (
    "; or it is in one call of C code that holds Python's lock for longer than that: give ltx.init a "
    "heartbeat_timeout= that outlives such calls"
)


@dataclass(frozen=True)
class ThreadWait:
    """The wait of a thread: it ends when all `ranks` (of the world) have made `number` issues of `key`."""

    thread: int
    serial: int  # the number of the thread's waits: if it stays the same, the thread makes no progress
    key: str
    number: int
    ranks: list[int]
    text: str  # the call that waits, and its line


@dataclass(frozen=True)
class Told:
    """What a process tells its peers about its threads."""

    waits: list[ThreadWait] = field(default_factory=list)  # the waits of threads that have waited for long
    counts: dict[str, tuple[int, list[int]]] = field(default_factory=dict)  # key: (number of issues, their threads)
    #: The waits of the deadlock that the process has found, as (rank, thread, serial), and the error's text.
    found: tuple[list[tuple[int, int, int]], str] | None = None

    def made(self, wait: ThreadWait) -> int:
        """The number of issues that the process has made of `wait`'s key; if unknown, as many as needed."""
        return self.counts.get(wait.key, (0 if wait.key.endswith(f"/{OPENED}") else wait.number, []))[0]

    def may_issue(self, key: str) -> set[int]:
        """The threads from which a missing issue of `key` may come: all known threads, if none has issued there yet."""
        return set(self.counts.get(key, (0, []))[1]) or {
            *(wait.thread for wait in self.waits),
            *(thread for _, threads in self.counts.values() for thread in threads),
        }


@dataclass(frozen=True)
class Status:
    at: str = ""  # the place in the store at which the rank waits for its peers
    raised: Failed | None = None
    failed: Failed | None = None
    ended: bool = False  # in good order
    issued: dict[str, int] = field(default_factory=dict)  # the number of issued buffers on each channel, by its address


class Watched(Protocol):
    """The part of an axis of this process that the watcher needs."""

    label: str
    global_ranks: list[int]  # the axis' ranks, this one included, in the order in which each watches the next

    def status(self) -> Status:
        return Status()

    def look_after_device(self) -> None:
        """Abort collectives that the device waits for in vain; the watcher's thread calls this with each tick."""
        return


@dataclass(frozen=True)
class Record:
    """What a rank tells its peers about itself."""

    beat: float = 0.0  # a new number each time; 0 once the rank's watcher has ended
    seen: int = 0  # the version of the records that the rank has read
    # ranks that this rank finds silent, their last beats, and what the kernel says of their processes
    silent: dict[int, tuple[float, str]] = field(default_factory=dict)
    axes: dict[str, Status] = field(default_factory=dict)  # by the axis' label
    told: Told = Told()
    process: list[str] = field(default_factory=list)  # the rank's, as the kernel knows it

    def on(self, label: str) -> Status:
        """The rank's status on an axis. If its world of ``ltx.init`` has ended, it opens no other axis."""
        status = self.axes.get(label)
        if status is not None or self.beat or not self.axes.get(INIT, Status()).ended:
            return status or Status()
        why = next((of_axis.failed for of_axis in self.axes.values() if of_axis.failed is not None), None)
        return Status(failed=why, ended=why is None)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str | bytes) -> Record:
        fields: dict[str, Any] = json.loads(text)
        told = fields["told"]
        found = told["found"] and ([(*node,) for node in told["found"][0]], told["found"][1])
        counts = {key: (number, threads) for key, (number, threads) in told["counts"].items()}
        for status in fields["axes"].values():
            status |= {key: status[key] and Failed(**status[key]) for key in ("raised", "failed")}
        fields["silent"] = {int(rank): (beat, why) for rank, (beat, why) in fields["silent"].items()}
        fields["axes"] = {label: Status(**status) for label, status in fields["axes"].items()}
        fields["told"] = Told([ThreadWait(**wait) for wait in told["waits"]], counts, found)
        return Record(**fields)


def stuck(told: Mapping[int, Told]) -> dict[Node, ThreadWait]:
    """The threads that wait for ever, given what each rank has told."""
    left = {(rank, wait.thread): wait for rank, said in told.items() for wait in said.waits}

    def waits_in_vain(rank: int, wait: ThreadWait) -> bool:
        peers = {peer: told[peer] for peer in wait.ranks if peer != rank and peer in told}
        return any(
            said.made(wait) < wait.number
            and (threads := said.may_issue(wait.key))
            and all((peer, thread) in left for thread in threads)
            for peer, said in peers.items()
        )

    while going_on := [node for node, wait in left.items() if not waits_in_vain(node[0], wait)]:
        for node in going_on:
            del left[node]
    return left


def silent_of(records: Mapping[int, Record]) -> dict[int, str]:
    """The ranks that a peer has found silent and that have shown no heartbeat since; and why they are, in words."""
    return {
        rank: f"its process {why}{_OR_LOCKED if why == kernel.UNKNOWN else ''}"
        for said in records.values()
        for rank, (beat, why) in said.silent.items()
        if rank not in records or records[rank].beat == beat
    }


def diagnose(
    records: Mapping[int, Record],
    me: int,
    name: str,
    label: str,
    ranks: list[int],
    heartbeat_s: float,
    call: int = -1,
    issue: tuple[str, int] | None = None,
    of_pool: int = 0,
) -> LtxError | None:
    """The error if rank `me` on axis `name`, of these `ranks` of the world, waits in vain by the records; None if the
    wait may still end. `call`: as :attr:`Failed.call`, of its pass; -1 if it waits outside of passes. `issue`:
    the channel's address, and the issue that it waits for there. `of_pool`: the call of a Pool that it is in.
    """
    known = {place: records[rank] for place, rank in enumerate(ranks) if rank in records and place != me}
    peers = {place: record.on(label) for place, record in known.items()}
    for peer, status in peers.items():
        left = status.failed
        if left is None or not left.matters(of_pool):
            left = status.raised
        if left is not None and (left is status.failed or left.call == call):
            halfway = f"{left.what} on axis {name!r} halfway" if left.what else f"axis {name!r} because of an exception"
            text = f"rank {me}: rank {peer} has left {halfway} ({left.why}), so what this rank waits for won't come."
            kind = PeerLostError if left.lost else DeadlockDetectedError
            if left.what:
                text += " The world has ended: ltx.init() on all ranks begins a new one. Go on there from a state that "
                text += "all ranks share, by train.broadcast(state) or a checkpoint."
            error = kind(text)
            error.told = left.why if left.why.startswith("after rank ") else f"after rank {peer} had left: {left.why}"
            return error
    ended = [peer for peer, status in peers.items() if status.ended]
    found = silent_of(records)
    if silent := [place for place, rank in enumerate(ranks) if rank in found and place != me]:
        whys = {peer: found[ranks[peer]] for peer in silent if peer not in ended}
        which = [peer for peer, why in whys.items() if not why.endswith(kernel.GONE)]
        if not which:  # forks of dead ranks may keep their connections open, so nothing breaks
            return PeerLostError(f"rank {me}: on axis {name!r}, {describe_lost(silent, ended)}.")
        return PeerLostError(
            f"rank {me}: rank {', '.join(map(str, which))} on axis {name!r} has shown no sign of life for "
            f"{heartbeat_s:g} s: {whys[which[0]]}."
        )
    if issue is not None:
        address, number = issue
        if never := [peer for peer in ended if peers[peer].issued.get(address, number) < number]:
            return PeerLostError(f"rank {me}: on axis {name!r}, {describe_lost(never, ended)}.")
    return None


def describe_lost(lost: Iterable[int], ended: Iterable[int]) -> str:
    """A text that says which ranks of `lost` are gone, and which have ended in good order before this one."""
    left = [rank for rank in lost if rank in set(ended)]
    if gone := [rank for rank in lost if rank not in left]:  # some ranks may have ended only because others did
        return f"the process of rank {', '.join(map(str, gone))} is gone"
    return (
        f"rank {', '.join(map(str, left))} has ended its part of the world in good order (its `with ltx.init()`, or "
        "its program), and this rank goes on. Have all ranks do as many steps; where they have unequal numbers of "
        "batches, loop over ltx.uneven(batches)"
    )
