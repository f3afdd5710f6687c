"""Flights: on each phase's channel issues go out in bucket order, whatever order collectives land in."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ltx import wire
from ltx.hooks import Ask, CommHook, Reduction, Share
from ltx.sync.buckets import Bucket
from ltx.sync.flights import Flights


@dataclass(frozen=True)
class Twice(CommHook):
    """Two sums, one after the other."""

    phases: ClassVar[int] = 2

    def reduce(self, share: Share) -> Reduction:
        first = yield Ask("sum", share.flat)
        second = yield Ask("sum", first)
        return second, share.states


@dataclass
class Ticket:
    """An issue that has landed when the test says so, or when it is waited for."""

    value: Tensor
    done: bool = False
    total: None = None

    def wait(self) -> Tensor:
        self.done = True
        return self.value


@dataclass
class Channel:
    """Takes down what is issued on it."""

    issued: list[str] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)

    def issue(self, operation: str, buffer: Tensor, label: str, *_: Any) -> Ticket:
        self.issued.append(label)
        self.tickets.append(Ticket(buffer))
        return self.tickets[-1]


def test_what_lands_first_waits_for_the_buckets_before_it() -> None:
    first, second = channels = [Channel(), Channel()]
    flights = Flights(
        cast(wire.Line, SimpleNamespace(size=2, rank=0)), lambda line, phase: cast(wire.Channel, channels[phase])
    )
    for _ in range(3):
        flights.launch(Twice(), Share(torch.ones(2), cast(Bucket, None), 2))
    assert first.issued == ["bucket 0", "bucket 1", "bucket 2"]
    first.tickets[2].done = first.tickets[1].done = True
    flights.poll()
    assert second.issued == []
    first.tickets[0].done = True
    flights.poll()
    assert second.issued == ["bucket 0", "bucket 1", "bucket 2"]


def test_one_that_is_asked_for_takes_those_before_it_along() -> None:
    first, second = channels = [Channel(), Channel()]
    flights = Flights(
        cast(wire.Line, SimpleNamespace(size=2, rank=0)), lambda line, phase: cast(wire.Channel, channels[phase])
    )
    for _ in range(3):
        flights.launch(Twice(), Share(torch.ones(2), cast(Bucket, None), 2))
    first.tickets[1].done = True
    assert flights.land(1)[0].tolist() == [1.0, 1.0]
    assert second.issued == ["bucket 0", "bucket 1"]
    assert (first.tickets[2].done, second.tickets[0].done) == (False, False)
