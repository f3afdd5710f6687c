"""Recovery: how the ranks of an axis continue after a backward pass, or a training step, that was aborted.

When something raises in a backward pass, the autograd engine drops it, without telling the nodes it doesn't run. The
ranks have then issued different collectives, and their next one would pair with a collective of the dropped pass. So a
rank that aborts a pass says so in the store. Peers that wait for the rest of that pass read it and raise, which aborts
it there too. Before the next pass all ranks wait for one another and continue with new channels.

A training step is left in the same way wherever it raises: its peers' gradients would be averaged with gradients of the
next step, and after the reduction peers have parameters that this rank lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ltx.core.base import private
from ltx.core.base.errors import (
    DeadlockDetectedError,
    NotFiniteError,
    PeerLostError,
    RankMismatchError,
    ReplicaDivergedError,
    WeightError,
    said_of,
)
from ltx.core.comm.diagnosis import AGAIN, LEFT, Left, parted

if TYPE_CHECKING:
    from ltx.core.comm.axis_comm import AxisComm

#: Errors about shared values, which all ranks raise alike in a step, so no rank waits for the rest of it.
ALIKE = NotFiniteError, WeightError

#: Errors that other ranks raise too when they wait for this rank.
OF_PEERS = DeadlockDetectedError, RankMismatchError, ReplicaDivergedError


class Forward:
    """The forward passes of plain steps on one axis.

    If a step's forward pass raises, all ranks together may leave the step out. If only this rank does, and then comes
    to its next backward pass without calling a collective, its peers wait in vain for the pass that it has left out.

    Attributes:
        failed: why the forward pass raised, if this rank has gone on by itself after that.
    """

    def __init__(self) -> None:
        self.failed, self._issued_before = "", 0

    @contextmanager
    def entered(self, issued: Callable[[], int]) -> Iterator[None]:
        """A context around a forward pass; `issued`: the number of collectives that the user has called so far."""
        if issued() != self._issued_before:
            self.failed = ""
        try:
            yield
        except BaseException as error:
            self.failed, self._issued_before = f"its forward pass raised {type(error).__name__}: {error}", issued()
            raise


# The backward passes that enclose the present one.
_enclosing: list[int] = []


@contextmanager
def nested_run() -> Iterator[None]:
    """A context around a backward pass inside another one, which continues afterwards."""
    _enclosing.append(private.graph_task())
    try:
        yield
    finally:
        _enclosing.pop()


class BackwardPass:
    """One backward pass, until all its collectives are complete (:meth:`done`)."""

    def __init__(self) -> None:
        self.task: int = private.graph_task()
        self.is_done = False
        self.flush: Callable[[], None] = lambda: None  # waits for the pass' issued collectives
        if self.task >= 0:
            # This runs at the end of a pass without errors, also of a pass without a parameter's gradient.
            private.at_end_of_pass(self.done)

    def done(self) -> None:
        self.is_done = True


class Recovery:
    def __init__(self, axis_comm: AxisComm):
        self._comm, self._rank, self._axis_name = axis_comm, axis_comm.rank, axis_comm.name
        self._exchange = axis_comm.store_exchange
        self._under_way: list[BackwardPass] = []
        self.completed = 0
        self.left: Left | None = None  # the pass that this rank has left, until all ranks have left it
        self.abandoned: tuple[str, bool] | None = None  # this rank's world ends: (why, whether a peer is lost)
        self._told, self._calls = False, 0  # _calls counts training steps and passes of plain steps
        self.generation = self.come = 0  # the number of recoveries of all ranks, and the number that this rank came to
        self.external_runs = 0  # the number of runs of other libraries' collectives
        self.external_error = ""  # why other libraries' collectives no longer pair; "" if they do
        self.step: int | None = None  # the number of the training step that is under way
        self.last_left = ""  # the training step that this rank has left without a recovery since, and why
        self.forward = Forward()  # of plain steps

    @contextmanager
    def in_step(self, number: int) -> Iterator[Callable[[], None]]:
        """A context around training step `number`, which counts as one pass; the function that it gives commits it.

        Step summaries carry the number meanwhile. An exception before the commit leaves the step, and peers are told.
        """
        self._find_dropped(private.graph_task())
        self._calls += 1
        self.recover()
        committed: list[bool] = []
        around, self.step = self.step, number
        self.forward.failed = ""  # the step's number in the summary shows which rank is behind
        try:
            yield lambda: committed.append(True)
        except BaseException as error:
            if not committed and not isinstance(error, ALIKE):
                if not isinstance(error, OF_PEERS):
                    self.last_left = f"{self._what} ({said_of(error)})"
                self.abort(error)
            raise
        finally:
            if committed:
                self.completed, self.last_left = self.completed + 1, ""
            self.step = around

    def enter(self) -> BackwardPass:
        """A pass begins. An earlier pass that the engine has dropped is found here."""
        entered = BackwardPass()
        self._find_dropped(entered.task)
        self._under_way.append(entered)
        return entered

    def _find_dropped(self, task: int) -> None:
        self._under_way = [earlier for earlier in self._under_way if not earlier.is_done]
        # Passes in the same or an enclosing run of the autograd engine go on beside this one.
        alive = (task, *_enclosing)
        if any(earlier.task == -1 or earlier.task not in alive for earlier in self._under_way):
            self.leave("something was raised in it")
            self._under_way = []

    @contextmanager
    def aborted_by(self, *kinds: type[BaseException]) -> Iterator[None]:
        """A context in which an error of one of these `kinds` aborts the pass, on the peers too."""
        try:
            yield
        except kinds as error:
            self.abort(error)
            raise

    @contextmanager
    def leaving_with_peers(self) -> Iterator[None]:
        """A context in which ranks compare a signature on a bucket channel.

        Ranks compare by the number of collectives that they have issued, which differ where some have left the last
        pass halfway. So all recover first. A rank that learns in the comparison that its peers have left leaves too.
        """
        self._find_dropped(private.graph_task())
        self.recover()
        with self.aborted_by(DeadlockDetectedError, ReplicaDivergedError):
            yield

    def flush_others(self, mine: BackwardPass) -> None:
        """Wait for the collectives of other passes before the pass `mine` issues more.

        Otherwise their later phases, issued whenever a collective completes, would mix with those of `mine`.
        """
        for other in self._under_way:
            if other is not mine and not other.is_done:
                other.flush()

    @property
    def inside(self) -> bool:
        """Whether the current code runs in a pass."""
        task = private.graph_task()
        return task >= 0 and any(entered.task == task and not entered.is_done for entered in self._under_way)

    def complete(self) -> None:
        """Note that a pass is complete on this rank, so it can complete on all ranks."""
        self.completed += self.step is None

    @property
    def _what(self) -> str:
        return "a backward pass" if self.step is None else f"step {self.step} of the training"

    def abort(self, error: BaseException) -> None:
        self.leave(said_of(error), isinstance(error, PeerLostError))

    def begin(self) -> None:
        """Note that a pass begins, and tell peers if this rank has left out the previous pass."""
        why, self.forward.failed = self.forward.failed, ""
        if why:
            self.leave(why)
        self._calls += self.step is None
        self.recover()

    def leave(self, why: str, lost: bool = False) -> None:
        """Abort the current pass. `lost`: the reason is a lost peer, so the other ranks raise PeerLostError too."""
        if self.left is not None:
            return
        self.left = Left(self.generation, self.completed, why, self._what, lost)
        self._comm.fail_channels(
            (PeerLostError if lost else DeadlockDetectedError)(
                f"rank {self._rank}: {self._what} on axis {self._axis_name!r} was left halfway ({why}), and its "
                "peers wait for the rest of it."
            )
        )
        counts = [self._calls, self._comm.user.issued]
        said = [self.completed, why, self._what, counts, self.external_runs, self.external_error]
        with suppress(PeerLostError):  # the store is gone: its host has ended, which the peers see too
            self._exchange.announce(self._place, said)
        self._comm.watcher.tell()

    def abandon(self, why: str, lost: bool) -> None:
        """Note that this rank issues nothing more on the axis: its world ends. `why`, `lost`: as in :meth:`leave`."""
        self.abandoned = why, lost
        self._comm.watcher.tell(wait=True)

    def begin_external(self, label: str) -> None:
        """Note that every rank is about to issue collectives of another library, on that library's groups.

        ltx only waits for these: it can't renew such a group. So ranks that leave a backward pass halfway tell each
        other how many such collectives they had issued. If the numbers differ, the library's next collective would pair
        with a pending one, so ltx refuses to run more of them.
        """
        if self.external_error:
            raise DeadlockDetectedError(
                f"rank {self._rank}: {label} can't run on axis {self._axis_name!r}: the collectives that such hooks "
                "issue have been out of step since an earlier failure. Destroy their process group, ltx.shutdown(), "
                f"and start again. The failure was: {self.external_error}"
            )
        self.external_runs += 1

    @contextmanager
    def waiting_for_external(self, label: str) -> Iterator[None]:
        """A context around a wait for collectives of other libraries."""
        try:
            yield
        except BaseException as error:
            self.external_error = f"rank {self._rank} waited in {label}: {error}"
            raise

    def recover(self, within: bool = False) -> None:
        """Before a pass: if the last pass was aborted, wait until all ranks have aborted it, and open new channels.

        `within`: this axis is a part of another one, which recovers.

        Raises:
            CollectiveTimeoutError: a peer hasn't aborted the pass within the axis' timeout.
            DeadlockDetectedError, PeerLostError: a peer won't come, because it has left the axis or is gone.
            RankMismatchError: a peer won't come, because it waits for this rank in another call. On both.
            ReplicaDivergedError: some ranks had completed that pass and others hadn't. Every rank raises it once, and
                has new channels then; this rank raises it now if peers ahead have left, for that reason, its next call.
        """
        if self.left is None:
            return
        what = f"recovery on axis {self._axis_name!r} from a backward pass that was left halfway"
        left = self._comm.hear(self._place, LEFT, self.times_left, what, "begin the next one")
        most = max(passes for passes, *_ in left)
        behind = [rank for rank, (passes, *_) in enumerate(left) if passes < most]
        told = f"told/{self.generation}"
        if self._rank in behind and not (self._told or within):
            now = self._calls, self._comm.user.issued
            if all(call >= now[0] and issued >= now[1] for passes, _, _, (call, issued), *_ in left if passes == most):
                self._told = True
                self._exchange.announce(told, True)
                raise self._diverged(left, behind[0])
        self.come = self.generation + 1
        try:
            self._comm.come(f"{AGAIN}/{self.come}", AGAIN, self.come, what, "begin the next one")
        except BaseException:
            self.come = self.generation
            raise
        runs = {begun for *_, begun, _ in left}
        begun = f"ranks had begun {sorted(runs)} of them" if len(runs) > 1 else ""
        self.external_error = next((error for *_, error in left if error), begun)
        self.generation += 1
        self.left, self._told, self.completed = None, False, 0
        self._comm.renew()
        if behind and not any(self._exchange.peek(told, rank) for rank in behind):
            raise self._diverged(left, behind[0])

    def _diverged(self, left: list[Any], behind: int) -> ReplicaDivergedError:
        counts = ", ".join(f"rank {rank}: {passes}" for rank, (passes, *_) in enumerate(left))
        _, why, what, *_ = left[behind]
        return ReplicaDivergedError(parted(self._axis_name, behind, what, f"{why}; passes completed: {counts}"))

    @property
    def times_left(self) -> int:
        """The number of passes that this rank has left halfway: at most one until all ranks recover."""
        return self.generation + (self.left is not None)

    @property
    def _place(self) -> str:
        """The place in the store where each rank announces that it has aborted the current pass."""
        return f"left/{self.generation}"
