"""A pending pass: its step summary, and several buckets at once on the bucket channels of an axis.

Each phase of a hook (its first collective, its second, ...) has a channel of its own. On each channel collectives go
out in bucket order, so all ranks issue in the same order, in whatever order gradients come and collectives complete.

On stream-ordered backends an axis has one communicator, and the host needn't wait between two phases: a program is
enqueued as a whole when it is launched, on the communication stream. So collectives go out bucket by bucket, phase by
phase.

Train steps, :func:`ltx.grad`, ``loss.backward()``, :func:`ltx.sync_gradients` and :func:`ltx.hooks.to_torch` have a
:class:`Pending` for each pass. An :class:`Exchange` sends buckets outside of a backward pass. A strategy writes what it
does with parameters as a communication hook too, so the same lines run between processes, on simulated ranks, and on
the meta device, where :func:`ltx.profile.explain` counts what they send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ltx.core import comm
from ltx.core.base.errors import LtxError, StrategyError, UnsupportedError
from ltx.core.base.needs import require
from ltx.core.base.private import graph_task
from ltx.core.comm.backends import StreamFence
from ltx.core.gradients.comm_hook import CommHook, program_of, reduce_at_once
from ltx.core.gradients.packing import pack, pack_pure, unpack
from ltx.core.gradients.planning import Plan, any_derivative
from ltx.core.gradients.reduction import (
    Bucket,
    BucketInput,
    CollectiveRequest,
    LeafState,
    Program,
    Reduced,
    advance,
    collective_alone,
)


@dataclass
class _Launched:
    """A bucket under way: its program, the collective that it waits for, and `hook`, which limits its collectives."""

    hook: CommHook
    program: Program | None
    work: comm.Work | None = None
    phase: int = 0
    completed: Reduced | None = None
    then: Callable[[Reduced], None] | None = None
    total: float | None = None  # the sum of all elements of the result, if the transport knows it
    fence: StreamFence | None = None  # None once the waiting stream is behind the result

    def put_behind(self) -> None:
        """Let the current stream wait for the result, which is complete or enqueued."""
        if self.fence is None or self.completed is None:
            return
        flat, states = self.completed
        used = () if self.program is None else self.program.reads
        self.fence([flat, *(tensor for state in states for tensor in state.values())], used)
        self.fence, self.program = None, None


class Pending:
    """What one pass sends: its step summary, if it has one, and its buckets in the order of their launches.

    Args:
        axis_comm: buckets go out on its channels.
        among: the ranks that are in the pass, if not all ranks are.
        channel_of: the channel of a phase.
        what: the word for a bucket in errors.
    """

    def __init__(
        self,
        axis_comm: comm.AxisComm,
        among: comm.AxisComm | None = None,
        channel_of: Callable[[comm.AxisComm, int], comm.Channel] = comm.AxisComm.bucket_channel,
        what: str = "bucket",
    ):
        self._comm, self._among = axis_comm, among or axis_comm
        self._channel_of, self._what = channel_of, what
        self.summed = False  # whether :meth:`total` will be called
        self._launched: list[_Launched] = []
        self._run: comm.BackwardPass | None = None  # the id of the autograd run of this pass
        self.summary: comm.IssuedSummary | None = None

    def __len__(self) -> int:
        return len(self._launched)

    # --- the pass ----------------------------------------------------------------------------------------------------

    def enter(self, later_phases: bool = True) -> None:
        """The engine runs the pass, and may drop it halfway. `later_phases`: a bucket may issue several collectives."""
        self._run = self._among.recovery.enter()
        if later_phases:
            self._run.flush = self.flush

    @property
    def going_on(self) -> bool:
        """Whether autograd's engine still runs the pass, and hasn't dropped it."""
        return self._run is not None and self._run.task == graph_task()

    def flush_others(self) -> None:
        """Wait for the collectives of other passes before this pass issues its own."""
        if self._run is not None:
            self._among.recovery.flush_others(self._run)

    def send_summary(
        self,
        name: str,
        agreement: comm.Agreement | None,
        total: torch.Tensor | float = 0.0,
        weight: torch.Tensor | float = 0.0,
        unreduced: str = "",
    ) -> None:
        """Issue the step summary, ahead of the buckets; arguments as in :func:`ltx.core.comm.begin_pass`."""
        self.summary = comm.begin_pass(self._comm, self._among, name, agreement, total, weight, unreduced)

    def abandon(self, reason: BaseException) -> None:
        """Tell the peers that this pass won't continue, if they know that it has begun."""
        if self.summary is not None or (self._run is not None and not self._run.is_done):
            self._among.recovery.abort(reason)

    def forget(self) -> None:
        """Note that peers needn't be told anything more about this pass."""
        self.summary = None
        if self._run is not None:
            self._run.done()

    def finish(self, midway: bool = False) -> comm.StepSummary | None:
        """After the last bucket: the step summary, if there is one. `midway`: another pass of the same step follows."""
        summary = self.summary
        self.forget()
        if not midway:
            self._among.recovery.complete()
        return None if summary is None else comm.end_pass(self._among, summary)

    # --- its buckets -------------------------------------------------------------------------------------------------

    def launch(
        self, programs: Iterable[Program], hook: CommHook, then: Callable[[Reduced], None] | None = None
    ) -> None:
        """Start `programs`, the programs of `hook` for the next buckets in order.

        `then` gets each result as soon as it is complete, on the stream that makes it.

        A hook without collectives may wait for something else, for which peers in their backward pass mustn't wait. So
        such a hook runs only when the bucket is waited for.
        """
        for program in programs:
            pending = _Launched(hook, program, then=then)
            self._launched.append(pending)
            if hook.phases_on(self._comm.size) == 0:
                continue
            device = program.reads[0].device
            stream = self._comm.stream_of(device)
            if stream is None or not self._channel_of(self._comm, 0).orders_streams(device):
                self._advance(len(self) - 1)
                continue
            with stream.behind_current():
                while pending.completed is None:
                    self._advance(len(self) - 1)
            pending.fence, pending.program = stream.fence(), program

    def reduce(self, hook: CommHook, inputs: BucketInput, then: Callable[[Reduced], None] | None = None) -> None:
        """Start the reduction of the next bucket by `hook`, and continue the buckets before it."""
        self.launch([program_of(hook, inputs)], hook, then)
        self.poll()

    def _advance(self, place: int) -> None:
        """Wait for a reduction's collective, run the reduction up to its next collective, and issue this one."""
        pending = self._launched[place]
        result = pending.work.wait() if pending.work is not None else None
        # Inference tensors have no version counter.
        arrived, version = result, None if result is None or result.is_inference() else result._version
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
            request.check_rows(axis_comm.size)
            channel = self._channel_of(axis_comm, pending.phase)
            pending.phase += 1
            if request.buffer.numel():
                what = f"{self._what} {place}"
                pending.work = channel.issue(request.operation, request.buffer, what, request.arguments, self.summed)
                return
            result = request.buffer  # nothing to send; every rank has the same shapes
        unchanged = version is not None and request[0] is arrived and version == arrived._version
        if pending.work is not None and unchanged:
            pending.total = pending.work.total  # the transport summed exactly the hook's result
        pending.completed, pending.work, pending.program = request, None, None
        if pending.then is not None:
            pending.then(request)

    def poll(self) -> None:
        """Continue reductions whose collective is complete, as long as each phase stays in bucket order."""
        for place, pending in enumerate(self._launched):
            while pending.work is not None and pending.work.done and self._may_issue(place, pending.phase):
                self._advance(place)

    def _may_issue(self, place: int, phase: int) -> bool:
        return all(earlier.completed is not None or earlier.phase > phase for earlier in self._launched[:place])

    @property
    def done(self) -> bool:
        """Whether all buckets are complete, or would be without waiting."""
        self.poll()
        return all(pending.completed is not None for pending in self._launched)

    def total(self, place: int) -> float | None:
        """The sum of all elements of a complete bucket, or NaN; None if no sum was taken."""
        return self._launched[place].total

    def wait_each(self) -> Iterator[Reduced]:
        """The results of all buckets in order, each as soon as it is complete."""
        # Rounds: each unfinished reduction continues by one collective, in bucket order, which keeps every phase's
        # channel in order; results that are complete are yielded in order at once.
        given = 0
        while given < len(self):
            for place in range(given, len(self)):
                if self._launched[place].completed is None:
                    self._advance(place)
                while given < len(self) and (reduced := self._launched[given].completed) is not None:
                    self._launched[given].put_behind()
                    yield reduced
                    given += 1

    def flush(self) -> None:
        """Wait for all buckets launched so far. More may be launched afterwards."""
        for _ in self.wait_each():
            pass


class Exchange:
    """The pending buckets of a plan.

    Args:
        plan: what is exchanged; all ranks have compared it.
        tensors: one for each leaf of the plan. The tensors are packed at once, and not read again.
        states: the hook's state of each leaf; empty for a hook without states.
        background: use the background channel, where peers may come much later. The buckets' channels go through shared
            memory between ranks of one machine, but progress only while ranks wait.
        midway: another exchange of the same step follows, so a rank that has completed this one hasn't completed the
            step.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        states: Sequence[LeafState] = (),
        background: bool = False,
        midway: bool = False,
    ):
        self._midway = midway
        self._plan = plan
        self._pending: Pending | None = None
        self._completed: list[Reduced] = []
        self._failed: LtxError | None = None
        self._states = list(states) or [{} for _ in tensors]
        if background:
            require("background, hook", plan.hook, "", plan.axis.size)
        if plan.axis.comm is not None:
            if any_derivative(tensors):
                raise UnsupportedError(
                    f"what ranks exchange beside their gradients ({plan.hook!r}) has no derivative on real ranks, and "
                    "a step that does so is differentiated. Use a strategy that exchanges gradients alone, such as "
                    "ltx.DDPStrategy(); or, if no derivative is wanted, detach the state and the batch, or call the "
                    "step under torch.no_grad()."
                )
            try:
                self._launch(plan.axis.comm, tensors, background)
            except LtxError as error:
                if not background:
                    raise
                self._failed = error  # wait() raises it, once the caller has finished other work
        else:
            if plan.agreement is not None:
                plan.axis.ranks.announce(plan.agreement)
            self._completed = [self.at_once(place, tensors) for place in range(len(plan.buckets))]

    def _of(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[LeafState]]:
        return [tensors[m] for m in bucket.members], [self._states[m] for m in bucket.members]

    def at_once(self, place: int, tensors: Sequence[torch.Tensor]) -> Reduced:
        """The result for bucket `place` of `tensors`; :mod:`ltx.estimate` replaces it to count bytes."""
        plan, bucket = self._plan, self._plan.buckets[place]
        mine, own = self._of(bucket, tensors)
        hook = plan.hook_of(bucket)
        flat = pack_pure(mine, bucket, hook, plan.axis.size, own)
        return reduce_at_once(hook, plan.axis, plan.bucket_input(bucket, flat, own))

    def _launch(self, axis_comm: comm.AxisComm, tensors: Sequence[torch.Tensor], background: bool) -> None:
        plan, name = self._plan, "an exchange of the strategy"
        if background:
            axis_comm.recovery.recover()
            axis_comm.under_way = name
            assert plan.agreement is not None
            axis_comm.background.advance(plan.agreement)
            self._pending = Pending(axis_comm, channel_of=lambda on, phase: on.background, what="background")
        else:
            self._pending = Pending(axis_comm, what="exchange")
            self._pending.send_summary(name, plan.agreement)
        for bucket in plan.buckets:
            mine, states = self._of(bucket, tensors)
            hook = plan.hook_of(bucket)
            flat = pack(mine, bucket, hook, plan.axis.size, states)
            self._pending.reduce(hook, plan.bucket_input(bucket, flat, states))

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._failed is not None or self._pending is None or self._pending.done

    def wait(self) -> tuple[list[torch.Tensor], list[LeafState]]:
        """(the result for each leaf, its next state), once all buckets are complete; new tensors, views of buckets.

        Raises:
            PeerLostError, DeadlockDetectedError, CollectiveTimeoutError: the exchange can't complete.
                RankMismatchError: ranks have issued different collectives before the exchange.
        """
        results = [torch.empty(0)] * len(self._states)
        states: list[LeafState] = [{} for _ in self._states]
        for bucket, (flat, advanced) in self.wait_buckets():
            for member, tensor in zip(bucket.members, unpack(flat, bucket), strict=True):
                results[member] = tensor
            if advanced:
                for member, state in zip(bucket.members, advanced, strict=True):
                    states[member] = dict(state)
        return results, states

    def wait_buckets(self) -> list[tuple[Bucket, Reduced]]:
        """:meth:`wait`, bucket by bucket: (bucket, (the hook's result, the next states))."""
        if self._failed is not None:
            raise self._failed
        if self._pending is not None:
            try:
                self._completed = list(self._pending.wait_each())
                self._pending.finish(self._midway)
            except BaseException as error:
                self._pending.abandon(error)  # not in the background, where a wait may be repeated
                raise
            self._pending = None
        return list(zip(self._plan.buckets, self._completed, strict=True))
