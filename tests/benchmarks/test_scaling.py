"""What benchmarks.scaling computes: its counts are those of more ranks than it records, its table is the page's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scaling
from ltx.core.comm.operations import OPERATIONS


@pytest.mark.parametrize("name", ["DDP, FP16", "ZeRO", "hierarchical"])
def test_three_recordings_tell_what_more_ranks_send(name: str) -> None:
    strategy, steps = scaling.STRATEGIES[name]
    found = scaling.counts(strategy, steps)
    for n in (48, 96):
        for event, computed in zip(scaling.recorded(strategy, steps, n), found, strict=True):
            assert computed.nbytes(n) == pytest.approx(scaling.SMALLER * event.nbytes, rel=1e-6)
            assert computed.messages(n) == pytest.approx(OPERATIONS[event.operation].messages(event.ranks))


def test_a_step_takes_what_is_left_of_its_collectives_after_the_backward_pass() -> None:
    bucket, exchange = (scaling.Counts(False, x, lambda n: 25e9 * n, lambda n: 1e5) for x in (True, False))
    levels = scaling.Level(1e-5, 50e9), scaling.Level(1e-5, 25e9)
    assert scaling.step_s([bucket], 1, 2, 0.9, levels) == pytest.approx(0.9 + (1 + 1 - 0.6))  # on one node
    assert scaling.step_s([bucket, bucket], 4, 16, 0.9, levels) == pytest.approx(0.9 + (2 * (1 + 16) - 0.6) / 4)
    assert scaling.step_s([bucket, exchange], 4, 16, 0.9, levels) == pytest.approx(0.9 + (1 + 16 - 0.6 + 1 + 16) / 4)


@pytest.mark.full
def test_the_page_has_the_table() -> None:
    page = Path(scaling.__file__).parents[1] / "docs" / "benchmarks.md"
    assert scaling.markdown(scaling.curves(scaling.RANKS)) in page.read_text()
