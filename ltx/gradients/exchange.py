"""Exchanges: a hook's reduction of tensors outside of a backward pass, at once or in the background.

A strategy writes what it does with parameters as a communication hook too, so the same lines run between processes, on
simulated ranks, and on the meta device, where :func:`ltx.profile.explain` counts what they send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ltx import comm
from ltx.errors import LtxError, StrategyError
from ltx.gradients.buckets import Bucket
from ltx.gradients.comm_hook import program_of, reduce_at_once
from ltx.gradients.packing import pack, pack_pure, unpack
from ltx.gradients.pending import PendingReductions
from ltx.gradients.reduction import LeafState, Reduced
from ltx.gradients.schedule import Plan

_T = TypeVar("_T")


def _of(values: Sequence[_T], members: Sequence[int]) -> list[_T]:
    return [values[member] for member in members]


class Exchange:
    """The pending buckets of a plan.

    Args:
        plan: what is exchanged; all ranks have compared it.
        tensors: one for each leaf of the plan. They are packed at once, and not read again.
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
        self._pending: PendingReductions | None = None
        self._summary: comm.PendingSummary | None = None
        self._completed: list[Reduced] = []
        self._failed: LtxError | None = None
        self._states = list(states) or [{} for _ in tensors]
        if background and (phases := plan.hook.phases_on(plan.axis.size)) > 1:
            raise StrategyError(f"{plan.hook!r} has {phases} phases; in the background there is one channel, for one.")
        if plan.axis.comm is not None:
            try:
                self._launch(plan.axis.comm, tensors, background)
            except LtxError as error:
                if not background:
                    raise
                self._failed = error  # the caller has other work to finish; wait() raises it
        else:
            if plan.axis.threads and plan.agreement is not None:
                plan.axis.threads.announce(plan.agreement.signature)
            self._completed = [self._at_once(place, tensors) for place in range(len(plan.buckets))]

    def _launch(self, axis_comm: comm.AxisComm, tensors: Sequence[torch.Tensor], background: bool) -> None:
        plan, hook = self._plan, self._plan.hook
        if background:
            axis_comm.wait_for_earlier()
            axis_comm.recovery.recover()
            axis_comm.under_way = "an exchange of the strategy"
            assert plan.agreement is not None
            axis_comm.background.advance(plan.agreement)
            self._pending = PendingReductions(axis_comm, lambda axis_comm, phase: axis_comm.background, "background")
        else:
            self._summary = comm.begin_pass(axis_comm, axis_comm, "an exchange of the strategy", plan.agreement)
            self._pending = PendingReductions(axis_comm, what="exchange")
        for bucket in plan.buckets:
            mine, states = _of(tensors, bucket.members), _of(self._states, bucket.members)
            flat = pack(mine, bucket, hook, plan.axis.size, states)
            self._pending.launch(program_of(hook, plan.bucket_input(bucket, flat, states)), hook)
            self._pending.poll()

    def _at_once(self, place: int, tensors: Sequence[torch.Tensor]) -> Reduced:
        plan, bucket = self._plan, self._plan.buckets[place]
        mine, states = _of(tensors, bucket.members), _of(self._states, bucket.members)
        flat = pack_pure(mine, bucket, plan.hook, plan.axis.size, states)
        return reduce_at_once(plan.hook, plan.axis, plan.bucket_input(bucket, flat, states))

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._failed is not None or self._pending is None or self._pending.done

    def wait(self) -> tuple[list[torch.Tensor], list[LeafState]]:
        """(the result for each leaf, its next state), once all are complete; new tensors, which are views of buckets.

        Raises:
            PeerLostError, DeadlockDetectedError, CollectiveTimeoutError: it can't complete.
            RankMismatchError: ranks have issued different things before it.
        """
        plan, results = self._plan, [torch.empty(0)] * len(self._states)
        states: list[LeafState] = [{} for _ in self._states]
        for bucket, (flat, advanced) in self.wait_buckets():
            given = plan.hook.output_bucket(bucket, plan.axis.size)
            for member, tensor in zip(bucket.members, unpack(flat, given), strict=True):
                results[member] = tensor
            if advanced:
                for member, state in zip(bucket.members, advanced, strict=True):
                    states[member] = dict(state)
        return results, states

    def wait_buckets(self) -> list[tuple[Bucket, Reduced]]:
        """:meth:`wait` by bucket: (bucket, (what the hook returns for it, the next states))."""
        try:
            self._wait()
        except BaseException as error:
            if self._summary is not None:  # a wait in the background may be repeated
                self._comm.recovery.abort(error)
            raise
        return list(zip(self._plan.buckets, self._completed, strict=True))

    def _wait(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._pending is None:
            return
        self._completed = list(self._pending.wait_each())
        if self._summary is not None:
            comm.end_pass(self._comm, self._summary)
        if not self._midway:
            self._comm.recovery.complete()
        self._pending = None

    @property
    def _comm(self) -> comm.AxisComm:
        assert self._plan.axis.comm
        axis_comm: comm.AxisComm = self._plan.axis.comm
        return axis_comm
