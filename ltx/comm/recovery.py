"""Recovery: how the ranks of an axis continue after a backward pass that was aborted.

When something raises in a backward pass, the autograd engine drops it, without telling the nodes it doesn't run. The
ranks have then issued different collectives, and the next one would pair with one of the dropped pass. So a rank that
aborts a pass says so in the store. Peers that wait for the rest of that pass read it and raise, which aborts it there
too. Before the next pass all ranks meet and continue with new channels.
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
    """Surrounds a run of the engine inside another one, whose passes continue afterwards."""
    _enclosing.append(torch._C._current_graph_task_id())
    try:
        yield
    finally:
        _enclosing.pop()


class BackwardPass:
    """One backward pass, until everything it has issued is complete (:meth:`done`).

    Attributes:
        flush: waits for what it has issued so far.
    """

    def __init__(self) -> None:
        self.task: int = torch._C._current_graph_task_id()
        self.is_done = False
        self.flush: Callable[[], None] = lambda: None
        if self.task >= 0:
            # At the end of a pass that went well, also of one that wanted no gradient of a parameter.
            torch.autograd.Variable._execution_engine.queue_callback(self.done)

    def done(self) -> None:
        """The pass is over."""
        self.is_done = True


class Recovery:
    """The backward passes on one axis.

    Args:
        store: the store that the axis' ranks share.
        posted: whether all of some keys are in it; raises PeerLostError if it is gone.
        rank, size, axis_name, timeout_s: the axis'.
        tear: marks the bucket channels as failed.
        renew: replaces them, on all ranks together.

    Attributes:
        generation: how many times the ranks have recovered.
        external_runs: how many times collectives of other libraries have begun (:mod:`ltx.comm.external_collectives`).
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
        """A pass begins. If the engine has dropped an earlier one, it is found here."""
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
        """Wait for what other passes have issued, before `mine` issues more.

        Their later phases, which are issued whenever a collective completes, would otherwise mix with those of `mine`.
        """
        for other in self._under_way:
            if other is not mine and not other.is_done:
                other.flush()

    @property
    def inside(self) -> bool:
        """Whether the current code runs in a pass."""
        task = torch._C._current_graph_task_id()
        return task >= 0 and any(entered.task == task and not entered.is_done for entered in self._under_way)

    def complete(self) -> None:
        """A pass is complete on this rank, so it can be on all."""
        self._completed += 1

    def abort(self, error: BaseException) -> None:
        """Abort the current pass because of `error`."""
        self.leave(f"{type(error).__name__}: {error}", isinstance(error, PeerLostError))

    def leave(self, why: str, lost: bool = False) -> None:
        """Abort the current pass. `lost`: because a peer is lost, and then the other ranks raise that too."""
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
        """This rank won't issue anything on the axis any more: its world ends because of an exception.

        `lost`: the exception is the loss of a peer, and then the other ranks raise that too.
        """
        with suppress(RuntimeError):  # the store is gone: nobody is left to be told, or all see that
            self._store.set("abandoned", json.dumps([self._rank, why, lost]))

    def check_abandoned(self) -> None:
        """Raise if a peer has abandoned the axis."""
        if self._posted(["abandoned"]):
            rank, why, lost = json.loads(self._store.get("abandoned"))
            if rank != self._rank:
                raise (PeerLostError if lost else DeadlockDetectedError)(
                    f"rank {self._rank}: rank {rank} has left axis {self._axis_name!r} because of an exception "
                    f"({why}), so what this rank waits for won't come."
                )

    def look(self) -> None:
        """Called during a wait: raise if a peer has aborted the pass, so that what this rank waits for won't come."""
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
        """Before a pass: if the last one was aborted, wait until all ranks have aborted it, and open new channels.

        Raises:
            CollectiveTimeoutError: a peer hasn't aborted it within the axis' timeout.
            ReplicaDivergedError: on every rank, once: some ranks had completed that pass and others hadn't. The
                channels are new.
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
