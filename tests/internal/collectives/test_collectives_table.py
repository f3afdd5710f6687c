"""The table of collectives is complete, and the page is what it prints."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

from ltx.core import collectives
from tests.contract.conformance.table import OPS

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "reference" / "collectives.md"
TABLE = runpy.run_path(str(DOCS / "collectives_table.py"))
#: Not collectives: they move nothing by themselves.
LOCAL = {"axis_index", "axis_size", "rank_seed", "shard"}
#: For who writes collectives, by ltx.extend.collectives.
FOR_AUTHORS = {"collective", "counted", "told", "wide"}


def test_the_page_is_what_the_table_prints() -> None:
    assert PAGE.read_text() == TABLE["markdown"](), f"print it anew: python docs/collectives_table.py > {PAGE}"


def test_every_collective_has_a_row() -> None:
    public = {name for name, value in vars(collectives).items() if inspect.isfunction(value)}
    assert public - LOCAL - FOR_AUTHORS == {row.name for row in TABLE["ROWS"]}


def test_every_row_with_a_gradient_is_tested_under_all_transforms() -> None:
    tested = {op.name.split()[0] for op in OPS}
    assert {row.name for row in TABLE["ROWS"] if row.simulated and TABLE["gradient_of"](row) != "none"} <= tested
