"""Pending reductions: several buckets at once on the bucket channels of an axis.

Each phase of a hook (its first collective, its second, ...) has a channel of its own. On each channel collectives go
out in bucket order, so all ranks issue alike, whatever the order in which gradients arrive and collectives complete.

On stream-ordered backends an axis has one communicator, and the host needn't wait between two phases: a program is
enqueued as a whole when it is launched, on the communication stream. So the order of issues is that of the buckets, and
within a bucket that of its phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ltx import comm
from ltx.comm.backends import Fence
from ltx.errors import StrategyError
from ltx.gradients.comm_hook import CommHook
from ltx.gradients.reduction import CollectiveRequest, Program, Reduced, advance, collective_alone


@dataclass
class _PendingReduction:
    """A pending bucket: its program, and the collective that it waits for. `hook` says how many it may issue."""

    hook: CommHook
    program: Program | None
    work: comm.Work | None = None
    phase: int = 0
    completed: Reduced | None = None
    halfway: bool = False  # between two collectives
    total: float | None = None  # of all elements of the result, if the transport knows it
    fence: Fence | None = None  # until the stream that waits is behind the result

    @property
    def may_go_on(self) -> bool:
        return self.work is not None and self.work.done


class PendingReductions:
    """The reductions of one backward pass, in the order of their launches. `summed`: their sums are wanted."""

    def __init__(
        self,
        axis_comm: comm.AxisComm,
        channel_of: Callable[[comm.AxisComm, int], comm.Channel] = comm.AxisComm.bucket_channel,
        what: str = "bucket",
        summed: bool = False,
    ):
        self._comm = axis_comm
        self._channel_of = channel_of
        self._what = what
        self._summed = summed
        self._pending: list[_PendingReduction] = []

    def __len__(self) -> int:
        return len(self._pending)

    def launch(self, program: Program, hook: CommHook) -> None:
        """Start the program of the next bucket in order, which is that of `hook`.

        A hook without collectives of its own may wait for something else. Peers that are still in their backward pass
        can't be made to wait for that, so such a hook runs when the bucket is waited for.
        """
        pending = _PendingReduction(hook, program)
        self._pending.append(pending)
        if hook.phases_on(self._comm.size) == 0:
            return
        device = program.reads[0].device
        stream = self._comm.stream_of(device)
        if stream is None or not self._channel_of(self._comm, 0).orders_streams(device):
            self._advance(len(self) - 1)
            return
        with stream.behind_current():
            while pending.completed is None:
                self._advance(len(self) - 1)
        pending.fence, pending.program = stream.fence(), program

    def _advance(self, place: int) -> None:
        """Wait for a reduction's collective, run it up to its next one, and issue that."""
        pending = self._pending[place]
        result = pending.work.wait() if pending.work is not None else None
        pending.halfway = True
        self._run_on(pending, place, result)
        pending.halfway = False

    def _run_on(self, pending: _PendingReduction, place: int, result: torch.Tensor | None) -> None:
        arrived, version = result, -1 if result is None else result._version
        assert pending.program is not None
        while isinstance(request := advance(pending.program.requests, result), CollectiveRequest):
            if pending.phase == pending.hook.phases_on(self._comm.size):
                raise StrategyError(
                    f"rank {self._comm.rank}: {pending.hook!r} asks for more than {pending.phase} collectives in "
                    f"{self._what} {place}. Say how many it may ask for: phases: ClassVar[int] = ..."
                )
            axis_comm = self._comm
            if request.axis is not None:
                if request.axis.comm is None:
                    result = collective_alone(request)
                    continue
                axis_comm = request.axis.comm
            channel = self._channel_of(axis_comm, pending.phase)
            pending.phase += 1
            if request.buffer.numel():
                what = f"{self._what} {place}"
                pending.work = channel.issue(request.operation, request.buffer, what, request.arguments, self._summed)
                return
            result = request.buffer  # nothing to send; every rank has the same shapes
        if pending.work is not None and request[0] is arrived and version == arrived._version:
            pending.total = pending.work.total  # the transport's sum is that of the hook's result
        pending.completed, pending.work, pending.program = request, None, None

    def poll(self) -> None:
        """Continue reductions whose collective is complete, as long as each phase stays in bucket order."""
        for place, pending in enumerate(self._pending):
            while pending.may_go_on and self._may_issue(place, pending.phase):
                self._advance(place)

    def _may_issue(self, place: int, phase: int) -> bool:
        return all(self._is_past(earlier, phase) for earlier in range(place))

    @property
    def done(self) -> bool:
        """Whether all are complete, or would be at once."""
        self.poll()
        return all(pending.completed is not None for pending in self._pending)

    def completed(self, place: int) -> Reduced | None:
        """The result of a bucket, if it is complete, for the current stream."""
        pending = self._pending[place]
        if pending.fence is not None and pending.completed is not None:
            flat, states = pending.completed
            used = () if pending.program is None else pending.program.reads
            pending.fence([flat, *(tensor for state in states for tensor in state.values())], used)
            pending.fence, pending.program = None, None
        return pending.completed

    def total(self, place: int) -> float | None:
        """The sum of all elements of a complete bucket, or NaN; None if it wasn't taken."""
        return self._pending[place].total

    @property
    def intact(self) -> bool:
        """Whether no reduction was interrupted between two collectives by an exception."""
        return not any(pending.halfway for pending in self._pending)

    def wait(self, place: int) -> Reduced:
        """The result of one bucket, once it is complete. Earlier buckets continue as far as the order requires."""
        pending = self._pending[place]
        while pending.completed is None:
            if pending.phase < pending.hook.phases_on(self._comm.size):  # it may issue another collective
                for earlier in range(place):
                    while not self._is_past(earlier, pending.phase):
                        self._advance(earlier)
            self._advance(place)
        reduced = self.completed(place)
        assert reduced is not None
        return reduced

    def _is_past(self, place: int, phase: int) -> bool:
        pending = self._pending[place]
        return pending.completed is not None or pending.phase > phase

    def wait_each(self) -> Iterator[Reduced]:
        """The results of all buckets in order, each as soon as it is complete."""
        # Rounds: each unfinished reduction continues by one collective, in bucket order, which keeps every phase's
        # channel in order; results that are complete are yielded in order at once.
        given = 0
        while given < len(self):
            for place in range(given, len(self)):
                if self._pending[place].completed is None:
                    self._advance(place)
                while given < len(self) and (reduced := self.completed(given)) is not None:
                    yield reduced
                    given += 1

    def flush(self) -> None:
        """Wait for what was launched so far. More may be launched afterwards."""
        for _ in self.wait_each():
            pass
