"""What the demo tells: progress, table, figure, JSON lines."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ltx.demo.report import (
    Curve,
    JsonLines,
    Progress,
    Reading,
    Result,
    draw,
    format_bar,
    format_count,
    format_line,
    format_table,
    smoothed,
)

READING = Reading(step=35, steps=700, loss=2.71828, tokens_per_s=24_012, bytes_per_step=3_303_424, hidden=0.873)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def reading(step: int) -> Reading:
    return Reading(step, 10, 1.0, 1000.0, 10, 0.5)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_999, "1.0 MB"), (2.5e9, "2.5 GB")],
)
def test_counts(number: float, text: str) -> None:
    assert format_count(number, "B") == text


@pytest.mark.parametrize(("done", "bar"), [(0, "[----]"), (0.5, "[##--]"), (1, "[####]"), (2, "[####]")])
def test_bar(done: float, bar: str) -> None:
    assert format_bar(done, 4) == bar


def test_a_line_says_everything() -> None:
    line = format_line("bf16", READING)
    assert line.startswith("bf16 ")
    for part in [" 35/700", "loss 2.718", "24.0 k tokens/s", "3.3 MB/step", "87% hidden"]:
        assert part in line


def test_without_communication_nothing_is_hidden() -> None:
    assert format_line("fp32", Reading(1, 2, 1.0, 10.0, 0, None)).endswith("0 B/step  - hidden")


@pytest.mark.parametrize("width", [10, 40, 79, 84, 120, 300])
def test_a_line_fits(width: int) -> None:
    assert len(format_line("accumulate x 4", READING, width)) <= width


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock=clock)
    for step in range(1, 11):
        progress.show("fp32", reading(step))
        clock.now += 1
    written = stream.getvalue()
    assert written.count("\r") == 10
    assert written.count("\n") == 1
    assert written.endswith("\n")


def test_a_shorter_line_covers_a_longer_one() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock=clock)
    progress.show("fp32", Reading(1, 10, 1.0, 1000.0, 123_456, 1.0))
    clock.now = 1
    progress.show("fp32", Reading(2, 10, 1.0, 1000.0, 1, 0.5))
    _, longer, shorter = stream.getvalue().split("\r")
    assert len(longer) <= len(shorter)


def test_elsewhere_a_line_now_and_then_and_the_last() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, interval_s=5, clock=clock)
    for step in range(1, 11):
        progress.show("fp32", reading(step))
        clock.now += 1
    lines = stream.getvalue().splitlines()
    assert [line.split("/10")[0].split()[-1] for line in lines] == ["1", "6", "10"]
    assert "\r" not in stream.getvalue()


def test_a_rank_without_a_stream_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(None)
    progress.show("fp32", reading(10))
    progress.say("hello")
    assert capsys.readouterr() == ("", "")


RESULTS = [
    Result("fp32", 700, 1.7046, 24_012.0, 3_303_424.0, 0.92, 30.1),
    Result("accumulate x 4", 175, 1.94, 25_100.0, 0.0, None, 29.0),
]


def test_a_row_for_each_result() -> None:
    header, rule, *rows = format_table(RESULTS).splitlines()
    assert header.split("  ")[0] == "strategy"
    for column in ["validation loss", "tokens/s", "bytes/step"]:
        assert column in header
    assert set(rule) <= {"-", " "}
    assert rows[0].split() == ["fp32", "700", "1.705", "24.0", "k", "3.3", "MB", "92%"]
    assert rows[1].split() == ["accumulate", "x", "4", "175", "1.940", "25.1", "k", "0", "B", "-"]
    assert len({len(line) for line in (header, rule, *rows)}) == 1


def test_a_table_without_results_is_its_header() -> None:
    assert len(format_table([]).splitlines()) == 2


def test_smoothing_keeps_a_constant_and_follows_a_step() -> None:
    assert smoothed([2.0] * 5) == pytest.approx([2.0] * 5)
    falling = smoothed([1.0, 0.0, 0.0])
    assert falling[0] == 1.0
    assert falling[0] > falling[1] > falling[2] > 0


def test_a_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    assert draw({"fp32": Curve([1, 2], [3.0, 2.0], [2], [2.5])}, 3.2, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw({}, 3.2, tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())


def test_metrics_are_json_lines_written_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with JsonLines(path) as metrics:
        metrics.write("step", loss=1.5, step=1)
        assert json.loads(path.read_text()) == {"kind": "step", "loss": 1.5, "step": 1}
        metrics.write("result", **asdict(RESULTS[1]))
    _, line = path.read_text().splitlines()
    result = json.loads(line)
    assert result["kind"] == "result"
    assert result["strategy"] == "accumulate x 4"
    assert result["hidden"] is None
