"""Flights: reductions of several buckets under way at once on the bucket channels of an axis.

Each phase of a hook (its first collective, its second, ...) has a channel of its own, and on each channel issues go out
in bucket order, so that all ranks issue alike whatever order their gradients arrive in and their collectives land in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ltx import wire
from ltx.axis import GroupBacking
from ltx.errors import StrategyError
from ltx.sync.reduction import LeafState, Reducer, Reduction, Share, collective_alone

#: (sum of the shares, next states)
Landed = tuple[torch.Tensor, Sequence[LeafState]]


@dataclass
class _Flight:
    """A bucket under way: its reduction, and the collective that it waits for."""

    hook: Reducer
    reduction: Reduction
    ticket: wire.Ticket | None = None
    phase: int = 0
    landed: Landed | None = None
    halfway: bool = False  # between two collectives
    total: float | None = None  # of all elements of what has landed, if the wire knows it

    @property
    def may_go_on(self) -> bool:
        return self.ticket is not None and self.ticket.done


class Flights:
    """The reductions of one backward pass, in the order of their launches. `summed`: their sums are asked for."""

    def __init__(
        self,
        line: wire.Line,
        channel_of: Callable[[wire.Line, int], wire.Channel] = wire.Line.bucket_channel,
        what: str = "bucket",
        summed: bool = False,
    ):
        self._line = line
        self._channel_of = channel_of
        self._what = what
        self._summed = summed
        self._flights: list[_Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    def launch(self, hook: Reducer, share: Share) -> None:
        """Start the next bucket in order.

        A hook that asks the wire for nothing may wait for something else, for which peers that are still on their way
        through the backward pass can't be made to wait: it runs when it is landed.
        """
        flight = _Flight(hook, hook.reduce(share))
        self._flights.append(flight)
        if hook.phases_on(self._line.size) > 0:
            self._advance(len(self) - 1)

    def _advance(self, place: int) -> None:
        """Wait for a reduction's collective, run it up to its next one, and issue that."""
        flight = self._flights[place]
        result = flight.ticket.wait() if flight.ticket is not None else None
        flight.halfway = True
        self._run_on(flight, place, result)
        flight.halfway = False

    def _run_on(self, flight: _Flight, place: int, result: torch.Tensor | None) -> None:
        arrived, version = result, -1 if result is None else result._version
        while True:
            try:
                ask = next(flight.reduction) if result is None else flight.reduction.send(result)
            except StopIteration as end:
                if flight.ticket is not None and end.value[0] is arrived and version == arrived._version:
                    flight.total = flight.ticket.total  # what the wire has added up is what the hook gives
                flight.landed, flight.ticket = end.value, None
                return
            if flight.phase == flight.hook.phases_on(self._line.size):
                raise StrategyError(
                    f"rank {self._line.rank}: {flight.hook!r} asks for more than {flight.phase} collectives in "
                    f"{self._what} {place}. Say how many it may ask for: phases: ClassVar[int] = ..."
                )
            line = self._line
            if ask.axis is not None:
                if not isinstance(ask.axis.backing, GroupBacking):
                    result = collective_alone(ask)
                    continue
                line = ask.axis.backing.line
            channel = self._channel_of(line, flight.phase)
            flight.phase += 1
            if ask.buffer.numel():
                what = f"{self._what} {place}"
                flight.ticket = channel.issue(ask.operation, ask.buffer, what, ask.arguments, self._summed)
                return
            result = ask.buffer  # nothing to send; every rank has the same shapes

    def poll(self) -> None:
        """Go on with reductions whose collective has landed, as long as each phase stays in bucket order."""
        for place, flight in enumerate(self._flights):
            while flight.may_go_on and self._may_issue(place, flight.phase):
                self._advance(place)

    def _may_issue(self, place: int, phase: int) -> bool:
        return all(self._is_past(earlier, phase) for earlier in range(place))

    @property
    def done(self) -> bool:
        """Whether all of them have landed, or would at once."""
        self.poll()
        return all(flight.landed is not None for flight in self._flights)

    def landed(self, place: int) -> Landed | None:
        """What became of a bucket, if it has landed."""
        return self._flights[place].landed

    def total(self, place: int) -> float | None:
        """The sum of all elements of a bucket that has landed, or NaN; None if nobody has taken it."""
        return self._flights[place].total

    @property
    def intact(self) -> bool:
        """Whether no reduction was left halfway, by an exception that came while it wasn't waiting."""
        return not any(flight.halfway for flight in self._flights)

    def land(self, place: int) -> Landed:
        """What became of one bucket, once it has landed. Those before it go on as far as the order of issues asks."""
        flight = self._flights[place]
        while flight.landed is None:
            if flight.phase < flight.hook.phases_on(self._line.size):  # it may issue once more
                for earlier in range(place):
                    while not self._is_past(earlier, flight.phase):
                        self._advance(earlier)
            self._advance(place)
        return flight.landed

    def _is_past(self, place: int, phase: int) -> bool:
        flight = self._flights[place]
        return flight.landed is not None or flight.phase > phase

    def land_each(self) -> Iterator[Landed]:
        """The buckets in order, each as soon as it has landed."""
        # Rounds: each unfinished reduction goes on by one collective, in bucket order, which keeps every phase's
        # channel in order; whatever has landed in order is given out at once.
        given = 0
        while given < len(self):
            for place in range(given, len(self)):
                if self._flights[place].landed is None:
                    self._advance(place)
                while given < len(self) and (landed := self.landed(given)) is not None:
                    yield landed
                    given += 1

    def flush(self) -> None:
        """Land what was launched so far. More may be launched afterwards."""
        for _ in self.land_each():
            pass
