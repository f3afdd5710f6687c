"""Exchanges: a hook's work on tensors outside of a backward pass, at once or in the background of other work.

What a strategy does with parameters is written as a communication hook too, so that the same lines run between
processes, on simulated ranks and on the meta device, where :func:`ltx.explain` counts what they send.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltx import wire
from ltx.axis import GroupBacking
from ltx.errors import StrategyError
from ltx.sync.flights import Flights, Landed
from ltx.sync.reduction import LeafState, pack, pack_pure, reduce_at_once, unpack
from ltx.sync.schedule import Plan


class Exchange:
    """The buckets of a plan under way, from :func:`start`.

    Args:
        plan: what is exchanged; all ranks have compared it.
        tensors: one for each leaf of the plan. They are packed at once, and not looked at again.
        states: the hook's state of each leaf; empty for a hook without.
        background: issue on the background channel, where peers may come much later, rather than on those of the
            buckets, which go through shared memory between ranks of one machine but move only while ranks wait.
    """

    def __init__(
        self, plan: Plan, tensors: Sequence[torch.Tensor], states: Sequence[LeafState] = (), background: bool = False
    ):
        self._plan = plan
        self._flights: Flights | None = None
        self._header: wire.HeaderTicket | None = None
        self._landed: list[Landed] = []
        self._states = list(states) or [{} for _ in tensors]
        if isinstance(plan.axis.backing, GroupBacking):
            self._launch(plan.axis.backing.line, tensors, background)
        else:
            self._landed = [self._at_once(place, tensors) for place in range(len(plan.buckets))]

    def _launch(self, line: wire.Line, tensors: Sequence[torch.Tensor], background: bool) -> None:
        plan, hook = self._plan, self._plan.hook
        if background and hook.phases > 1:
            raise StrategyError(f"{hook!r} has {hook.phases} phases; in the background there is one channel, for one.")
        line.passes.rejoin()
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
            mine = [tensors[member] for member in bucket.members]
            flat = pack(mine, bucket, hook.wire_dtype(bucket.dtype), hook.scale(plan.axis.size))
            self._flights.launch(hook, plan.share(bucket, flat, self._flat_states(bucket.members)))
            self._flights.poll()

    def _flat_states(self, members: Sequence[int]) -> list[torch.Tensor]:
        return [self._states[member][name] for member in members for name in self._plan.state_names[member]]

    def _at_once(self, place: int, tensors: Sequence[torch.Tensor]) -> Landed:
        plan, bucket = self._plan, self._plan.buckets[place]
        mine = [tensors[member] for member in bucket.members]
        flat = pack_pure(mine, bucket, plan.hook.wire_dtype(bucket.dtype), plan.hook.scale(plan.axis.size))
        return reduce_at_once(plan.hook, plan.axis, plan.share(bucket, flat, self._flat_states(bucket.members)))

    @property
    def done(self) -> bool:
        """Whether :meth:`land` would return at once."""
        return self._flights is None or self._flights.done

    def land(self) -> tuple[list[torch.Tensor], list[LeafState]]:
        """(the result for each leaf, its next state), once all of it is there; new tensors, views of a bucket each.

        Raises:
            PeerLostError, DeadlockDetectedError, CollectiveTimeoutError: it won't come.
            RankMismatchError: ranks have issued different things before it.
        """
        if self._flights is not None:
            self._landed, self._flights = list(self._flights.land_each()), None
        if self._header is not None:
            self._header.wait()
        if isinstance(self._plan.axis.backing, GroupBacking):
            self._plan.axis.backing.line.passes.complete()
        plan, results = self._plan, [torch.empty(0)] * len(self._states)
        states: list[LeafState] = [{} for _ in self._states]
        for bucket, (flat, advanced) in zip(plan.buckets, self._landed, strict=True):
            for member, tensor in zip(bucket.members, unpack(flat, bucket), strict=True):
                results[member] = tensor
            if advanced:
                for member, state in zip(bucket.members, advanced, strict=True):
                    states[member] = dict(state)
        return results, states
