"""The table of what libraries make of one program: ltx's cells, DDP's, and the page's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import field

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
