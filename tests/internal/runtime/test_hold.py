"""A directory in use is locked against a second run, until the first has ended, however it did."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import ltx
from ltx.checkpoint import directory
from ltx.checkpoint.directory import Hold
from tests.contract.runtime.elastic_training import START, batch, make
from tests.forks import Ranks


@pytest.mark.full
def test_a_directory_in_use_is_locked_against_a_second_run(started: Callable[..., Ranks], tmp_path: Path) -> None:
    """Also after rank 0, which has locked it, is gone; when all are, it is free again."""
    go = get_context("fork").Semaphore(0)

    def body(tell: Callable[[Any], None]) -> Any:
        def on_step(state: Any, *_: Any) -> None:
            if state.step in (4, 6):
                tell(ltx.world().size)
                assert go.acquire(timeout=60)
                if state.step == 4 and ltx.world().rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        train, state = make()
        arguments = {"epochs": 2, "snapshots": tmp_path, "every": 2, "keep": 2, "on_step": on_step}
        return ltx.elastic(train, state, batch, START, **arguments)[0].step

    def second(tell: Callable[[Any], None]) -> Any:
        return ltx.elastic(*make(), batch, START, epochs=1, snapshots=tmp_path)[0].step

    world = started(2, body)
    for told, left in ([2, 2], 2), ([1], 1):
        assert [world.told(rank) for rank in range(2 - left, 2)] == told
        before = sorted(tmp_path.glob("step_*"))
        other = started(2, second)
        said = [other.told(rank) for rank in range(2)]
        assert said[0] == said[1]
        assert said[0].startswith("CheckpointError: elastic: the training can't begin: ")
        assert f"{tmp_path} is in use by another run, begun by process " in said[0]
        assert sorted(tmp_path.glob("step_*")) == before
        for _ in range(left):
            go.release()
    assert world.told(1) == 10
    assert directory.steps(tmp_path) == [10, 8]
    assert ltx.elastic(*make(), batch, START, epochs=2, snapshots=tmp_path)[0].step == 10
    shutil.rmtree(tmp_path)


def test_processes_that_leave_at_once_leave_nothing(tmp_path: Path) -> None:
    """Where each had looked whether it was the last before any had gone, the lock's file stayed."""
    context = get_context("fork")
    together = context.Barrier(3)

    def leave(first: bool) -> None:
        for _ in range(40):
            if not first:
                together.wait(60)
            hold = Hold(tmp_path, first)
            if first:
                together.wait(60)
            together.wait(60)
            hold.release()
            together.wait(60)
            together.wait(60)  # while it is looked at

    processes = [context.Process(target=leave, args=(first,)) for first in (True, False)]
    for process in processes:
        process.start()
    found = []
    for _ in range(40):
        for _ in range(3):
            together.wait(60)
        found += os.listdir(tmp_path)
        together.wait(60)
    for process in processes:
        process.join()
    assert found == []
