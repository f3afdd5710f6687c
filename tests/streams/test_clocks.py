"""What streams do to the same memory is ordered, whatever the device is slow at; and a fault in that is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ltx
from ltx.strategies.async_averaging import AsyncAveraging
from tests.covering import some
from tests.kinds import Ranks
from tests.streams.clocks import Clocks, Stream
from tests.streams.pool import on_streams
from tests.streams.test_steps import SMALL, STRATEGIES, trained

Found = tuple[list[str], list[str]]

ROWS = STRATEGIES | {"guarded": (ltx.DDPStrategy(**SMALL), {"guard": "skip"})}
ROWS["asynchronous"] = (AsyncAveraging(sync_interval_ms=0), {})


def found(name: str, plant: Callable[[], None] = lambda: None) -> Found:
    """What isn't ordered in a training, and where a backward pass had to wait."""
    strategy, options = ROWS[name]
    clocks: list[Clocks] = []

    def host(hung_s: float) -> Clocks:
        clocks.append(Clocks(hung_s))
        return clocks[0]

    def train() -> None:
        plant()
        trained(strategy, 3, **options)

    on_streams(train, host=host, hung_s=60.0)
    return clocks[0].faults, clocks[0].held_up


@pytest.mark.parametrize("name", some(ROWS, "update", "zero", "asynchronous"))
def test_all_uses_of_memory_are_ordered(name: str, ranks: Ranks) -> None:
    for faults, held_up in ranks(2).run(found, name):
        assert (faults, held_up) == ([], [])


@pytest.mark.parametrize(
    ("name", "owner", "method", "expected"),
    [
        ("mean", Stream, "wait_event", "compute reads what isn't written by communicat"),
        ("mean", Stream, "wait_stream", "reads what isn't written by compute"),
        ("zero", torch.Tensor, "record_stream", "ends that compute uses"),
    ],
)
def test_a_fault_is_found(name: str, owner: Any, method: str, expected: str, ranks: Ranks) -> None:
    """Where one of these does nothing."""

    def run() -> Found:
        with pytest.MonkeyPatch.context() as patch:
            return found(name, lambda: patch.setattr(owner, method, lambda *_: None))

    for faults, _ in ranks(2).run(run):
        assert [fault for fault in faults if expected in fault], faults
