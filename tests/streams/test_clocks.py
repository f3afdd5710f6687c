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

ROWS: dict[str, tuple[ltx.Strategy, dict[str, Any]]] = {
    **STRATEGIES,
    "guarded": (ltx.DDPStrategy(**SMALL), {"guard": "skip"}),
    "asynchronous": (AsyncAveraging(sync_interval_ms=0), {}),
}


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


def _no_fence() -> None:
    Stream.wait_event = lambda stream, event: None  # type: ignore[method-assign]


def _not_behind() -> None:
    Stream.wait_stream = lambda stream, other: None  # type: ignore[method-assign]


def _not_kept() -> None:
    torch.Tensor.record_stream = lambda x, stream: None  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("name", "plant", "expected"),
    [
        ("mean", _no_fence, "compute reads what isn't written by communicat"),
        ("mean", _not_behind, "reads what isn't written by compute"),
        ("zero", _not_kept, "ends that compute uses"),
    ],
)
def test_a_fault_is_found(name: str, plant: Callable[[], None], expected: str, ranks: Ranks) -> None:
    def run() -> Found:
        methods = Stream.wait_event, Stream.wait_stream
        try:
            return found(name, plant)
        finally:
            Stream.wait_event, Stream.wait_stream = methods  # type: ignore[method-assign]

    for faults, _ in ranks(2).run(run):
        assert [fault for fault in faults if expected in fault], faults
