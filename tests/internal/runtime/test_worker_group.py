"""Worker processes: how they start, and that nothing of them is left however they or the driver end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx import Pool
from ltx.errors import CallInterruptedError, WorkerError
from ltx.runtime.worker import starter
from ltx.runtime.worker_group import WorkerGroup
from tests.forks import settles
from tests.kinds import Ranks
from tests.programs import begun, end
from tests.train_on import refuses


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that its parent (here maybe a container's init) hasn't reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _left(pids: list[int]) -> list[int]:
    return [pid for pid in pids if not _is_gone(pid)]


def _workers(size: int, start_timeout_s: float) -> WorkerGroup:
    return WorkerGroup(size, starter("popen", size, threads=1), start_timeout_s)


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    (tmp_path / "temp").mkdir()
    return tmp_path / "temp"


@pytest.fixture
def driver(temp: Path) -> Iterator[Callable[[str], tuple[Any, Callable[[], str]]]]:
    """``driver(script)`` is a process of its own that runs it, and what reads the next line that it prints."""
    started: list[Any] = []

    def start(script: str) -> tuple[Any, Callable[[], str]]:
        started.extend(begun(["-c", script], [{"TMPDIR": str(temp)}]))
        return started[-1], lambda: started[-1].stdout.readline().strip()

    yield start
    end(started)


HANGS = """
import os, time, torch, ltx
from ltx.runtime.pool import Pool
from ltx.core.world.world import world
pool = Pool(2, grace_s=60)
print(*pool.run(os.getpid), flush=True)
def hang():
    if world().rank == 1:
        print("hanging", flush=True)
        time.sleep(100)
    ltx.psum(torch.ones(1))
"""


@pytest.mark.full
@pytest.mark.parametrize("killed", [True, False], ids=["is killed", "forgets to close"])
def test_workers_end_with_the_driver(killed: bool, driver: Any, temp: Path) -> None:
    process, line = driver(HANGS + ("pool.run(hang)" if killed else ""))
    pids = [int(pid) for pid in line().split()]
    if killed:
        assert line() == "hanging"
        process.kill()
        assert settles(lambda: _left(pids), lambda left: not left, limit_s=60.0) == []
    else:
        assert process.wait(timeout=90) == 0
        assert _left(pids) == [], "the driver waits for them before it ends"
    assert list(temp.iterdir()) == []


def test_an_interrupt_while_the_ranks_are_asked(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    send = WorkerGroup.send

    def interrupted(self: WorkerGroup, rank: int, message: Any) -> bool:
        monkeypatch.undo()
        assert send(self, rank, message)
        raise KeyboardInterrupt

    pool, pids = ranks(2), list(ranks(2).run(os.getpid))
    with pytest.MonkeyPatch.context() as patient:
        patient.setattr(pool, "_grace_s", 60.0)
        monkeypatch.setattr(WorkerGroup, "send", interrupted)
        refuses(KeyboardInterrupt, r"rank 0 .*The workers keep their state", pool.run, lambda: ltx.psum(torch.ones(1)))
    assert list(pool.run(os.getpid)) == pids


@pytest.mark.full
def test_a_forgotten_crew_ends() -> None:
    pids = _workers(1, start_timeout_s=100.0).pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.full
def test_a_fork_of_the_driver_leaves_the_workers_alone() -> None:
    workers = _workers(1, start_timeout_s=100.0)
    try:
        child = os.fork()
        if child == 0:
            workers.kill()
            workers.stop()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not _is_gone(workers.pids[0])
    finally:
        workers.stop()


def test_an_interrupt_while_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGroup, "receive", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(CallInterruptedError) as caught:
        Pool(2)
    told = "CallInterruptedError: 2 workers were interrupted as they started, and ended."
    assert caught.value._render_traceback_() == [told], "what a notebook shows, instead of frames"


def test_workers_that_are_not_up_in_time() -> None:
    with pytest.raises(WorkerError, match=r"the workers of ranks \[0, 1\] of 2 didn't start within 0.05 s"):
        _workers(2, start_timeout_s=0.05)


@pytest.mark.full
def test_a_worker_that_fails_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface")
    with pytest.raises(WorkerError, match=r"the worker of rank 0 of 1 failed to start: WorldError: (.|\n)*Traceback"):
        _workers(1, start_timeout_s=100.0)


def test_a_worker_that_ends_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match=r"the worker of rank 0 of 1 exited with status 1 when it was to start"):
        _workers(1, start_timeout_s=100.0)
