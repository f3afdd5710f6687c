"""Exchanges: a hook's work on tensors outside of a backward pass, at once or in the background of other work.

What a strategy does with parameters is written as a communication hook too, so that the same lines run between
processes, on simulated ranks and on the meta device, where :func:`ltx.explain` counts what they send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ltx import wire
from ltx.axis import GroupBacking
from ltx.errors import LtxError, StrategyError
from ltx.sync.buckets import Bucket
from ltx.sync.flights import Flights, Landed
from ltx.sync.reduction import LeafState, pack, pack_pure, reduce_at_once, unpack
from ltx.sync.schedule import Plan

_T = TypeVar("_T")


def _of(values: Sequence[_T], members: Sequence[int]) -> list[_T]:
    return [values[member] for member in members]


class Exchange:
    """The buckets of a plan under way, from :func:`start`.

    Args:
        plan: what is exchanged; all ranks have compared it.
        tensors: one for each leaf of the plan. They are packed at once, and not looked at again.
        states: the hook's state of each leaf; empty for a hook without.
        background: issue on the background channel, where peers may come much later, rather than on those of the
            buckets, which go through shared memory between ranks of one machine but move only while ranks wait.
        midway: another exchange of the same step follows: a rank that has landed this one hasn't gone on from the step.
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
        self._flights: Flights | None = None
        self._header: wire.HeaderTicket | None = None
        self._landed: list[Landed] = []
        self._failed: LtxError | None = None
        self._states = list(states) or [{} for _ in tensors]
        if background and (phases := plan.hook.phases_on(plan.axis.size)) > 1:
            raise StrategyError(f"{plan.hook!r} has {phases} phases; in the background there is one channel, for one.")
        if isinstance(plan.axis.backing, GroupBacking):
            try:
                self._launch(plan.axis.backing.line, tensors, background)
            except LtxError as error:
                if not background:
                    raise
                self._failed = error  # who starts it has other work to finish; it shows where it is landed
        else:
            self._landed = [self._at_once(place, tensors) for place in range(len(plan.buckets))]

    def _launch(self, line: wire.Line, tensors: Sequence[torch.Tensor], background: bool) -> None:
        plan, hook = self._plan, self._plan.hook
        line.land_earlier()
        line.passes.rejoin()
        line.under_way = "an exchange of the strategy"
        channel = line.background if background else line.bucket_channel(0)
        assert plan.agreement is not None
        channel.advance(plan.agreement)
        if background:
            self._flights = Flights(line, lambda line, phase: line.background, "background")
        else:
            nothing = torch.zeros((), dtype=torch.float64, device=line.device)
            digest = line.user.digest ^ (channel.digest << 1)
            self._header = wire.send_header(channel, nothing, nothing, digest)
            self._flights = Flights(line, what="exchange")
        for bucket in plan.buckets:
            mine, states = _of(tensors, bucket.members), _of(self._states, bucket.members)
            flat = pack(mine, bucket, hook, plan.axis.size, states)
            self._flights.launch(hook, plan.share(bucket, flat, states))
            self._flights.poll()

    def _at_once(self, place: int, tensors: Sequence[torch.Tensor]) -> Landed:
        plan, bucket = self._plan, self._plan.buckets[place]
        mine, states = _of(tensors, bucket.members), _of(self._states, bucket.members)
        flat = pack_pure(mine, bucket, plan.hook, plan.axis.size, states)
        return reduce_at_once(plan.hook, plan.axis, plan.share(bucket, flat, states))

    @property
    def done(self) -> bool:
        """Whether :meth:`land` would return at once."""
        return self._failed is not None or self._flights is None or self._flights.done

    def land(self) -> tuple[list[torch.Tensor], list[LeafState]]:
        """(the result for each leaf, its next state), once all of it is there; new tensors, views of a bucket each.

        Raises:
            PeerLostError, DeadlockDetectedError, CollectiveTimeoutError: it won't come.
            RankMismatchError: ranks have issued different things before it.
        """
        plan, results = self._plan, [torch.empty(0)] * len(self._states)
        states: list[LeafState] = [{} for _ in self._states]
        for bucket, (flat, advanced) in self.land_buckets():
            given = plan.hook.gives(bucket, plan.axis.size)
            for member, tensor in zip(bucket.members, unpack(flat, given), strict=True):
                results[member] = tensor
            if advanced:
                for member, state in zip(bucket.members, advanced, strict=True):
                    states[member] = dict(state)
        return results, states

    def land_buckets(self) -> list[tuple[Bucket, Landed]]:
        """:meth:`land`, for whoever knows what the hook returns for a bucket: (bucket, (that, the next states))."""
        try:
            self._wait()
        except BaseException as error:
            if self._header is not None:  # what is in the background may be waited for again
                self._line.passes.leave_by(error)
            raise
        return list(zip(self._plan.buckets, self._landed, strict=True))

    def _wait(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._flights is None:
            return
        self._landed = list(self._flights.land_each())
        if self._header is not None:
            self._header.wait()
        if not self._midway:
            self._line.passes.complete()
        self._flights = None

    @property
    def _line(self) -> wire.Line:
        assert isinstance(self._plan.axis.backing, GroupBacking)
        line: wire.Line = self._plan.axis.backing.line
        return line
