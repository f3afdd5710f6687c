"""Backward passes on a line, and how its ranks find together again after one that was left halfway.

The engine drops a pass in which something raises, without a word to the nodes that it doesn't run. What the ranks have
issued by then differs, and the next issue would pair with one of the dropped pass. So a rank that leaves a pass says so
in the store; peers that wait for the rest of it read that and raise, leaving it too; and at the next pass all of them
meet and go on with new channels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from ltx.comm.heartbeat import TimeoutStore
from ltx.errors import CollectiveTimeoutError, DeadlockDetectedError, LtxError, PeerLostError, ReplicaDivergedError

# The runs of the engine that the present one is inside of.
_enclosing: list[int] = []


@contextmanager
def nested_run() -> Iterator[None]:
    """Around a run of the engine that may be inside another, whose passes go on afterwards."""
    _enclosing.append(torch._C._current_graph_task_id())
    try:
        yield
    finally:
        _enclosing.pop()


class BackwardPass:
    """One pass, until everything it has issued has landed (:meth:`done`).

    Attributes:
        flush: lands what it has issued so far.
    """

    def __init__(self) -> None:
        self.task: int = torch._C._current_graph_task_id()
        self.is_done = False
        self.flush: Callable[[], None] = lambda: None
        if self.task >= 0:
            # At the end of a pass that went well, also of one that wanted no gradient of a parameter.
            torch.autograd.Variable._execution_engine.queue_callback(self.done)

    def done(self) -> None:
        """Nothing more is to come of it."""
        self.is_done = True


class Recovery:
    """The passes on one line.

    Args:
        store: what the ranks of the line share.
        posted: whether all of some keys are in it; raises PeerLostError if it is gone.
        rank, size, axis_name, timeout_s: the line's.
        tear: makes the bucket channels refuse issues.
        renew: replaces them, on all ranks together.

    Attributes:
        reunions: how often the ranks have found together again.
        external_runs: how often collectives of others have begun (see :mod:`ltx.comm.external_collectives`).
        external_error: why these no longer pair; "" as long as they do.
    """

    def __init__(
        self,
        store: TimeoutStore,
        posted: Callable[[list[str]], bool],
        rank: int,
        size: int,
        axis_name: str,
        timeout_s: float,
        tear: Callable[[LtxError], None],
        renew: Callable[[], None],
    ):
        self._store, self._posted, self._rank, self._size = store, posted, rank, size
        self._axis_name, self._timeout_s = axis_name, timeout_s
        self._fail_channels, self._renew = tear, renew
        self._under_way: list[BackwardPass] = []
        self._completed = 0
        self._has_left = False
        self.generation = 0
        self.external_runs = 0
        self.external_error = ""

    def enter(self) -> BackwardPass:
        """A pass begins. The engine having dropped an earlier one shows here."""
        entered = BackwardPass()
        self._under_way = [earlier for earlier in self._under_way if not earlier.is_done]
        # One that is under way in the same run of the engine, or in one around it, goes on beside this one.
        alive = (entered.task, *_enclosing)
        if any(earlier.task == -1 or earlier.task not in alive for earlier in self._under_way):
            self.leave("something was raised in it")
            self._under_way = []
        self._under_way.append(entered)
        return entered

    def flush_others(self, mine: BackwardPass) -> None:
        """Land what other passes have issued, before `mine` issues more.

        So their later phases, which are issued whenever something has landed, don't mix with those of `mine`.
        """
        for other in self._under_way:
            if other is not mine and not other.is_done:
                other.flush()

    @property
    def inside(self) -> bool:
        """Whether what runs now is part of a pass."""
        task = torch._C._current_graph_task_id()
        return task >= 0 and any(entered.task == task and not entered.is_done for entered in self._under_way)

    def complete(self) -> None:
        """A pass has landed whole on this rank, and so could on all."""
        self._completed += 1

    def abort(self, error: BaseException) -> None:
        """The pass under way won't go on because of `error`."""
        self.leave(f"{type(error).__name__}: {error}", isinstance(error, PeerLostError))

    def leave(self, why: str, lost: bool = False) -> None:
        """The pass under way won't go on. `lost`: because a peer is, which is then what the others raise too."""
        if self._has_left:
            return
        self._has_left = True
        self._fail_channels(
            (PeerLostError if lost else DeadlockDetectedError)(
                f"rank {self._rank}: a backward pass on axis {self._axis_name!r} was left halfway ({why}), and its "
                "peers wait for the rest of it."
            )
        )
        self._store.set(
            self._key(self._rank), json.dumps([self._completed, why, self.external_runs, self.external_error, lost])
        )

    def abandon(self, why: str, lost: bool) -> None:
        """This rank won't issue anything on the line any more: its world ends, because of an exception.

        `lost`: that is the loss of a peer, which is then what the others raise too.
        """
        with suppress(RuntimeError):  # the store is gone: nobody is left to be told, or all see that
            self._store.set("abandoned", json.dumps([self._rank, why, lost]))

    def check_abandoned(self) -> None:
        """Raise if a peer has abandoned the line."""
        if self._posted(["abandoned"]):
            rank, why, lost = json.loads(self._store.get("abandoned"))
            if rank != self._rank:
                raise (PeerLostError if lost else DeadlockDetectedError)(
                    f"rank {self._rank}: rank {rank} has left axis {self._axis_name!r} because of an exception "
                    f"({why}), so what this rank waits for won't come."
                )

    def look(self) -> None:
        """Called while this rank waits: raise if what it waits for won't come."""
        self.check_abandoned()
        if self._has_left:
            return
        for rank in range(self._size):
            if rank != self._rank and self._posted([self._key(rank)]):
                _, why, *_, lost = json.loads(self._store.get(self._key(rank)))
                raise (PeerLostError if lost else DeadlockDetectedError)(
                    f"rank {self._rank}: rank {rank} has left a backward pass on axis {self._axis_name!r} halfway "
                    f"({why}), so what this rank waits for won't come."
                    + ("" if lost else " Once every rank has left it, the next pass goes on as usual.")
                )

    def recover(self) -> None:
        """Before a pass: if the last one was left, wait until all ranks have left it and go on with new channels.

        Raises:
            CollectiveTimeoutError: a peer hasn't left it within the axis' timeout.
            ReplicaDivergedError: on every rank, once: some had completed that pass, others not. The channels are new.
        """
        if not self._has_left:
            return
        keys = {rank: self._key(rank) for rank in range(self._size)}
        deadline, pause_s = time.monotonic() + self._timeout_s, 0.001
        while not self._posted(list(keys.values())):
            if time.monotonic() > deadline:
                absent = [rank for rank, key in keys.items() if not self._posted([key])]
                raise CollectiveTimeoutError(
                    f"rank {self._rank}: a backward pass on axis {self._axis_name!r} was left halfway, and ranks "
                    f"{absent} haven't come to begin the next one within {self._timeout_s:g} s."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        posts = {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}
        completed = {rank: post[0] for rank, post in posts.items()}
        runs = {post[2] for post in posts.values()}
        begun = f"ranks had begun {sorted(runs)} of them" if len(runs) > 1 else ""
        self.external_error = next((post[3] for post in posts.values() if post[3]), begun)
        self._has_left, self._completed = False, 0
        self.generation += 1
        self._renew()
        if len(set(completed.values())) > 1:
            counts = ", ".join(f"rank {rank}: {count}" for rank, count in completed.items())
            raise ReplicaDivergedError(
                f"axis {self._axis_name!r}: some ranks left a backward pass halfway when others had completed it "
                f"(passes completed: {counts}), so what they made of it differs. Go on from values that all ranks "
                "share: ltx.broadcast them, or load a checkpoint. The axis works again."
            )

    def _key(self, rank: int) -> str:
        return f"left/{self.generation}/{rank}"
