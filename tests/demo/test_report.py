"""The demo's report: table, figure, JSON lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ltx.demo.report import Curve, JsonLines, Result, draw, format_table, smoothed

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
        metrics.write_result(RESULTS[1])
    _, line = path.read_text().splitlines()
    result = json.loads(line)
    assert result["kind"] == "result"
    assert result["strategy"] == "accumulate x 4"
    assert result["hidden"] is None
