"""The eager schedule for process groups: starts buckets asynchronously in launch order, waits at the fence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from ltx import comm
from ltx.errors import UnsupportedError
from ltx.gradients.buckets import Bucket
from ltx.gradients.immediate_schedule import ImmediateSchedule
from ltx.gradients.pending import PendingReductions, Reduced
from ltx.gradients.reduction import LeafState, pack, unpack
from ltx.gradients.schedule import Dims, Plan, Schedule

#: What is packed into a bucket: a tensor for each leaf, and the hook's state of each.
Packed = tuple[Sequence[torch.Tensor], Sequence[LeafState]]


@dataclass(frozen=True)
class PassOptions:
    """What a training step asks of one backward pass.

    Attributes:
        name: what errors call the pass.
        sums: whether the sum of each bucket's elements is wanted (:meth:`ProcessSchedule.total`).
        states: the hook's state of each leaf, where the states weren't known yet when the marker was made.
        replace: ``(bucket, gradients)`` -> what is packed in place of the gradients.
        update: ``(bucket, reduced gradients)`` -> a bucket's :attr:`BucketInput.update`.
    """

    name: str = "a backward pass"
    sums: bool = False
    states: Sequence[LeafState] | None = None
    replace: Callable[[Bucket, Sequence[torch.Tensor]], Packed] | None = None
    update: Callable[[Bucket, Sequence[torch.Tensor]], list[torch.Tensor]] | None = None


class ProcessSchedule(Schedule):
    """Asynchronous reductions on the bucket channels of an axis, launched in bucket order (:class:`PendingReductions`).

    With `deferred` there is no fence: a train step waits for the buckets itself, one by one. With `ahead` the next
    forward
    pass runs while they are pending: see :func:`launch_order`.

    If the hook stays within a part of the axis, so does the step summary: other ranks needn't be in this pass.
    """

    threaded = False

    def __init__(self, plan: Plan, deferred: bool = False, ahead: bool = False):
        super().__init__(plan)
        assert plan.axis.comm
        self.fenced = not deferred
        self.comm: comm.AxisComm = plan.axis.comm
        ahead = ahead and self.progresses_alone
        self._order = launch_order(plan.buckets) if ahead else range(len(plan.buckets))
        self.summary: comm.PendingSummary | None = None
        self.options = PassOptions()
        self._passage: comm.BackwardPass | None = None
        part = plan.hook.within(plan.axis)
        self._part = None if part is None or part.comm is None else part.comm
        self._pending = PendingReductions(self.comm)
        self._batches: list[torch.Size] = []
        self._packed: dict[int, tuple[torch.Tensor, Sequence[LeafState]]] = {}

    def configure(self, options: PassOptions) -> None:
        """Use these options for the buckets launched from now on."""
        self.options = options

    @property
    def among(self) -> comm.AxisComm:
        """The communicator of the ranks that are in this pass together."""
        return self.comm if self._part is None or self.again else self._part

    def send_summary(self, total: torch.Tensor, weight: torch.Tensor) -> comm.PendingSummary:
        """Issue the step summary ahead of the buckets."""
        self.comm.wait_for_earlier()
        self.among.recovery.recover()
        channel = self.among.bucket_channel(0)
        self.comm.under_way = self.among.under_way = self.options.name
        if self.plan.agreement is not None:
            channel.advance(self.plan.agreement)
        digest = self.comm.user.digest ^ (channel.digest << 1)
        self.summary = comm.send_summary(channel, total.to(self.comm.device), weight.to(self.comm.device), digest)
        return self.summary

    def begin(self) -> None:
        self._reset()
        if self.summary is None:
            # A deferred pass has sent its summary already, and its train step watches it.
            self._passage = self.among.recovery.enter()
            if self.hook.phases_on(self.plan.axis.size) > 1:
                self._passage.flush = self._pending.flush
            nothing = torch.zeros((), dtype=torch.float64, device=self.comm.device)
            self.send_summary(nothing, nothing)

    def abandon(self, reason: BaseException) -> None:
        """Tell the peers that this pass won't continue, if it has begun."""
        if self.summary is not None:
            self.among.recovery.abort(reason)

    def _reset(self) -> None:
        self._pending, self._batches, self._packed = PendingReductions(self.comm, summed=self.options.sums), [], {}

    def start(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with self._watched():
            self._launch(index, dims, tensors)
            self._pending.poll()
        return tuple(tensors)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """An exception of a hook or of the network aborts this pass, and the peers are told."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, UnsupportedError) and not len(self._pending):
                self._forget()  # a mistake of the program, which all ranks see before the first bucket
            else:
                self.abandon(error)
            raise

    def _launch(self, index: int, dims: Dims, tensors: Sequence[torch.Tensor]) -> None:
        bucket, hook = self.plan.buckets[index], self.hook
        count = len(bucket.members)
        grads = tensors[:count]
        self._check_batchable(dims, tensors[count:])
        states = self.plan.states_of(bucket, tensors[count:])
        if self.options.states is not None:
            states = [self.options.states[member] for member in bucket.members]
        if self.options.replace is not None:
            grads, its_states = self.options.replace(bucket, grads)
            states = list(its_states)
        room = partial(self.comm.buffer_pool.take, self.plan.buckets, index)
        flat = pack(grads, bucket, hook, self.plan.axis.size, states, grads[0].shape[: len(dims)], room)
        self._packed[index] = (flat, states)
        if self._passage is not None and hook.phases_on(self.plan.axis.size) > 1:
            self.among.recovery.flush_others(self._passage)
        # Strictly in the order of launches: one that is ready early waits for those before it.
        while len(self._pending) < len(self._order) and self._order[len(self._pending)] in self._packed:
            place = self._order[len(self._pending)]
            ready, its_states = self._packed.pop(place)
            self._batches.append(ready.shape[:-1])
            inputs = self.plan.bucket_input(self.plan.buckets[place], ready.view(-1), its_states)
            if self.options.update is not None:
                inputs = replace(inputs, update=partial(self.options.update, inputs.bucket))
            self._pending.launch(hook, inputs)

    def wait_buckets(self) -> Iterator[tuple[Bucket, Reduced]]:
        """:meth:`wait_each` with what the hook returns for each bucket."""
        for place, reduced in zip(self._order, self._pending.wait_each(), strict=False):
            yield self.plan.buckets[place], reduced

    def wait_each(self) -> Iterator[tuple[Bucket, list[torch.Tensor], list[torch.Tensor]]]:
        """The buckets in order, each as soon as it is complete: (bucket, reduced gradients, next states)."""
        for batch, (bucket, (flat, states)) in zip(self._batches, self.wait_buckets(), strict=False):
            grads = unpack(flat.view(*batch, bucket.numel), bucket)
            yield bucket, grads, self.plan.flatten_states(bucket, states)

    def total(self, bucket: Bucket) -> float | None:
        """The sum of all gradients of a complete bucket, or NaN; None if it wasn't taken."""
        same = self.hook.wire_dtype(bucket.dtype) == bucket.dtype
        return self._pending.total(self._order.index(bucket.index)) if same else None

    def wait_bucket(self, index: int) -> tuple[list[torch.Tensor], list[LeafState]]:
        """(reduced gradients, next states) of one bucket, each by leaf, once it is complete."""
        bucket, place = self.plan.buckets[index], self._order.index(index)
        flat, states = self._pending.wait(place)
        self._pending.poll()
        grads = unpack(flat.view(*self._batches[place], bucket.numel), bucket)
        names = [self.plan.state_names[member] for member in bucket.members]
        if not any(names):
            return grads, [{} for _ in names]
        return grads, [{name: state[name] for name in held} for held, state in zip(names, states, strict=True)]

    @property
    def has_later_phases(self) -> bool:
        """Whether a bucket may issue more than one collective."""
        return self.hook.phases_on(self.plan.axis.size) > 1

    @property
    def progresses_alone(self) -> bool:
        """Whether buckets progress while no rank waits for them.

        Through shared memory they don't. Nor do those of a hook without collectives of its own, which runs when it is
        waited for.
        """
        by_hand = self.comm.bucket_channel(0).transport is not None and self.plan.buckets[0].device.type == "cpu"
        return not by_hand and self.hook.phases_on(self.plan.axis.size) > 0

    @property
    def intact(self) -> bool:
        """Whether what was launched can still be waited for, after an exception during a wait."""
        return self._pending.intact

    def poll(self) -> None:
        """Continue with later phases of the buckets, as far as that is possible without waiting."""
        self._pending.poll()

    def flush(self) -> None:
        """Wait until all that was launched is complete."""
        self._pending.flush()

    def finish(self) -> comm.StepSummary | None:
        """After the last bucket: return the step summary, checked, and forget this pass, so another may follow."""
        summary = self.summary
        self._forget()
        self.among.recovery.complete()
        return summary.wait() if summary is not None else None

    def _forget(self) -> None:
        self.summary = None
        if self._passage is not None:
            self._passage.done()
        self._reset()

    def drain(self) -> None:
        """Wait for everything and drop the results."""
        for _ in self.wait_each():
            pass
        self.finish()

    def wait(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with self._watched():
            outs = [t for _, grads, states in self.wait_each() for t in (*grads, *states)]
        self.finish()
        return tuple(outs)


def launch_order(buckets: Sequence[Bucket]) -> Sequence[int]:
    """The order of launches when the next forward pass runs while buckets are pending.

    The forward pass first needs the parameters whose gradients come last, so in the order of arrival it would wait for
    the whole backlog. So every third bucket (by bytes) is held back, and these go out after all others, in the order of
    use. The rest keeps the link busy during the backward pass. The buckets that complete last are those that arrived
    first; they belong to the layers that are used last. So the link is idle only from there to the first bucket of the
    next backward pass.
    """
    come = sent = 0
    at_once, back = list[int](), list[int]()
    for place, bucket in enumerate(buckets):
        nbytes = bucket.numel * bucket.dtype.itemsize
        come += nbytes
        if 3 * (sent + nbytes) <= 2 * come:
            sent += nbytes
            at_once.append(place)
        else:
            back.append(place)
    return (*at_once, *reversed(back))


def schedule_for(plan: Plan, deferred: bool = False, ahead: bool = False) -> Schedule:
    """The eager schedule of `plan`; `deferred` and `ahead` are those of :class:`ProcessSchedule`."""
    on_processes = plan.axis.comm is not None
    return ProcessSchedule(plan, deferred, ahead) if on_processes else ImmediateSchedule(plan)
