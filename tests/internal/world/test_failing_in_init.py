"""A rank that can't make its part of a world."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import ltx
from ltx.core.world import init as world_init
from ltx.peers import meeting
from tests.forks import free_port
from tests.kinds import Started
from tests.train_on import raised_by

FAILS: dict[str, tuple[str, dict[str, Any]]] = {
    "its mesh": (r"WorldError: mesh=\{'a': 5\} is for 5 = 5 ranks", {"mesh": {"a": 5}}),
    "as they meet": (r"couldn't set up torch.distributed .* ValueError: no", {}),
    "as axes are opened": ("ValueError: no", {}),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("how", FAILS)
def test_a_rank_that_fails_in_init_is_named(how: str, fails: int, started: Started) -> None:
    """The others waited until the timeout, and then named rank 0, with which the store had gone."""
    port, (why, given) = free_port(), FAILS[how]

    def no(*_: Any) -> Any:
        raise ValueError("no")

    def body(tell: Callable[[Any], None]) -> str:
        rank = ltx.world().rank
        ltx.shutdown()
        if rank == fails and how == "as they meet":
            meeting.Meeting.gather = no  # type: ignore[method-assign]
        if rank == fails and how == "as axes are opened":
            world_init.open_axes = no
        its = given if rank == fails else {}
        return raised_by(ltx.init, rank=rank, size=3, master=f"127.0.0.1:{port}", timeout=60.0, **its)

    world = started(3, body, held_by="rank 0")
    for rank in {0, 1, 2} - {fails}:
        said = world.told(rank)  # the store may end before the rank has asked again
        assert re.search(rf"rank {rank}: .*[rR]ank {fails} (couldn't make its|had left because of) .*{why}", said), said
