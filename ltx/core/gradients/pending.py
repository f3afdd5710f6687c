"""What ranks that are processes send: a :class:`ProcessSchedule` makes the programs of a backward pass' buckets, and an
:class:`Exchange` those of others. A :class:`Pending`, a new one for each, owns what is sent.

Each phase of a hook (its first collective, its second, ...) has a channel of its own. On each channel collectives go
out in bucket order, so all ranks issue in the same order, in whatever order gradients come and collectives complete.
On stream-ordered backends, which have one communicator, a program is enqueued as a whole when it is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from ltx.core import comm
from ltx.core.base.errors import LtxError, StepError, StrategyError, UnsupportedError
from ltx.core.base.needs import phases_on, require
from ltx.core.base.private import Tensors, graph_task, no_grad, run_backward
from ltx.core.comm.backends import CommStream
from ltx.core.comm.operations import OPERATIONS
from ltx.core.gradients import reduction
from ltx.core.gradients.buffers import pack, unpack
from ltx.core.gradients.comm_hook import CommHook, reduce_at_once
from ltx.core.gradients.planning import Plan, any_derivative, grads_kept
from ltx.core.gradients.reduction import Bucket, BucketInput, LeafState, Program, Reduced, UpdateShared
from ltx.core.gradients.schedule import Dims, GraphSchedule, ImmediateSchedule, Schedule

_LAYOUT = attrgetter("layout")
Scalar = torch.Tensor | float


class Pending:
    """What one pass sends: its step summary, if it has one, and its buckets in the order of their launches.

    Args:
        axis_comm: buckets go out on its channels. among: the ranks that are in the pass, if not all ranks are.
        channel_of: the channel of a phase. what: the word for a bucket in errors.
        streams: those that reduce buckets, by devices; None where waits block the host. By default the axis is asked.
    """

    def __init__(
        self,
        axis_comm: comm.AxisComm,
        among: comm.AxisComm | None = None,
        channel_of: Callable[[comm.AxisComm, int], comm.Channel] = comm.AxisComm.bucket_channel,
        what: str = "bucket",
        streams: dict[torch.device, CommStream | None] | None = None,
    ):
        self._comm, self.among = axis_comm, among or axis_comm
        self._channel_of, self._what = channel_of, what
        self.summed = False  # whether the transport shall sum results
        self.sent = 0  # the number of collectives that this rank had issued before the pass
        self.launched: list[Program] = []
        self._streams = {} if streams is None else streams  # they enqueue whole programs
        self._run: comm.BackwardPass | None = None  # the id of the autograd run of this pass
        self.summary: comm.IssuedSummary | None = None

    # --- the pass ----------------------------------------------------------------------------------------------------

    def enter(self, later_phases: bool = True) -> None:
        """The engine runs the pass, and may drop it halfway. `later_phases`: a bucket may issue several collectives."""
        self._run = self.among.passes.enter()
        self.sent = self._run.sent
        if later_phases:
            self._run.flush = self.flush

    @property
    def going_on(self) -> bool:
        """Whether autograd's engine still runs the pass, and hasn't dropped it."""
        return self._run is not None and self._run.task == graph_task()

    def flush_others(self) -> None:
        """Wait for the collectives of other passes before this pass issues its own."""
        self.among.passes.flush_others(self._run)

    def abandon(self, reason: BaseException) -> None:
        """Tell the peers that this pass won't continue, if they know that it has begun."""
        if self.summary is not None or (self._run is not None and not self._run.is_done):
            self.among.passes.leave(reason, self.sent)
            self.forget()

    def forget(self) -> None:
        """Note that peers needn't be told anything more about this pass."""
        self.summary = None
        if self._run is not None:
            self._run.done()

    def finish(self) -> comm.StepSummary | None:
        """After the last bucket: the step summary, if there is one."""
        summary, self.launched = self.summary, []
        self.forget()
        return None if summary is None else comm.end_pass(self.among, summary)

    # --- its buckets -------------------------------------------------------------------------------------------------

    def launch(self, ready: dict[int, Program], phases: int, then: Callable[[Reduced], None] | None = None) -> None:
        """Take the programs whose turn it is out of `ready`, which has them by bucket, and start them. `phases`: how
        many collectives each may ask for. `then` gets each result as soon as it is complete, on the stream that makes
        it. A hook without collectives may wait for something else, for which peers in their backward pass mustn't
        wait, so it runs only when the bucket is waited for.
        """
        while (program := ready.pop(place := len(self.launched), None)) is not None:
            program.phases, program.then = phases, then
            self.launched.append(program)
            if not phases:
                continue
            if program.samples:  # ranks have compared the parameters' shapes alone
                said = f"{self._what} {place} of a backward pass", (), f"{list(program.samples)} samples"
                agreed = self.among.negotiate(self.among.user, said, partial(comm.Signature, *said))
                comm.compare_unusual(self.among, self.among.first_phase, agreed, self.among.user)
                self.among.first_phase.advance(agreed)
            device = program.reads[0].device
            stream = self._streams[device] if device in self._streams else self._comm.stream_of(device)
            if stream is None:
                self._advance(place)
                continue
            with stream.behind_current():
                reads = program.reads
                self._advance(place, whole=True)
            program.fence, program.reads = stream.fence(), reads

    def reduce(self, hook: CommHook, inputs: BucketInput, then: Callable[[Reduced], None] | None = None) -> None:
        """Start the reduction of the next bucket by `hook`, and continue the buckets before it."""
        reads = [inputs.flat, *chain.from_iterable(map(dict.values, inputs.states))]
        program = Program(hook.reduce(inputs), reads, hook)
        self.launch({len(self.launched): program}, phases_on(hook, self._comm.size), then)
        self.poll()

    def _advance(self, place: int, whole: bool = False) -> None:
        """Wait for a reduction's collective, and issue its next one; if `whole`, all, as waits don't block."""
        program = self.launched[place]
        result = program.work.wait() if program.work is not None else None
        # Inference tensors have no version counter.
        arrived, version = result, None if result is None or result.is_inference() else result._version
        while isinstance(request := reduction.advance(program.requests, result), reduction.Request):
            if isinstance(request, reduction.CollectiveRequest):
                if program.phase == program.phases:
                    raise StrategyError(
                        f"rank {self._comm.rank}: {program.hook!r} asks for more than {program.phase} collectives in "
                        f"{self._what} {place}. Say how many it may ask for: phases: ClassVar[int] = ..."
                    )
                axis_comm = self._comm
                if request.axis is not None:
                    if request.axis.comm is None:  # this rank alone
                        result = reduction.answer_at_once(request, request.axis)
                        continue
                    axis_comm = request.axis.comm
                if request.operation != "psum":
                    request.check(axis_comm.size)
                channel = self._channel_of(axis_comm, program.phase)
                if not request.buffer.numel():  # nothing to send; every rank has the same shapes
                    program.phase += 1
                    result = OPERATIONS[request.operation].new_result(request.buffer, axis_comm.size)
                    continue
                what, summary = f"{self._what} {place}", self.summary
                note = () if summary is None or not summary.numbers else summary.carried_by(channel)
                given = request.operation, request.buffer, what, request.arguments, self.summed
                program.work = channel.issue(*given, note=note, eager=summary is not None)
                if note and summary is not None:
                    summary.work = program.work
            else:
                program.work = request
            program.phase += 1
            if not whole:
                return
            result = program.work.wait()
        unchanged = version is not None and request[0] is arrived and version == arrived._version
        if program.work is not None and unchanged:
            program.total = program.work.total  # the transport summed exactly the hook's result
        program.completed, program.work, program.reads = request, None, ()
        if program.then is not None:
            program.then(request)

    def poll(self) -> None:
        """Continue reductions whose collective is complete, as long as each phase stays in bucket order."""
        for place, pending in enumerate(self.launched):
            before = self.launched[:place]
            while pending.work is not None and pending.work.done:
                if not all(earlier.completed is not None or earlier.phase > pending.phase for earlier in before):
                    break
                self._advance(place)

    @property
    def done(self) -> bool:
        """Whether all buckets are complete, or would be without waiting."""
        self.poll()
        return all(pending.completed is not None for pending in self.launched)

    def wait_each(self) -> Iterator[Reduced]:
        """The results of all buckets in order, each as soon as it is complete."""
        # Rounds: each unfinished reduction continues by one collective, in bucket order, which keeps every phase's
        # channel in order; results that are complete are yielded in order at once.
        given = 0
        while given < (count := len(self.launched)):
            for place in range(given, count):
                if self.launched[place].completed is None:
                    self._advance(place)
                while given < count and (reduced := self.launched[given].completed) is not None:
                    program = self.launched[given]
                    if program.fence is not None:  # the current stream waits for what is complete or enqueued
                        flat, states = reduced
                        program.fence([flat, *chain.from_iterable(map(dict.values, states))], program.reads)
                        program.fence, program.reads = None, ()
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
    """

    def __init__(self, plan: Plan, tensors: Tensors, states: Sequence[LeafState] = (), background: bool = False):
        self._plan, self._count = plan, len(tensors)
        flat_states = [tuple(state.values()) for state in states] or [()] * len(tensors)
        given = [(bucket, plan.tensors_of(bucket, tensors, flat_states)) for bucket in plan.buckets]
        self._pending: Pending | None = None
        self._completed: list[Reduced] = []
        self._failed: LtxError | None = None
        self._kind = "background" if background else "exchange"
        if background:
            require("background, hook", plan.hook, "", plan.axis.size)
        if plan.axis.comm is not None:
            if any_derivative(tensors):
                raise UnsupportedError(
                    f"what ranks exchange beside their gradients ({plan.hook!r}) has no derivative on real ranks, and "
                    "a step that does so is differentiated. Use a strategy that exchanges gradients alone, such as "
                    "ltx.DDPStrategy(); or detach the state and the batch, or call the step under torch.no_grad()."
                )
            try:
                self._launch(plan.axis.comm, given, background)
            except LtxError as error:
                if not background:
                    raise
                self._failed = error  # wait() raises it, once the caller has finished other work
        else:
            for bucket, its in given:
                inputs = plan.packed(hook := plan.hook_of(bucket), bucket, its)
                self._completed.append(reduce_at_once(hook, plan.axis, inputs, self._kind))

    def _launch(
        self, axis_comm: comm.AxisComm, given: list[tuple[Bucket, list[torch.Tensor]]], background: bool
    ) -> None:
        plan, name = self._plan, "an exchange of the strategy"
        if background:
            axis_comm.under_way = name
            assert plan.agreement is not None
            axis_comm.background.advance(plan.agreement)
            on_host = dict.fromkeys(plan.streams)
            self._pending = Pending(axis_comm, None, lambda on, phase: on.background, self._kind, on_host)
        else:
            self._pending = Pending(axis_comm, what=self._kind)
            self._pending.sent = axis_comm.peers.own.sent
            axis_comm.first_phase.refuse_recording(name)
            self._pending.summary = comm.begin_pass(axis_comm, axis_comm, name, plan.agreement)
        for bucket, its in given:
            comm.note_packed(self._kind, hook := plan.hook_of(bucket), bucket)
            self._pending.reduce(hook, plan.packed(hook, bucket, its, pack))

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
        results, states = dict[int, torch.Tensor](), dict[int, LeafState]()
        for bucket, (flat, advanced) in self.wait_buckets():
            results.update(zip(bucket.members, unpack(flat, bucket), strict=True))
            states.update(zip(bucket.members, map(dict, advanced), strict=bool(advanced)))
        places = range(self._count)
        return [results[place] for place in places], [states.get(place, {}) for place in places]

    def wait_buckets(self) -> list[tuple[Bucket, Reduced]]:
        """:meth:`wait`, bucket by bucket: (bucket, (the hook's result, the next states))."""
        if self._failed is not None:
            raise self._failed
        if self._pending is not None:
            try:
                self._completed = list(self._pending.wait_each())
                self._pending.finish()
            except BaseException as error:
                self._pending.abandon(error)  # not in the background, where a wait may be repeated
                raise
            self._pending = None
        return list(zip(self._plan.buckets, self._completed, strict=True))


class ProcessSchedule(Schedule):
    """Asynchronous reductions on the bucket channels of an axis, launched in bucket order (:class:`Pending`). With
    `deferred` there is no fence: the caller of the step begins the pass and waits for its buckets one by one.

    On a stream-ordered backend buckets share a communicator with the user's collectives, which ranks' backward passes
    may come to before or after a bucket. So if the graph has such, buckets wait until the pass is over.
    """

    threaded = False

    def __init__(self, plan: Plan, deferred: bool = False):
        self.plan, self.fenced = plan, not deferred
        self.comm: comm.AxisComm = plan.axis.comm
        self.late: Any = None  # gives ``[*gradients, *states]`` of a bucket to which a deferred pass hasn't come
        #: Makes the program of a bucket whose gradients are ready; :meth:`program` if None.
        self.program_of: reduction.ProgramOf | None = None
        ordered = plan.streams.values()
        self._shared, self._polls = any(ordered), not all(ordered)
        self._in_graphs, self._held = _issued_in_graphs() if self._shared else 0, False
        self._reset()
        self.pending = Pending(self.comm, self.among, streams=plan.streams)

    @property
    def among(self) -> comm.AxisComm:
        """The communicator of the ranks that are in this pass together."""
        part = None if self.again else self.plan.part
        return self.comm if part is None or part.comm is None else part.comm

    def send_summary(
        self, name: str = "a backward pass", total: Scalar = 0.0, weight: Scalar = 0.0, sums: bool = False
    ) -> None:
        """Begin the step summary, ahead of the buckets, as `begin_pass` does. `sums`: :meth:`total` will be called."""
        pending, agreement, unreduced = self.pending, self.plan.agreement, self.unreduced()
        pending.summed = sums
        if not self.fenced:
            pending.among, pending.sent = self.among, self.comm.peers.own.sent
        pending.summary = comm.begin_pass(self.comm, pending.among, name, agreement, total, weight, unreduced)

    def begin(self) -> None:
        if self.fenced:  # the caller, which waits for the buckets, has begun the pass and watches it
            self.comm.first_phase.refuse_recording("a backward pass")
            self._reset()
            self.pending = Pending(self.comm, self.among, streams=self.plan.streams)
            self.pending.enter(self._phases > 1)
            self.send_summary()
        self._held = self._shared and _issued_in_graphs() != self._in_graphs

    def abandon(self, reason: BaseException) -> None:
        """Tell the peers that this pass won't continue, if it has begun."""
        self.program_of = None
        self.pending.abandon(reason)

    def _reset(self) -> None:
        self._passes_inside = False  # Functions will run backward passes inside of this one
        #: Gradients of buckets that aren't complete yet, and the buckets to which the pass itself has come.
        self.early: dict[int, list[torch.Tensor | None]] = {}
        self._reached: set[int] = set()
        self._batches: dict[int, torch.Size] = {}
        self._ready: dict[int, Program] = {}

    def start(self, index: int, dims: Dims, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """A bucket's gradients are ready: launch what can be. In a deferred pass they may be None, or come twice."""
        bucket = self.plan.buckets[index]
        grads, states = tensors[: len(bucket.members)], tensors[len(bucket.members) :]
        try:
            early = index in self.early or index in self._batches or self._passes_inside
            inside = not self.fenced and (early or graph_task() != self.task)
            if inside or type(None) in map(type, grads):
                if not (grads := self._joined(index, grads)):  # type: ignore[assignment]
                    return ()
                tensors = [*grads, *states]
            if dims:
                self._check_batchable(dims, states)
            self._batches[index] = tensors[0].shape[: len(dims)]
            program = self.program_of or self.program
            self._ready[index] = program(bucket, grads, self.plan.states_of(bucket, states))
            if (phases := self._phases) > 1:
                self.pending.flush_others()
            if not self._held:
                self.pending.launch(self._ready, phases)
            # On streams programs are launched as a whole, and after the last bucket nothing comes before the wait.
            if self._polls and len(self.pending.launched) < len(self.plan.buckets):
                self.pending.poll()
        except BaseException as error:
            self._failed(error)
            raise
        return tuple(tensors)

    def _failed(self, error: BaseException) -> None:
        """An exception of a hook or of the network aborts this pass, and the peers are told."""
        if isinstance(error, UnsupportedError) and not self.pending.launched:
            self.pending.forget()  # the user's mistake, which all ranks find before the first bucket
        else:
            self.abandon(error)

    def backward(self, losses: Tensors, inputs: Tensors, cotangents: Tensors | None, again: bool, own: Tensors) -> None:
        """Run a deferred pass from `losses`; empty if no parameter is reached. `again`: it may run once more.
        `own`: leaves beside the parameters, by which the pass comes to Functions that run passes inside of it.
        """
        self._passes_inside = bool(own)
        self.begin()
        for loss in losses:
            if loss.grad_fn is not None:
                loss.grad_fn.register_prehook(self._entered)
        if losses:
            with comm.span("backward"), grads_kept(own) if own else comm.NOTHING:
                run_backward(losses, cotangents, again, [*inputs, *own])
        self.launch(again)

    def _entered(self, _: object) -> None:
        self.task = graph_task()

    def _joined(self, index: int, grads: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """All gradients of a bucket that have come so far; () if it has to wait for more: until this pass has come to
        it and no parameter lacks one, or, if there are reversible layers, which bring gradients by backward passes of
        their own (``y.backward(dy)`` in a Function), until this pass is over.
        """
        if graph_task() == self.task:
            self._reached.add(index)
        if index in self._batches:
            members = zip(self.plan.buckets[index].members, grads, strict=True)
            path = next((self.plan.path_of(member) for member, grad in members if grad is not None), index)
            raise StepError(
                f"rank {self.comm.rank}: a backward pass inside of the step's (such as y.backward(dy) in a Function) "
                f"brought a gradient of leaf {path!r} when an earlier one had been sent: it is used in several places. "
                "Give the Function its parameters as arguments, and return torch.autograd.grad(y, (x, *params), dy)."
            )
        if (early := self.early.pop(index, None)) is not None:
            grads = [a if b is None else b if a is None else a + b for a, b in zip(early, grads, strict=True)]
        if index in self._reached and not (self._passes_inside or any(grad is None for grad in grads)):
            return grads
        self.early[index] = list(grads)
        return ()

    def launch(self, again: bool = False) -> None:
        """The pass is over: start the buckets that it hasn't come to, as peers wait for them, and launch all."""
        self.task, self._passes_inside = graph_task(), False
        for bucket in self.plan.buckets if len(self._batches) < len(self.plan.buckets) else ():
            if bucket.index not in self._batches:
                with no_grad():
                    self.start(bucket.index, (), self.late(bucket))
        self.late = self.late if again else None
        if self._ready:
            self.pending.launch(self._ready, self._phases)
        self.program_of = None  # it holds the step

    def program(
        self, bucket: Bucket, tensors: Tensors, states: Sequence[LeafState], update: UpdateShared | None = None
    ) -> Program:
        """The program that reduces `tensors`, which are packed now; `update` as in :class:`BucketInput`."""
        plan, batch = self.plan, self._batches[bucket.index]
        hook = self.hook_of(bucket) if plan.hooks or self.again else plan.hook
        room = None  # on devices torch's allocator keeps memory
        if bucket.device.type == "cpu":
            room = partial(self.comm.buffer_pool.take, plan.buckets, bucket.index, hook.exact)
        if {*map(_LAYOUT, tensors)} != {torch.strided}:
            plan.refuse_sparse(bucket, tensors)
        if comm.recordings:
            comm.note_packed("bucket", hook, bucket)
        flat = pack(tensors, bucket, hook, plan.axis.size, states, batch, room)
        inputs = plan.bucket_input(bucket, flat.view(-1) if batch else flat, states, update)
        reads = [inputs.flat, *chain.from_iterable(map(dict.values, states))]
        return Program(hook.reduce(inputs), reads, hook, samples=batch)

    def wait_buckets(self) -> Iterator[tuple[Bucket, Reduced]]:
        """The buckets in order, each as soon as it is complete, with what its program returned."""
        return zip(self.plan.buckets, self.pending.wait_each(), strict=False)

    def unpack(self, bucket: Bucket, reduced: Reduced) -> list[torch.Tensor]:
        return unpack(reduced[0].view(*self._batches[bucket.index], bucket.numel), bucket)

    def total(self, bucket: Bucket) -> float | None:
        """The sum of all gradients of a complete bucket, or NaN; None if no sum was taken."""
        same = self.hook_of(bucket).packing(bucket.dtype, self.plan.axis.size).dtype == bucket.dtype
        return self.pending.launched[bucket.index].total if same else None

    @property
    def _phases(self) -> int:
        """How many collectives each bucket of this pass may issue."""
        return phases_on(self.hook_of(), self.plan.axis.size) if self.again else self.plan.phases

    def wait(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        try:
            if len(self._batches) < len(self.plan.buckets):
                raise inner_pass("data_parallel")  # it has come to the fence first
            self.launch()
            outs = [
                t
                for bucket, reduced in self.wait_buckets()
                for t in (*self.unpack(bucket, reduced), *self.plan.flatten_states(bucket, reduced[1]))
            ]
        except BaseException as error:
            self._failed(error)
            raise
        self.finish()
        return tuple(outs)

    def finish(self) -> comm.StepSummary | None:
        """After the last bucket: finish the step summary, and release the reduced buckets."""
        self._reset()
        return self.pending.finish()


def inner_pass(who: str) -> UnsupportedError:
    """A backward pass inside of the step's own came to parameters that can't take its gradients."""
    return UnsupportedError(
        f"{who}: a Function of the step runs a backward pass of its own (y.backward(dy) in a reversible layer), whose "
        "gradients have no derivative, and the step is differentiated from outside. Detach the state and the batch, or "
        "call the step under torch.no_grad(); or have ltx.grad or ltx.train_step differentiate it."
    )


def _issued_in_graphs() -> int:
    return sum(axis_comm.issued_in_graphs for axis_comm in comm.communicators())


def schedule_for(plan: Plan, deferred: bool = False, compiled: bool = False) -> Schedule:
    """The schedule of `plan`, eager or in a compiled graph; `deferred` is that of :class:`ProcessSchedule`."""
    if not plan.axis.ranks.overlaps:
        return ImmediateSchedule(plan)
    return GraphSchedule(plan) if compiled else ProcessSchedule(plan, deferred)
