"""The ledger: bytes by the ring's count, and times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ltx
from ltx.core.comm.ledger import Event
from ltx.profile import Trace
from tests.kinds import Ranks

SUMMARY_BYTES = 64  # two sums and six numbers of the digest, in float64


def _gradient(**fields: Any) -> Callable[[int], Any]:
    """Three parameters of 400 bytes in two buckets."""
    step = ltx.data_parallel(
        lambda p: sum((w**2).sum() for w in p.values()),
        ltx.DDPStrategy(first_bucket_bytes=400, bucket_bytes=800, **fields),
    )
    return lambda n: torch.func.grad(step)({name: torch.ones(100) for name in "abc"})


#: name: (what is done on n ranks, bytes that each sends, as a multiple of (n - 1) / n, number of issues)
ISSUES: dict[str, tuple[Callable[[int], Any], float, int]] = {
    "psum": (lambda n: ltx.psum(torch.ones(120)), 2 * 480, 1),
    "psum of float64": (lambda n: ltx.psum(torch.ones(120, dtype=torch.float64)), 2 * 960, 1),
    "psum of a tree": (lambda n: ltx.psum([torch.ones(120), torch.ones(120)]), 2 * 960, 2),
    "pmean": (lambda n: ltx.pmean(torch.ones(120)), 2 * 480, 1),
    "pvary": (lambda n: ltx.pvary(torch.ones(120)), 0, 0),
    "empty": (lambda n: ltx.psum(torch.ones(0)), 0, 0),
    "psum_scatter": (lambda n: ltx.psum_scatter(torch.ones(120), tiled=True), 480, 1),
    "broadcast": (lambda n: ltx.broadcast(torch.ones(120)), 480, 1),
    "gradient of pvary": (lambda n: torch.func.grad(lambda x: ltx.pvary(x).sum())(torch.ones(120)), 2 * 480, 1),
    "data_parallel": (_gradient(), 2 * (1200 + SUMMARY_BYTES), 3),
    "data_parallel bf16": (_gradient(comm_hook="bf16"), 2 * (600 + SUMMARY_BYTES), 3),
}


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
def test_bytes(ranks: Ranks, n: int) -> None:
    def run() -> dict[str, tuple[int, int]]:
        seen = {}
        for name, (issue, _, _) in ISSUES.items():
            with ltx.profile.record() as trace:
                issue(n)
            seen[name] = (trace.bytes, len(trace.events))
        with ltx.profile.record() as trace:
            ltx.all_gather(torch.ones(120))
        return seen | {"all_gather": (trace.bytes, len(trace.events))}

    seen = ranks(n).run(run).replicated()
    assert seen.pop("all_gather") == (480 * (n - 1), 1)
    for name, (_, nbytes, count) in ISSUES.items():
        assert seen[name][1] == count, name
        assert seen[name][0] == pytest.approx(nbytes * (n - 1) / n, abs=count), name  # whole bytes an issue


def test_events_of_a_step(ranks: Ranks) -> None:
    def run() -> tuple[Trace, Trace]:
        with ltx.profile.record() as outer:
            _gradient()(2)
            with ltx.profile.record() as inner:
                _gradient()(2)
                ltx.psum(torch.ones(3))
        ltx.psum(torch.ones(3))
        return outer, inner

    for outer, inner in ranks(2).run(run):
        labels = [event.label for event in inner.events]
        assert labels == ["summary", "bucket 0", "bucket 1", "psum"]
        assert [event.label for event in outer.events] == labels[:3] + labels
        assert [event.channel for event in inner.events] == ["buckets 0"] * 3 + ["user"]
        for event in outer.events:
            assert event.completed_s is not None
            assert event.completed_s >= event.issued_s
            assert event.waited_s >= 0.0
        assert 0.0 <= outer.hidden <= 1.0
        assert 0.0 <= inner.comm_s <= outer.comm_s


def test_a_world_of_one_and_simulated_ranks_send_nothing() -> None:
    with ltx.profile.record() as trace:
        ltx.psum(torch.ones(3))
        ltx.vmap(ltx.psum)(torch.ones(3))
    assert (trace.events, trace.bytes, trace.hidden, trace.comm_s) == ([], 0, 1.0, 0.0)


def test_overlapping_times_count_once() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (5.0, 6.0)]
    trace = Trace([Event("user", "psum", "x", 10, start, stop, waited_s=0.5) for start, stop in spans])
    trace.events.append(Event("user", "psum", "still under way", 10, 7.0))
    assert (trace.comm_s, trace.waited_s, trace.bytes) == (4.0, 2.0, 50)
    assert trace.hidden == 0.5
    late = Trace([Event("user", "psum", "x", 10, 0.0, 1.0, waited_s=9.0)])
    assert late.hidden == 0.0, "never below zero"
