"""Pending reductions: on each phase's channel issues go out in bucket order, whatever order collectives complete in."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ltx.core import comm
from ltx.core.gradients.pending import Pending
from ltx.core.gradients.reduction import Bucket
from ltx.hooks import BucketInput, CollectiveRequest, CommHook, Reduction


@dataclass(frozen=True)
class Twice(CommHook):
    """Two sums, one after the other."""

    phases: ClassVar[int] = 2

    def reduce(self, inputs: BucketInput) -> Reduction:
        first = yield CollectiveRequest("psum", inputs.flat)
        second = yield CollectiveRequest("psum", first)
        return second, inputs.states


@dataclass
class Work:
    """An issue that is complete when the test says so, or when it is waited for."""

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
    works: list[Work] = field(default_factory=list)

    def issue(self, operation: str, buffer: Tensor, label: str, *_: Any, note: Any, eager: bool) -> Work:
        self.issued.append(label)
        self.works.append(Work(buffer))
        return self.works[-1]


def test_what_completes_first_waits_for_the_buckets_before_it() -> None:
    first, second = channels = [Channel(), Channel()]
    pending = Pending(
        cast(comm.AxisComm, SimpleNamespace(size=2, rank=0, stream_of=lambda device: None)),
        channel_of=lambda axis_comm, phase: cast(comm.Channel, channels[phase]),
    )
    for _ in range(3):
        pending.reduce(Twice(), BucketInput(torch.ones(2), cast(Bucket, None), 2))
    assert first.issued == ["bucket 0", "bucket 1", "bucket 2"]
    first.works[2].done = first.works[1].done = True
    pending.poll()
    assert second.issued == []
    first.works[0].done = True
    pending.poll()
    assert second.issued == ["bucket 0", "bucket 1", "bucket 2"]
