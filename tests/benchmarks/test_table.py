"""The table of `make bench`: its quartiles, and what an interrupt leaves of it. The table of libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ltx
from benchmarks import field, runtime, table

TIMES = {"local": [1.0] * 4, "ddp": [2.0, 2.0, 2.0, 4.0], "ltx": [1.0, 2.0, 3.0, 8.0]}


def test_a_row_has_the_median_of_ratios_and_their_quartiles() -> None:
    local, ddp, ltx, bound = table.rows(TIMES, "loopback", 2, "cpu", list(TIMES))
    assert ltx == ("ltx", 2500.0, 1.25, 0.875, 1.625)
    assert (ddp.low, ddp.high, bound.to_ddp, local.ms) == (1.0, 1.0, 0.5, 1000.0)
    assert "| ltx | 2500 | 1.25 (0.88 to 1.62) |" in table.markdown({"loopback": [local, ddp, ltx, bound]})


def test_an_interrupt_leaves_the_links_and_rounds_before_it(monkeypatch: Any, capsys: Any) -> None:
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


# The table of what libraries make of one program: ltx's cells, DDP's, and the page's.
OWN = "wrong, no error: each rank's own"


@pytest.mark.full  # two columns of programs, a minute on a busy machine
@pytest.mark.timeout(240)
def test_the_cells_that_pages_have(ranks: Callable[[int], Any]) -> None:
    found = ranks(2).run(field.worker, ["DDP", "ltx"])[0]
    assert found["ltx"] | {field.SIMULATED: field.simulated_by_ltx()} == dict.fromkeys(field.ROWS, "right")
    assert {row: found["DDP"][row] for row in (field.GRAD, field.JVP, field.VMAP)} == dict.fromkeys(
        (field.GRAD, field.JVP, field.VMAP), OWN
    )
    page = (field.HERE / "RESULTS-field.md").read_text()
    for row, cell in found["DDP"].items():
        assert f"| {row} | {cell} |" in page


def test_a_wrong_cell_says_what_it_gave() -> None:
    right, own = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    given = {"right": right, OWN: own, "wrong, no error: 0": 0 * right, "wrong, no error": own + 1}
    assert [field.verdict(found, right, own) for found in given.values()] == list(given)


# What `python -m benchmarks.runtime` times of a failure is what it says.
def test_a_failed_step_ends_the_world_and_a_new_one_works(ranks: Callable[[int], Any]) -> None:
    def anew() -> tuple[Any, ...]:
        world = ltx.world()
        assert ltx.world() is world
        return runtime.begin_anew(), ltx.world() is world, ltx.psum(ltx.axis_index()).item()

    for took_s, same, total in ranks(2).run(anew):
        assert (0 < took_s < 30, same, total) == (True, False, 1)
    assert 0 < runtime.new_world(ranks(2)) < 30
