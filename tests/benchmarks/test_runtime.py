"""What `python -m benchmarks.runtime` times of a failure is what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ltx
from benchmarks import runtime


def _anew() -> tuple[Any, ...]:
    world = ltx.world()
    assert ltx.world() is world
    return runtime.begin_anew(), ltx.world() is world, ltx.psum(ltx.axis_index()).item()


def test_a_failed_step_ends_the_world_and_a_new_one_works(ranks: Callable[[int], Any]) -> None:
    for took_s, same, total in ranks(2).run(_anew):
        assert (0 < took_s < 30, same, total) == (True, False, 1)
    assert 0 < runtime.new_world(ranks(2)) < 30
