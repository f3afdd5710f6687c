"""Workers and ranks of torchrun: how they start, and that nothing of them is left however they or the driver end."""

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
from tests.covering import some
from tests.forks import settles
from tests.kinds import Ranks
from tests.programs import begun, end, finished, of_torchrun
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
    assert not any(Path(f"/proc/{pid}").exists() for pid in _workers(1, start_timeout_s=100.0).pids)


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
    refuses(WorkerError, r"the workers of ranks \[0, 1\] of 2 didn't start within 0.05 s", _workers, 2, 0.05)


@pytest.mark.full
def test_a_worker_that_fails_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface")
    text = r"the worker of rank 0 of 1 failed to start: WorldError: (.|\n)*Traceback"
    refuses(WorkerError, text, _workers, 1, start_timeout_s=100.0)


def test_a_worker_that_ends_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match=r"the worker of rank 0 of 1 exited with status 1 when it was to start"):
        _workers(1, start_timeout_s=100.0)


PREAMBLE = """
import glob, sys, time, torch, ltx
import torch.distributed as dist
from datetime import timedelta
from ltx.core.world.init import init
from ltx.core.world.world import shutdown, world
def total():
    return float(ltx.psum(torch.tensor(1.0 + world().rank)))
def name_of(thread):
    try:
        return open(thread).read()
    except OSError:  # it has just ended
        return ""
def gloo_threads():
    return sum("gloo" in name_of(thread) for thread in glob.glob("/proc/self/task/*/comm"))
timeout = timedelta(seconds=60)
"""

ONE_MORE = """
here = init(timeout=timeout)
total()
if here.rank == 1: sys.exit(0)
try:
    {}
except ltx.errors.PeerLostError as error:
    print('rank 1 has ended its part of the world in good order' in str(error), 'ltx.uneven' in str(error))
"""
SCRIPTS = {
    "with": (
        "with init(timeout=timeout) as here:\n    out = here.rank, here.size, total(), gloo_threads() > 0\n"
        "print(*out, dist.is_initialized(), gloo_threads())",
        [(0, "0 2 3.0 True False 0"), (0, "1 2 3.0 True False 0")],
    ),
    "no shutdown, and rank 0, which hosts the store, ends first": (
        "init(timeout=timeout)\nprint(total())\nif world().rank == 0: sys.exit(0)\ntime.sleep(0.3)\nprint('later')",
        [(0, "3.0"), (0, "later")],
    ),
    "init again, after the other has ended in good order": (
        "out = init(timeout=timeout).rank, total()\n"
        "if world().rank == 1: time.sleep(0.5)\n"
        "print(*out, init(timeout=timeout).size)",
        [(0, "0 3.0 2"), (0, "1 3.0 2")],
    ),
    "an exception on one rank while the other waits for it": (
        "try:\n"
        "    with init(timeout=timeout):\n"
        "        total()\n"
        "        if world().rank == 1: raise KeyError('mine')\n"
        "        total()\n"
        "except BaseException as error:\n"
        "    print(type(error).__name__, dist.is_initialized())\n"
        "    sys.exit(5)",
        [(5, "DeadlockDetectedError False"), (5, "KeyError False")],
    ),
    "an exception on one rank with a collective under way that the other never joins": (
        "from ltx.core.comm import resolve\n"
        "init(timeout=timeout)\n"
        "total()\n"
        "if world().rank == 0:\n"
        "    work = resolve(None).comm.background.issue('psum', torch.ones(3), 'pending')\n"
        "    raise KeyError('mine')\n"
        "try:\n"
        "    total()\n"
        "except Exception:\n"
        "    print('told')",
        [(1, ""), (0, "told")],
    ),
    "one more step on a rank than on the other": (ONE_MORE.format("total()"), [(0, "True True"), (0, "")]),
    "one more step on a rank than on the other, of another shape": (
        ONE_MORE.format("ltx.psum(torch.ones(3))"),
        [(0, "True True"), (0, "")],
    ),
    "an exception that nobody catches": ("init(timeout=timeout)\ntotal()\n1 / 0", [(1, ""), (1, "")]),
}


def _run_both(script: str) -> tuple[list[tuple[int, str]], list[str]]:
    """(exit status and last line of each rank, what each has said on stderr)"""
    done = finished(begun(["-c", PREAMBLE + script], of_torchrun(2)))
    return [(status, out.strip().rpartition("\n")[2]) for status, out, _ in done], [err for *_, err in done]


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    "case",
    some(SCRIPTS, "init again, after the other has ended in good order", "one more step on a rank than on the other"),
)
def test_two_ranks(case: str) -> None:
    script, expected = SCRIPTS[case]
    ends, errors = _run_both(script)
    assert ends == expected, "\n".join(errors)


@pytest.mark.full
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.full), 1])
def test_what_is_under_way_in_the_background_is_joined_at_the_end(ahead: int) -> None:
    """One rank has begun a round more than the other, and neither finishes."""
    ends, errors = _run_both(
        "from ltx.strategies.async_averaging import AsyncAveraging\n"
        "with init(timeout=timeout) as here:\n"
        "    step = ltx.data_parallel(lambda p, x: (p * x).sum(), AsyncAveraging(sync_interval_ms=0))\n"
        "    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))\n"
        "    state = train.init(torch.zeros(3))\n"
        "    def begun():\n"
        "        return sum(event.label == 'background 0' for event in trace.events)\n"
        "    with ltx.profile.record() as trace:\n"
        f"        while begun() < 3 + (here.rank == {ahead}):\n"
        "            state, _ = train(state, torch.ones(3))\n"
        "try:\n"
        "    state.pending.mean.wait()\n"
        "except ltx.errors.AxisError as error:\n"
        "    print('given up' in str(error))"
    )
    assert [status for status, _ in ends] == [0, 0]
    assert ends[ahead] == (0, "True")  # the other's last round may be complete
    assert errors == ["", ""]
