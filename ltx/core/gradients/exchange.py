"""Exchanges: buckets that a strategy sends outside of a backward pass.

A strategy writes what it does with parameters as a communication hook too, so the same lines run between processes and
on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltx.core import comm
from ltx.core.base.errors import LtxError, UnsupportedError
from ltx.core.base.needs import require
from ltx.core.gradients.buffers import pack, pack_pure, unpack
from ltx.core.gradients.comm_hook import reduce_at_once
from ltx.core.gradients.pending import Pending
from ltx.core.gradients.planning import Plan, any_derivative
from ltx.core.gradients.reduction import Bucket, LeafState, Reduced


class Exchange:
    """The pending buckets of a plan.

    Args:
        plan: what is exchanged; all ranks have compared it.
        tensors: one for each leaf of the plan. The tensors are packed at once, and not read again.
        states: the hook's state of each leaf; empty for a hook without states.
        background: use the background channel, where peers may come much later. The buckets' channels go through shared
            memory between ranks of one machine, but progress only while ranks wait.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        states: Sequence[LeafState] = (),
        background: bool = False,
    ):
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
            self._kind = "background" if background else "exchange"
            self._completed = [self._at_once(bucket, tensors) for bucket in plan.buckets]

    def _of(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[LeafState]]:
        return [tensors[m] for m in bucket.members], [self._states[m] for m in bucket.members]

    def _at_once(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> Reduced:
        plan = self._plan
        mine, own = self._of(bucket, tensors)
        hook = plan.hook_of(bucket)
        flat = pack_pure(mine, bucket, hook, plan.axis.size, own)
        return reduce_at_once(hook, plan.axis, plan.bucket_input(bucket, flat, own), self._kind)

    def _launch(self, axis_comm: comm.AxisComm, tensors: Sequence[torch.Tensor], background: bool) -> None:
        plan, name = self._plan, "an exchange of the strategy"
        if background:
            axis_comm.under_way = name
            assert plan.agreement is not None
            axis_comm.background.advance(plan.agreement)
            self._pending = Pending(axis_comm, channel_of=lambda on, phase: on.background, what="background")
        else:
            self._pending = Pending(axis_comm, what="exchange")
            self._pending.sent = axis_comm.passes.sent()
            self._pending.summary = comm.begin_pass(axis_comm, axis_comm, name, plan.agreement)
        for bucket in plan.buckets:
            mine, states = self._of(bucket, tensors)
            hook = plan.hook_of(bucket)
            flat = pack(mine, bucket, hook, plan.axis.size, states)
            comm.note_packed("background" if background else "exchange", hook, bucket)
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
        results = [torch.empty(0, device="cpu")] * len(self._states)
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
                self._pending.finish()
            except BaseException as error:
                self._pending.abandon(error)  # not in the background, where a wait may be repeated
                raise
            self._pending = None
        return list(zip(self._plan.buckets, self._completed, strict=True))
