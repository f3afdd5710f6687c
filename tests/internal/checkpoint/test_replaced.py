"""A checkpoint that is saved again under its name: whoever is killed meanwhile, one of the two is there."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx.checkpoint import directory
from ltx.errors import CheckpointError

TRAIN = ltx.train_step(ltx.data_parallel(lambda w, x: (w * x).sum()), ltx.optim.from_torch(torch.optim.SGD, lr=0.1))


def save(path: Path, data: str, **kwargs: Any) -> None:
    ltx.checkpoint.save(path, TRAIN.init(torch.ones(3)), data=data, **kwargs)


def loaded(path: Path) -> Any:
    """The data of the latest; a warning is an error."""
    return ltx.checkpoint.load(path, TRAIN.init(torch.zeros(3))).data


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def sets_aside(source: Any, target: Any) -> bool:
    return Path(source).name.startswith("step_") and Path(target).name.startswith(".")


def puts_in_place(source: Any, target: Any) -> bool:
    return Path(target).name.startswith("step_")


def killed(path: Path, after: Callable[[Any, Any], bool], host: str) -> None:
    """Save again in a process on `host` that is killed after a rename of which `after` is true."""

    def saves() -> None:
        rename = os.rename

        def last_rename(source: Any, target: Any) -> None:
            rename(source, target)
            if after(source, target):
                os.kill(os.getpid(), signal.SIGKILL)

        os.rename = last_rename
        socket.gethostname = lambda: host
        save(path, "new")

    process = get_context("fork").Process(target=saves)
    process.start()
    process.join(40)
    assert process.exitcode == -signal.SIGKILL
    process.close()


HOSTS = [socket.gethostname(), "elsewhere"]


@pytest.mark.parametrize("host", HOSTS, ids=["same host", "another host"])
@pytest.mark.parametrize("then", ["latest", "load", "save"])
def test_killed_between_the_renames(then: str, host: str, tmp_path: Path) -> None:
    save(tmp_path, "old")
    killed(tmp_path, sets_aside, host)
    assert all(name.startswith(".") for name in names(tmp_path))  # the moment in question
    if then == "latest":
        found = ltx.checkpoint.latest(tmp_path)
        assert found == tmp_path / "step_00000000"
        assert found.is_dir()
    elif then == "save":
        state, _ = TRAIN(TRAIN.init(torch.ones(3)), torch.ones(3))
        ltx.checkpoint.save(tmp_path, state, keep=2)
        assert directory.steps(tmp_path) == [1, 0]
        shutil.rmtree(tmp_path / "step_00000001")
    assert loaded(tmp_path) == "old"
    save(tmp_path, "newer")
    assert loaded(tmp_path) == "newer"
    assert [name for name in names(tmp_path) if "replaced" in name or ".old" in name] == []


@pytest.mark.parametrize("host", HOSTS, ids=["same host", "another host"])
def test_killed_after_the_renames(host: str, tmp_path: Path) -> None:
    """The old one is of no use any more: it doesn't come back when the new one is removed."""
    save(tmp_path, "old")
    killed(tmp_path, puts_in_place, host)
    assert len(names(tmp_path)) == 2
    assert loaded(tmp_path) == "new"
    shutil.rmtree(tmp_path / "step_00000000")
    assert ltx.checkpoint.latest(tmp_path) is None


def test_another_runs_is_put_back_before_it_could_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "old")
    killed(tmp_path, sets_aside, HOSTS[0])
    monkeypatch.setattr(directory, "runs", {})
    with pytest.raises(CheckpointError, match="step_00000000 was saved by another run"):
        save(tmp_path, "of another run")
    assert loaded(tmp_path) == "old"


def test_who_looks_between_the_renames_finds_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives it its name back, which doesn't keep the new one from replacing it."""
    save(tmp_path, "old")
    rename, found = os.rename, []

    def look(source: Any, target: Any) -> None:
        rename(source, target)
        if sets_aside(source, target) and len(found) < 2:
            found.append(loaded(tmp_path))

    monkeypatch.setattr(os, "rename", look)
    save(tmp_path, "new")
    assert found == ["old", "old"]
    assert loaded(tmp_path) == "new"
    assert names(tmp_path) == ["step_00000000"]


def test_one_that_cant_be_replaced_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "old")
    rename = os.rename

    def fail(source: Any, target: Any) -> None:
        if Path(target).name == "step_00000000" and Path(source).name.startswith(".step_"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError):
        save(tmp_path, "new")
    monkeypatch.undo()
    assert names(tmp_path) == ["step_00000000"]
    assert loaded(tmp_path) == "old"


def test_one_that_cant_be_put_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a reader that mustn't write."""
    save(tmp_path, "old")
    killed(tmp_path, sets_aside, HOSTS[0])

    def fail(source: Any, target: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match=r"step_00000000 was renamed to .*/\.replaced_step_.*Permission"):
        loaded(tmp_path)
    with pytest.raises(CheckpointError, match="has ended, rename it to"):
        ltx.checkpoint.latest(tmp_path)
