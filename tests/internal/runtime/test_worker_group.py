"""Worker processes: how they start, and that nothing of them is left however they or the driver end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ltx
from ltx import Pool
from ltx.errors import WorkerError
from ltx.runtime.worker import starter
from ltx.runtime.worker_group import WorkerGroup
from tests.covering import some
from tests.forks import free_port

ROOT = Path(__file__).parents[3]


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that its parent (here maybe a container's init) hasn't reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _wait_until_gone(pids: list[int], limit_s: float = 60.0) -> list[int]:
    deadline = time.monotonic() + limit_s
    while (left := [pid for pid in pids if not _is_gone(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _workers(size: int, start_timeout_s: float) -> WorkerGroup:
    return WorkerGroup(size, starter("popen", size, threads=1), 1, start_timeout_s)


class Driver:
    """A process of its own that runs `script`, with a temp folder of its own."""

    def __init__(self, script: str, temp: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temp)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    (tmp_path / "temp").mkdir()
    return tmp_path / "temp"


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.close()


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
def test_workers_end_when_the_driver_is_killed(drivers: list[Driver], temp: Path) -> None:
    driver = Driver(HANGS + "pool.run(hang)", temp)
    drivers.append(driver)
    pids = [int(pid) for pid in driver.line().split()]
    assert driver.line() == "hanging"
    driver.process.kill()
    assert _wait_until_gone(pids) == []
    assert list(temp.iterdir()) == []


@pytest.mark.full
def test_workers_end_with_a_driver_that_forgets_to_close(drivers: list[Driver], temp: Path) -> None:
    driver = Driver(HANGS, temp)
    drivers.append(driver)
    pids = [int(pid) for pid in driver.line().split()]
    assert driver.process.wait(timeout=90) == 0
    assert _wait_until_gone(pids, limit_s=0.0) == [], "the driver waits for them before it ends"
    assert list(temp.iterdir()) == []


def test_an_interrupt_while_the_ranks_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    send = WorkerGroup.send

    def interrupted(self: WorkerGroup, rank: int, message: Any) -> bool:
        monkeypatch.undo()
        assert send(self, rank, message)
        raise KeyboardInterrupt

    with Pool(2, grace_s=60) as pool:
        pids = pool.pids
        monkeypatch.setattr(WorkerGroup, "send", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"rank 0 .*The workers keep their state"):
            pool.run(lambda: ltx.psum(torch.ones(1)))
        assert list(pool.run(os.getpid)) == pids


@pytest.mark.full
def test_close_leaves_nothing() -> None:
    sockets = len(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    workers = _workers(2, start_timeout_s=100.0)
    print(f"cold start of 2 workers: {time.monotonic() - began:.2f} s")
    pids = workers.pids
    assert not any(_is_gone(pid) for pid in pids)
    workers.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "reaped, so not even zombies"
    assert len(os.listdir("/proc/self/fd")) == sockets
    workers.stop()
    workers.kill()


@pytest.mark.full
def test_a_forgotten_crew_ends() -> None:
    pids = _workers(1, start_timeout_s=100.0).pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.full
def test_a_fork_of_the_driver_leaves_the_workers_alone() -> None:
    workers = _workers(1, start_timeout_s=100.0)
    try:
        assert workers.is_ours
        child = os.fork()
        if child == 0:
            seen_as_ours = workers.is_ours
            workers.kill()
            workers.stop()
            os._exit(int(seen_as_ours))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not _is_gone(workers.pids[0])
    finally:
        workers.stop()


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


# --- Two real processes with torchrun's environment: they meet, and they end without being aborted -------------------


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

# For each: the script, and the exit status and last line of each rank.
SCRIPTS = {
    "with": (
        "with init(timeout=timeout) as here:\n    out = here.rank, here.size, total(), gloo_threads() > 0\n"
        "print(*out, dist.is_initialized(), gloo_threads())",
        [(0, "0 2 3.0 True False 0"), (0, "1 2 3.0 True False 0")],
    ),
    "one world after the other": (
        "for turn in range(3):\n    init(timeout=timeout)\n    out = total()\n    shutdown()\nprint(out)",
        [(0, "3.0"), (0, "3.0")],
    ),
    "no shutdown, and rank 0, which hosts the store, ends first": (
        "init(timeout=timeout)\nprint(total())\nif world().rank == 0: sys.exit(0)\ntime.sleep(0.3)\nprint('later')",
        [(0, "3.0"), (0, "later")],
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
    "one more step on a rank than on the other": (
        "here = init(timeout=timeout)\n"
        "total()\n"
        "if here.rank == 1: sys.exit(0)\n"
        "try:\n"
        "    total()\n"
        "except ltx.errors.PeerLostError as error:\n"
        "    print('rank 1 has ended its part of the world in good order' in str(error), 'ltx.uneven' in str(error))",
        [(0, "True True"), (0, "")],
    ),
    "one more step on a rank than on the other, of another shape": (
        "here = init(timeout=timeout)\n"
        "total()\n"
        "if here.rank == 1: sys.exit(0)\n"
        "try:\n"
        "    ltx.psum(torch.ones(3))\n"
        "except ltx.errors.PeerLostError as error:\n"
        "    print('rank 1 has ended its part of the world in good order' in str(error), 'ltx.uneven' in str(error))",
        [(0, "True True"), (0, "")],
    ),
    "an exception that nobody catches": ("init(timeout=timeout)\ntotal()\n1 / 0", [(1, ""), (1, "")]),
}


def _launch(command: list[str], **environment: str) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    return subprocess.Popen(
        [sys.executable, *command],
        env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run_both(script: str) -> tuple[list[tuple[int, str]], list[str]]:
    """(exit status and last line of each rank, what each has said on stderr)"""
    port = str(free_port())
    processes = [
        _launch(
            ["-c", PREAMBLE + script], RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    ends = [
        (process.returncode, out.strip().rpartition("\n")[2])
        for process, (out, _) in zip(processes, outputs, strict=True)
    ]
    return ends, [err for _, err in outputs]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("case", some(SCRIPTS, "with", "one more step on a rank than on the other"))
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


@pytest.mark.full
def test_torchrun_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    turns = (
        "for turn in range(2):\n"
        "    with init() as here:\n"
        "        sys.stdout.write(f'{here.launcher} {here.local_rank} {total()}\\n')\n"
    )
    script.write_text(PREAMBLE + turns)
    command = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    process = _launch([*command, f"--master-port={free_port()}", str(script)])
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert sorted(out.split("\n")[:-1]) == ["torchrun 0 3.0"] * 2 + ["torchrun 1 3.0"] * 2
