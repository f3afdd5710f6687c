"""The table of `make bench`: its quartiles, and what an interrupt leaves of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import table

TIMES = {"local": [1.0] * 4, "ddp": [2.0, 2.0, 2.0, 4.0], "ltx": [1.0, 2.0, 3.0, 8.0]}


def test_a_row_has_the_median_of_ratios_and_their_quartiles() -> None:
    local, ddp, ltx, bound = table.rows(TIMES, "loopback", 2, "cpu", list(TIMES))
    assert ltx == ("ltx", 2500.0, 1.25, 0.875, 1.625)
    assert (ddp.low, ddp.high, bound.to_ddp, local.ms) == (1.0, 1.0, 0.5, 1000.0)
    assert "| ltx | 2500 | 1.25 (0.88 to 1.62) |" in table.markdown({"loopback": [local, ddp, ltx, bound]})


def test_an_interrupt_leaves_the_links_and_rounds_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(names: list[str], link: str, *_: Any, **__: Any) -> dict[str, Any]:
        measured.append(link)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return {"times": TIMES}

    monkeypatch.setattr(table, "measure", measure)
    monkeypatch.setattr(table, "jax_s", lambda: 1.0)
    monkeypatch.setattr(sys, "argv", ["table", "--minutes", "0"])
    table.main()
    assert measured == ["loopback", "1gbit", "100mbit"]
    printed = capsys.readouterr().out
    assert "1gbit, ms" in printed
    assert "100mbit" not in printed
