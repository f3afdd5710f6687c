"""The loader of the page on checkpoints: workers of two ranks draw different numbers, and the same ones again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kinds import Ranks
from tests.test_readme import DOCS, blocks_of, run_in_order

PAGE = DOCS / "how-to" / "checkpoint.md"


def test_workers_of_ranks_draw_their_own(ranks: Ranks, tmp_path: Path) -> None:
    def run() -> Any:
        blocks = [block for block in blocks_of(PAGE) if "DataLoader" in block.code or block.code.startswith("import")]
        found = run_in_order(str(PAGE), blocks, str(tmp_path))
        return found["seen"] % 1, found["gathered"] % 1

    (first, gathered), (second, _) = ranks(2).run(run)
    assert gathered[0].equal(first)
    assert gathered[1].equal(second)
    assert not {*first.tolist()} & {*second.tolist()}
