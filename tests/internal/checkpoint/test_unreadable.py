"""Checkpoints that a process can't read for reasons of its own: they count as whole, and nothing older is taken."""

from __future__ import annotations

import errno
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx.checkpoint import directory, storage
from ltx.errors import CheckpointError
from tests.kinds import Ranks

TRAIN = ltx.train_step(
    ltx.data_parallel(lambda w, x: (w * x).sum()), ltx.optim.from_torch(torch.optim.SGD, lr=0.1), donate=False
)


def start() -> Any:
    return TRAIN.init(torch.ones(50))


def saved(path: Path) -> list[Any]:
    """The states after 0, 1 and 2 steps, of which the last two are saved."""
    states = [start()]
    for _ in range(2):
        states.append(TRAIN(states[-1], torch.ones(50))[0])
        ltx.checkpoint.save(path, states[-1])
    return states


FAILURES: dict[str, tuple[Any, str, BaseException]] = {
    "no memory": (storage, "read", MemoryError()),
    "no memory of torch's": (storage, "read", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    "no memory for the metadata": (storage._Unpickler, "load", MemoryError()),
    "no more files": (directory, "sha256", OSError(errno.EMFILE, "Too many open files")),
    "not allowed": (Path, "read_bytes", PermissionError(errno.EACCES, "Permission denied")),
    "no network": (Path, "stat", OSError(errno.ESTALE, "Stale file handle")),
}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("failure", FAILURES)
def test_what_says_nothing_of_the_checkpoint_is_raised(
    failure: str, failing: int, ranks: Ranks, tmp_path: Path
) -> None:
    """On all ranks, where the one before was taken. The next time the latest is loaded."""

    def on_a_rank() -> tuple[str, int]:
        saved(tmp_path)
        ltx.barrier()
        owner, name, error = FAILURES[failure]
        done, path = getattr(owner, name), tmp_path / "step_00000002"

        def fail(*args: Any, **kwargs: Any) -> Any:
            if owner is Path and path not in args[0].parents:
                return done(*args, **kwargs)
            raise error

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="error"):
            if int(ltx.axis_index()) == failing:
                patch.setattr(owner, name, fail)
            with pytest.raises(CheckpointError) as raised:
                ltx.checkpoint.load(tmp_path, start())
        return str(raised.value), ltx.checkpoint.load(tmp_path, start()).step

    (said, step), other = ranks(2).run(on_a_rank)
    assert other == (said, step)
    error = FAILURES[failure][2]
    begin = re.escape(f"checkpoint.load: {tmp_path / 'step_00000002'} can't be read: rank {failing}: ")
    assert re.match(
        rf"{begin}{type(error).__name__}.*\. The checkpoint may be whole, so no older one is loaded in its place\. ",
        said,
    )
    assert str(error) in said
    assert step == 2


def test_one_whose_run_cant_be_known_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another run's, so it is neither replaced nor removed."""
    states, read = saved(tmp_path), Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.parent.name == "step_00000001":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match="the checkpoint wasn't saved: PermissionError"):
        ltx.checkpoint.save(tmp_path, states[1])
    ltx.checkpoint.save(tmp_path, states[2], keep=1)
    assert directory.steps(tmp_path) == [2, 1]
