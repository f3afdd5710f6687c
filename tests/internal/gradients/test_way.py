"""A gradient's way from the train step to the network and back to the optimizer, which should stay short."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ltx
from ltx import PerRank

PACKAGE = Path(ltx.__file__).parent

#: (file below ltx/, name)
Function = tuple[str, str]


def called() -> tuple[int, set[Function]]:
    """The number of calls of ltx's functions in a steady step of ten parameters, and these functions."""
    params = {f"p{i}": torch.ones(4) for i in range(10)}
    step = ltx.data_parallel(lambda p, x: (torch.stack(tuple(p.values())) * x).sum())
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.AdamW, lr=1e-3))
    state, found = train.init(params), list[list[Function]]()
    for number in range(60):  # on a loaded machine most steps wait
        calls: list[Function] = []

        def note(frame: FrameType, event: str, _: Any, calls: list[Function] = calls) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
                calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

        sys.setprofile(note if number > 2 else None)
        try:
            state, _ = train(state, torch.ones(4))
        finally:
            sys.setprofile(None)
        found += [calls] if number > 2 else []
    fewest = min(found, key=len)  # a wait for the peer makes calls, too
    return len(fewest), {*fewest}


@pytest.mark.parametrize(("sockets", "most"), [(True, (210, 165)), (False, (230, 185))])
def test_a_steady_step_asks_little(
    sockets: bool, most: tuple[int, int], on_new_axis: Callable[..., PerRank[Any]]
) -> None:
    """What can't have changed since the step before isn't asked again."""
    for count, functions in on_new_axis(called, sockets=sockets):
        print(f"{count} calls of {len(functions)} functions")
        assert count <= most[0]
        assert len(functions) <= most[1]
        assert len({file for file, _ in functions}) <= 46
