"""What the demo tells: progress, table, figure, JSON lines."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from ltx.demo.train import Curve, Report, Result, draw, format_table, told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that moves when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ltx.demo.train.time.monotonic", clock)
    return clock


def test_without_communication_nothing_is_hidden() -> None:
    assert told(1e6, 0.0, None) == ("1,000,000", "0 B", "-")


@pytest.mark.parametrize("width", [41, 79, 300])
def test_a_terminal_gets_one_line_that_is_rewritten(width: int, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    report = Report(stream := Terminal())
    for step in range(1, 11):
        report.show(f"{step} " + "x" * (100 - 8 * step), last=step == 10)
        clock.now += 1 / 16  # every second one comes too early
    first, *lines = stream.getvalue().split("\r")
    assert (first, [line.split()[0] for line in lines]) == ("", ["1", "3", "5", "7", "9", "10"])
    assert all(len(line.rstrip("\n")) < width for line in lines)
    assert [len(a.rstrip()) <= len(b) for a, b in pairwise(lines)] == [True] * 5  # covers what was there
    assert [line.count("\n") for line in lines] == [0, 0, 0, 0, 0, 1]
    assert stream.getvalue().endswith("\n")


def test_elsewhere_a_line_now_and_then_and_the_last(clock: Clock) -> None:
    report = Report(stream := io.StringIO(), interval_s=5)
    for step in range(1, 11):
        report.show(f"step {step}", last=step == 10)
        clock.now += 1
    assert stream.getvalue() == "step 1\nstep 6\nstep 10\n"


def test_a_rank_without_a_stream_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.show("10/10", last=True)
    report.say("hello")
    report.write("step", loss=1.0)
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
    assert rows[0].split() == ["fp32", "700", "1.705", "24,012", "3.30", "MB", "92%"]
    assert rows[1].split() == ["accumulate", "x", "4", "175", "1.940", "25,100", "0", "B", "-"]
    assert len({len(line) for line in (header, rule, *rows)}) == 1


def test_a_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    assert draw({"fp32": Curve([1, 2], [3.0, 2.0], [2], [2.5])}, 3.2, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw({}, 3.2, tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())


def test_metrics_are_json_lines() -> None:
    Report(metrics=(file := io.StringIO())).write("result", **asdict(RESULTS[1]))
    result = json.loads(file.getvalue())
    assert (result["kind"], result["strategy"], result["hidden"]) == ("result", "accumulate x 4", None)
