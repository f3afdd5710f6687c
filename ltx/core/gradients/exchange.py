"""Exchanges: buckets that a strategy sends outside of a backward pass, by a communication hook too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltx.core import comm
from ltx.core.base.errors import LtxError, UnsupportedError
from ltx.core.base.needs import require
from ltx.core.base.private import Tensors
from ltx.core.gradients.buffers import pack, unpack
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
            self._pending.sent = axis_comm.passes.sent()
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
