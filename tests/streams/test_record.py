"""Recordings where the host runs ahead: times are those of the device; and what the host does for one bucket."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ltx
from benchmarks import bucket
from ltx.core.base import private
from ltx.core.comm import ledger
from tests.kinds import Ranks
from tests.streams.backend import NAME
from tests.streams.clocks import Clocks
from tests.streams.pool import StreamedPool, on_streams
from tests.streams.test_steps import batch, prepared


@dataclass
class Mark:
    """An event of a device that is as far as the host."""

    at_s: float = field(default_factory=time.perf_counter)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Mark) -> float:
        return 1e3 * (later.at_s - self.at_s)


def recorded(marks: bool) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if marks:
            patch.setattr(ledger, "mark", lambda device: Mark())
        train, state, rank = prepared(ltx.DDPStrategy())
        began = time.perf_counter()
        with ltx.profile.record() as trace:
            for step in range(3):
                state, _ = train(state, *batch(rank, step))
            during = trace.hidden
        return trace, during, began, time.perf_counter()


def test_times_are_those_of_the_device(ranks: Ranks) -> None:
    for trace, during, began, ended in StreamedPool(ranks(2)).run(recorded, True):
        assert math.isnan(during)
        on_device = [event for event in trace.events if event.channel != "user" or event.label == "psum"]
        assert len(trace.buckets) == 3
        for event in on_device:
            assert began <= event.issued_s <= event.completed_s <= ended
            assert event.marks == []
        assert 0.0 <= trace.hidden <= 1.0


def test_what_isn_t_measured_isn_t_reported(ranks: Ranks) -> None:
    for trace, *_ in StreamedPool(ranks(2)).run(recorded, False):
        assert [event.completed_s for event in trace.buckets] == [None] * 3
        assert math.isnan(trace.hidden)


def buckets() -> list[list[int]]:
    """The sizes of what some strategies send: of buckets larger than those of gloo."""
    found, params = [], {name: torch.zeros(1500, 1000) for name in "abc"}
    for strategy in (ltx.DDPStrategy(), ltx.ZeroStrategy(), ltx.LocalSGDStrategy(1)):
        step = ltx.data_parallel(lambda p: sum(x.sum() for x in p.values()), strategy)
        train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        state = train.init(params)
        with ltx.profile.record() as trace:
            state, _ = train(state)
        found.append([packed.nbytes for packed in trace.packed])
    return found


def test_buckets_are_larger(ranks: Ranks) -> None:
    """One parameter in the first, and both others in the next; ZeRO sends each rank's half of them too."""
    whole, halves = [6_000_000, 12_000_000], [3_000_000, 6_000_000]
    assert [*StreamedPool(ranks(2)).run(buckets)] == [[whole, whole + halves, whole]] * 2


#: Of ltx at most; "calls of Python" beyond DDP's.
MOST = {"calls of Python": 46, "operations": 9, "allocations": 3}
MOST |= {"events": 2, "waits of a stream": 2, "record_stream": 1}


def test_a_bucket_takes_few_calls_and_never_waits(ranks: Ranks) -> None:
    def run(name: str) -> Any:
        def count() -> dict[str, float]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(private, "count_of_modes", lambda: 0)  # the host's is the device, not a user's
                group = dist.new_group(backend=NAME)
                ddp, mine = (lambda n: bucket.ddp_step("cpu", n, group)), (lambda n: bucket.ltx_step("cpu", n))
                try:
                    return bucket.counted(name, ddp if name == "ddp" else mine)
                finally:
                    dist.destroy_process_group(group)

        return on_streams(count, host=Clocks)

    found = {name: ranks(2).run(run, name).rank(0) for name in bucket.ONCE}
    print(bucket.table(found, {}))
    most = {**dict.fromkeys(bucket.NAMES, 0), **MOST, "calls of C": 1000}
    most["calls of Python"] += found["ddp"]["calls of Python"]
    assert {row: count for row, count in found["ltx"].items() if count > most[row]} == {}
