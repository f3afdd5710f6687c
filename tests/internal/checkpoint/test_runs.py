"""Checkpoints of another run: nobody removes or replaces them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx.checkpoint import directory
from ltx.errors import CheckpointError


def state_of(step: int) -> Any:
    train = ltx.train_step(
        ltx.data_parallel(lambda w, x: (w * x).square()), ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
    )
    state = train.init(torch.ones(()))
    for _ in range(step):
        state, _ = train(state, torch.ones(()))
    return state


@pytest.fixture
def of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the checkpoints of steps 1, 2 and 5, of a process that has ended."""
    for step in (1, 2, 5):
        ltx.checkpoint.save(tmp_path, state_of(step))
    monkeypatch.setattr(directory, "runs", {})
    return tmp_path


def test_another_runs_checkpoints_stay(of_others: Path) -> None:
    for step in (3, 4):
        ltx.checkpoint.save(of_others, state_of(step), keep=1)
    assert directory.steps(of_others) == [5, 4, 2, 1]
    with pytest.raises(CheckpointError, match=r"step_00000005 was saved by another run\. Give another directory"):
        ltx.checkpoint.save(of_others, state_of(5), keep=1)
    assert directory.steps(of_others) == [5, 4, 2, 1]
    assert list(of_others.glob(".*")) == []


def test_who_goes_on_from_them_continues_the_run(of_others: Path) -> None:
    assert ltx.checkpoint.load(of_others, state_of(0)).step == 5
    ltx.checkpoint.save(of_others, state_of(6), keep=2)
    assert directory.steps(of_others) == [6, 5]
