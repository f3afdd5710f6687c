"""Passes: the backward passes and training steps of an axis, and what an exception in one of them means.

A rank that raises in a step after it has sent something leaves peers that wait for the rest: its world ends, for all
ranks. It says so in its record, nothing more can be issued, and its peers, which read the record, end in the same way.
``ltx.init`` then makes a new world.

A rank that has sent nothing may be one of many: a wrong shape, or a typo in a cell, raises on all of them alike. They
can go on together. So such a call counts as a collective, which peers compare at their next one, and a peer that waits
for the rest of it reads in the record that it won't come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from ltx.core.base import errors, private
from ltx.core.base.traced import TracedValueError
from ltx.core.comm.backends import unregister
from ltx.core.comm.peers import OfAxis
from ltx.core.comm.signature import RAISED

_FORWARD = "a forward pass"
_ISSUED = attrgetter("user.issued")


@dataclass(frozen=True)
class Failed:
    """Why a rank's world ends, or why it has left a pass or step before it had sent anything."""

    why: str
    lost: bool = False  # whether the reason is a lost peer
    what: str = ""  # the pass or step that it has left halfway
    #: Of a pass: the number of passes, and of the user's collectives, before it. Of a world: the call of a Pool that
    #: raised; ranks in a later one know that all had raised, and go on.
    call: int | None = None

    def matters(self, call: int) -> bool:
        """Whether it ends the world of a rank that is in this `call`."""
        return self.call is None or self.call >= call


class BackwardPass:
    """One backward pass, until all its collectives are complete (:meth:`done`)."""

    def __init__(self, sent: int) -> None:
        self.task, self.depth, self.sent = private.graph_task(), private.runs_of_engine(), sent
        self.is_done = False
        self.flush: Callable[[], None] = lambda: None  # waits for the pass' issued collectives
        if self.task >= 0:
            # This runs at the end of a pass without errors, also of a pass without a parameter's gradient.
            private.at_end_of_pass(self.done)

    def done(self) -> None:
        self.is_done = True


class Passes:
    """The passes and steps of one axis on this rank."""

    def __init__(self, axis_comm: OfAxis):
        self._comm, self._own = axis_comm, axis_comm.peers.own
        self._under_way: list[BackwardPass] = []
        self.step: int | None = None  # the number of the training step that is under way
        self._thread = 0  # which runs that step
        #: The number of passes and of the user's collectives before the last step, or forward pass of a plain step.
        self.call = self._raised_at = 0
        self.raised: Failed | None = None  # the last one of these, if it raised before this rank had sent anything
        self.counted = ""  # why the last one had raised, in words, if it counts as a pass
        self.failed: Failed | None = None  # why this rank issues nothing more on the axis

    @contextmanager
    def in_step(self, number: int) -> Iterator[Callable[[], None]]:
        """As :meth:`Ranks.in_step`. Meanwhile step summaries carry the `number`."""
        if self.step is not None and self._thread != threading.get_ident():
            error = errors.UnsupportedError(
                f"rank {self._comm.rank}: two threads run training steps on axis {self._comm.name!r} at a time, so "
                "ranks may come to them in different orders, and mix their gradients. Run all steps in one thread."
            )
            self.end_world(error)
            raise error
        if self._under_way:
            self.find_dropped()
        if self.raised is not None and self.raised.what == _FORWARD:
            self.raised = None  # the step's number in the summary shows which rank is behind
        elif self.raised is not None:
            self.begin()
        self.call = self._calls()
        committed: list[bool] = []
        around, self.step, self._thread = self.step, number, threading.get_ident()
        sent = self._own.sent
        try:
            yield partial(committed.append, True)
        except BaseException as error:
            if not committed and not isinstance(error, errors.StepLeftOutError):
                self.leave(error, sent)
            raise
        finally:
            self.step = around
            if committed:
                self.raised, self.counted = None, ""

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """A context around the forward pass of a plain step, which all ranks together may leave out if it raises."""
        if self.step is not None:  # of a training step, which is left as a whole
            yield
            return
        self.call, sent = self._calls(), self._own.sent
        try:
            yield
        except BaseException as error:
            if not isinstance(error, TracedValueError):
                self.leave(error, sent, _FORWARD)
            raise

    def begin(self) -> None:
        """Before a step or pass: count the last one if it raised, and no collective has brought the ranks together."""
        if self.raised is not None and self.is_uncounted:
            self._comm.first_phase.advance(RAISED)
            self.counted = f"{self.raised.what} ({self.raised.why})"

    @property
    def present(self) -> int:
        """:attr:`call` of the step or pass that this rank may be in; -1 if it has left that by an exception."""
        return -1 if self.raised is not None and self.raised.call == self.call else self.call

    @property
    def is_uncounted(self) -> bool:
        """Whether the last step or pass has raised, and the ranks haven't compared or called anything since."""
        return self.raised is not None and self._raised_at == self._calls()

    def enter(self) -> BackwardPass:
        """A pass begins. An earlier pass that the engine has dropped is found here."""
        entered = BackwardPass(self._own.sent)
        self.find_dropped()
        self._under_way.append(entered)
        return entered

    def find_dropped(self) -> None:
        """Leave a pass in which something was raised: autograd's engine drops it without telling the nodes."""
        self._under_way = [earlier for earlier in self._under_way if not earlier.is_done]
        # Passes in the same or an enclosing run of the autograd engine go on beside this one.
        task, depth = private.graph_task(), private.runs_of_engine() if self._under_way else 0
        others = [earlier for earlier in self._under_way if earlier.task != task or task == -1]
        dropped = [earlier for earlier in others if earlier.task == -1 or earlier.depth >= depth]
        if dropped:
            self._under_way = []
            self.leave("something was raised in it", dropped[0].sent)

    def flush_others(self, mine: BackwardPass | None) -> None:
        """Wait for other passes before `mine` issues more: their later phases would mix with its own."""
        for other in self._under_way:
            if other is not mine and not other.is_done:
                other.flush()

    @property
    def inside(self) -> bool:
        """Whether the current code runs in a pass."""
        task = private.graph_task()
        return task >= 0 and any(entered.task == task and not entered.is_done for entered in self._under_way)

    def _calls(self) -> int:
        return int(sum(map(_ISSUED, self._own.axes), self._comm.first_phase.issued))

    def leave(self, why: BaseException | str, sent: int, what: str = "") -> None:
        """Leave a step or pass, before which this rank had `sent` so many collectives, because of an exception."""
        of_peers = errors.CollectiveTimeoutError, errors.DeadlockDetectedError, errors.PeerLostError
        failed = isinstance(why, of_peers) or any(channel.failed for channel in self._comm.channels)
        if failed or (sent != self._own.sent and any(axis.size > 1 for axis in self._own.axes)):
            self.end_world(why, what)  # a rank that is alone can't be out of step with another
        elif self.failed is None:
            self.raised = Failed(errors.said_of(why), what=what or self._what, call=self.call)
            self._raised_at = self._calls()
            self._comm.peers.tell(wait=True)  # a peer that finds this rank elsewhere reads why

    @contextmanager
    def aborted_by(self, *kinds: type[BaseException], what: str = "") -> Iterator[None]:
        """A context in which an error of one of these `kinds` ends the world, for which peers may wait in `what`."""
        try:
            yield
        except kinds as error:
            self.end_world(error, what)
            raise

    def end_world(self, why: BaseException | str, what: str = "") -> None:
        """This rank issues nothing more on any axis of its world, because of an exception in a pass, or in `what`."""
        for axis in list(self._own.axes):
            axis.passes.fail(Failed(errors.said_of(why), isinstance(why, errors.PeerLostError), what or self._what))
        self._comm.peers.tell()

    def fail(self, failed: Failed) -> None:
        """Nothing more is issued on the axis, and the device gives up collectives under way."""
        if self.failed is not None:
            return
        self.failed = failed
        axis, user = self._comm, self._comm.user
        what = f"{failed.what} on axis" if failed.what else "axis"
        kind = errors.PeerLostError if failed.lost else errors.DeadlockDetectedError
        error = kind(f"rank {axis.rank}: {what} {axis.name!r} was left halfway ({failed.why}).")
        for channel in axis.channels:
            channel.failed = channel.failed or error
            # Compiled graphs find a process group by its name: they can't use this one either.
            unregister(channel.group)
        if (group := user.stream_group) is not None:
            if axis.unread is not None:  # no pass has begun since the last one: let the device complete that
                with suppress(errors.LtxError):
                    user.wait_for_device("the end of the last pass")
            group.abort()
            unregister(group.group)

    @property
    def _what(self) -> str:
        return "a backward pass" if self.step is None else f"step {self.step} of the training"
