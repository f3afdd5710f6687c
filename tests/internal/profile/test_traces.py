"""Timelines: what steps computed and when, pictures of it, and files for Perfetto."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ltx
from ltx.core.comm import ledger
from ltx.core.comm.ledger import Event, Span
from ltx.errors import InputError, UnsupportedError
from ltx.profile import Trace
from tests.kinds import Ranks
from tests.needs import needs
from tests.train_on import go_on, refuses


@pytest.fixture
def pyplot() -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum((w**2).sum() for w in params.values())  # type: ignore[return-value]


def recorded(overlap: Literal["backward", "update"] = "backward", steps: int = 1) -> Trace:
    strategy = ltx.DDPStrategy(first_bucket_bytes=400, bucket_bytes=800)
    optimizer = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
    train = ltx.train_step(ltx.data_parallel(loss, strategy), optimizer, overlap=overlap)
    state = train.init({name: torch.ones(100) for name in "abc"})
    with ltx.profile.record() as trace:
        go_on(train, state, [()] * steps)
    return trace


def check_order(trace: Trace, updates: int) -> None:
    step, *parts = trace.spans
    assert [span.name for span in trace.spans] == ["step", "forward", "backward", *["update"] * updates]
    assert all(span.ended_s is not None for span in trace.spans)
    ends = [step.began_s, *(time for span in parts for time in (span.began_s, span.ended_s)), step.ended_s]
    assert ends == sorted(ends)  # type: ignore[type-var]


@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_spans_of_a_step(ranks: Ranks, overlap: Literal["backward", "update"]) -> None:
    check_order(recorded(overlap), updates=1)
    for rank, trace in enumerate(ranks(2).run(recorded, overlap)):
        check_order(trace, updates=2 if overlap == "update" else 1)
        assert trace.rank == rank
        step, forward, backward = trace.spans[:3]
        assert trace.events[0].label == "summary", "carried by the first bucket, if ranks share memory"
        assert forward.ended_s <= backward.began_s
        assert all(backward.began_s <= event.issued_s <= step.ended_s for event in trace.events)


def test_spans_of_a_step_that_raises() -> None:
    step = ltx.data_parallel(lambda w: (1 // 0) * w)
    with ltx.profile.record() as trace, pytest.raises(ZeroDivisionError):
        step(torch.tensor(1.0))
    assert [span.name for span in trace.spans] == ["forward"]
    assert trace.spans[0].ended_s is not None


@pytest.mark.full
def test_spans_of_a_data_parallel_step_by_itself(ranks: Ranks) -> None:
    def run() -> Iterator[list[str]]:
        step = ltx.data_parallel(loss)
        params = {"a": torch.ones(3)}
        calls: list[Callable[[], object]] = [
            lambda: step(params),
            lambda: torch.func.grad(step)(params),
            lambda: ltx.grad_and_value(step)(params),
            lambda: step({"a": torch.ones(3, requires_grad=True)}).backward(),
        ]
        for call in calls:
            with ltx.profile.record() as trace:
                call()
            yield [span.name for span in trace.spans]

    both = ["forward", "backward"]
    assert ranks(2).run(lambda: list(run())).replicated() == [["forward"], both, both, ["forward"]]


def test_nested_recordings_and_none() -> None:
    assert ledger.span("x") is ledger.span("y"), "while nobody records, nothing is made"
    with ltx.profile.record() as outer, ledger.span("a"):
        with ltx.profile.record() as inner, ledger.span("b"):
            pass
        with ledger.span("c"):
            pass
    with ledger.span("d"):
        pass
    assert [span.name for span in outer.spans] == ["a", "b", "c"]
    assert [span.name for span in inner.spans] == ["b"]
    assert all(span.ended_s is not None for span in outer.spans)


def test_times_of_day() -> None:
    with ltx.profile.record() as trace:
        before = time.time()
        with ledger.span("a"):
            after = time.time()
    (span,) = trace.spans
    assert before - 1e-3 < trace.epoch_s + span.began_s < after + 1e-3


def test_overlapping_times_count_once() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (5.0, 6.0)]
    trace = Trace([Event("user", "psum", "x", 10, start, stop, waited_s=0.5) for start, stop in spans])
    trace.events.append(Event("user", "psum", "still under way", 10, 7.0))
    assert (trace.comm_s, trace.waited_s, trace.bytes, trace.hidden) == (4.0, 2.0, 50, 0.5)
    assert Trace([Event("user", "psum", "x", 10, 0.0, 1.0, waited_s=9.0)]).hidden == 0.0, "never below zero"


def test_a_world_of_one_and_simulated_ranks_send_nothing() -> None:
    with ltx.profile.record() as trace:
        ltx.psum(torch.ones(3))
        ltx.vmap(ltx.psum)(torch.ones(3))
    assert (trace.events, trace.bytes, trace.hidden, trace.comm_s) == ([], 0, 1.0, 0.0)


def made_by_hand(rank: int = 0) -> Trace:
    """Two buckets under way together, of which the second waits, and a user's own that isn't complete."""
    events = [
        Event("buckets 0", "psum", "bucket 0", 100, 1.25, 1.75),
        Event("buckets 0", "psum", "bucket 1", 200, 1.5, 2.25, waited_s=0.25),
        Event("buckets 0", "psum", "bucket 2", 300, 1.75, 2.0),
        Event("user", "psum", "psum", 4, 2.5),
    ]
    times = {"step": (1.0, 2.75), "forward": (1.0, 1.25), "backward": (1.25, 2.0), "update": (2.25, 2.75)}
    return Trace(events, [Span(name, *between) for name, between in times.items()], rank=rank, epoch_s=100.0 + rank)


def test_a_file_for_perfetto(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ltx.profile.timeline([made_by_hand(0), made_by_hand(1)]).save(path)
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["compute", "buckets 0", "buckets 0 (2)", "user"] * 2
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    found = {
        (e["pid"], tracks[e["pid"], e["tid"]], e["name"]): (e["ph"], e["ts"] / 1e6 - e["pid"], e.get("dur"))
        for e in events
        if "ts" in e
    }
    drawn = {
        ("compute", "step"): ("X", 0.0, 1.75e6),
        ("compute", "forward"): ("X", 0.0, 0.25e6),
        ("compute", "backward"): ("X", 0.25, 0.75e6),
        ("compute", "update"): ("X", 1.25, 0.5e6),
        ("buckets 0", "bucket 0"): ("X", 0.25, 0.5e6),
        ("buckets 0 (2)", "bucket 1"): ("X", 0.5, 0.75e6),
        ("buckets 0", "bucket 2"): ("X", 0.75, 0.25e6),
        ("user", "psum"): ("B", 1.5, None),
    }
    assert found == {(rank, *place): times for rank in range(2) for place, times in drawn.items()}
    second = next(e for e in events if e["name"] == "bucket 1")
    assert second["args"] == {"operation": "psum", "bytes": 200, "waited_ms": 250.0}
    assert second["cat"] == "bucket"


def test_recordings_come_back_from_ranks_and_are_saved_together(ranks: Ranks, tmp_path: Path) -> None:
    traces = ranks(2).run(recorded, "backward", 3)
    path = tmp_path / "trace.json"
    ltx.profile.timeline(traces).save(path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] != "M"]
    assert all(e["ph"] == "X" and e["ts"] >= 0 and e["dur"] >= 0 for e in events)
    for rank, trace in enumerate(traces):
        mine = [e for e in events if e["pid"] == rank]
        assert len(mine) == len(trace.spans) + len(trace.events) == 3 * (4 + 3)
        assert sum(e["args"].get("bytes", 0) for e in mine) == trace.bytes
    by_track = defaultdict(list)
    for e in events:
        by_track[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for track in by_track.values():  # within a track, Perfetto wants events that nest
        for i, (start, end) in enumerate(track):
            for other_start, other_end in track[:i]:
                inside = (start >= other_start and end <= other_end) or (other_start >= start and other_end <= end)
                assert inside or end <= other_start + 1e-3 or start >= other_end - 1e-3
    # Ranks of one machine have one clock: they take their steps at the same time.
    first = [min(e["ts"] for e in events if e["pid"] == rank) for rank in range(2)]
    last = [max(e["ts"] + e["dur"] for e in events if e["pid"] == rank) for rank in range(2)]
    assert max(first) < min(last)


@needs("matplotlib")
def test_a_picture(pyplot: Any) -> None:
    trace = made_by_hand()
    ax = ltx.profile.timeline([trace]).plot()
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["compute", "buckets 0", "user"]
    assert ax.get_title() == f"{trace.hidden:.0%} of the communication hidden" == "75% of the communication hidden"
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert told == ["step", "forward", "backward", "update", "bucket"]
    boxes = [bars.get_paths()[0].get_extents() for bars in ax.collections]
    assert [(round(box.x0), round(box.x1), round((box.y0 + box.y1) / 2)) for box in boxes] == [
        *[(0, 1750, 0), (0, 250, 0), (250, 1000, 0), (1250, 1750, 0)],
        *[(250, 750, 1), (500, 1250, 1), (750, 1000, 1)],
    ]
    assert boxes[0].height > boxes[1].height == boxes[2].height, "what is within something is drawn within it"


@needs("matplotlib")
def test_a_picture_of_several_ranks(pyplot: Any) -> None:
    other = made_by_hand(1)
    other.events[1].waited_s = 0.5
    _, mine = pyplot.subplots()
    ax = ltx.profile.timeline([made_by_hand(), other]).plot(mine)
    assert ax is mine
    labels = [tick.get_text() for tick in ax.get_yticklabels()]
    assert labels == [f"rank {r}  {track}" for r in range(2) for track in ("compute", "buckets 0", "user")]
    assert ax.get_title() == "50% to 75% of the communication hidden"


@needs("matplotlib")
def test_a_picture_of_a_world_of_one(pyplot: Any) -> None:
    ax = ltx.profile.timeline([recorded()]).plot()
    assert ax.get_title() == "no communication"
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["compute"]
    assert ltx.profile.timeline([Trace()]).plot().get_title() == "no communication"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    timeline = ltx.profile.timeline([made_by_hand()])
    refuses(UnsupportedError, r"matplotlib, which isn't installed.*save\(path\)", timeline.plot)


def test_what_is_no_recording() -> None:
    for given, got in (([], "none"), ([Trace(), 3], "int")):
        text = rf"ltx\.profile\.timeline takes the recordings of one or more ranks, got {got}"
        refuses(InputError, text, ltx.profile.timeline, given)
