"""``ltx.launch`` with each way to start processes: results, failures, refusals, and that nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import ltx
from ltx.errors import ArgumentError, CallFailedError, CallInterruptedError, CallTimeoutError, WorkerError
from tests.covering import some
from tests.kinds import Ranks
from tests.programs import begun, finished
from tests.train_on import refuses, said

SCRIPT = """
import os, sys, torch, ltx
def step(x):
    return float(ltx.psum(x)), ltx.world().rank, ltx.world().size, torch.get_num_threads()
if __name__ == "__main__":
    print(ltx.launch(step, 2, torch.tensor(1.5), start_method=sys.argv[1]))
"""


def _run(script: str, tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    """(exit status, output, errors)"""
    (file := tmp_path / "script.py").write_text(script)
    return finished(begun([str(file), *arguments], [{}]))[0]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("method", some(["popen", "fork", "spawn", "forkserver"], "fork", "spawn"))
def test_every_way_to_start_gives_each_ranks_result(method: str, tmp_path: Path) -> None:
    _, out, err = _run(SCRIPT, tmp_path, method)
    assert out.strip() == "[(3.0, 0, 2, 1), (3.0, 1, 2, 1)]", err


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_is_told(method: str, tmp_path: Path) -> None:
    status, _, err = _run(f"import ltx\nltx.launch(print, 1, start_method={method!r})", tmp_path)
    assert status == 1
    assert "runs this script again in every process" in err
    assert 'if __name__ == "__main__":' in err


def test_a_fork_has_what_does_not_pickle() -> None:
    lock = threading.Lock()

    def locked() -> int:
        with lock:
            return ltx.world().rank

    assert ltx.launch(locked, 2, start_method="fork") == [0, 1]
    refuses(WorkerError, r"locked and its arguments can't be sent to the workers", ltx.launch, locked, 2)


def test_a_strategys_way_to_start() -> None:
    lock = threading.Lock()  # only a fork has it
    assert ltx.launch(lock.locked, 1, strategy=ltx.DDPStrategy(start_method="fork")) == [False]
    with pytest.raises(WorkerError, match="can't be sent to the workers"):
        ltx.launch(lock.locked, 1, start_method="popen", strategy=ltx.DDPStrategy(start_method="fork"))


def test_a_fork_does_not_share_memory_with_this_process() -> None:
    x = torch.zeros(3)
    assert ltx.launch(lambda: float(x.add_(1).sum()), 2, start_method="fork") == [3.0, 3.0]
    assert x.sum().item() == 0.0


@pytest.mark.parametrize("method", some(["popen", "fork"], "fork"))
def test_the_first_failure_is_told_and_peers_do_not_wait(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        if ltx.world().rank == 1:
            raise ValueError("no such luck")
        ltx.psum(torch.ones(2))

    monkeypatch.setattr("ltx.runtime.worker_group.PATIENCE_S", 30.0)  # rank 0 gets to say what came of it
    with pytest.raises(CallFailedError, match=r"^rank 1 of 2 raised ValueError: no such luck\n") as caught:
        ltx.launch(fails, 2, start_method=method)  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, ValueError)
    assert "rank 0 raised DeadlockDetectedError" in str(caught.value)
    assert "The workers" not in str(caught.value), "nobody expects them to be there"


@pytest.mark.full
def test_a_time_limit() -> None:
    with pytest.raises(CallTimeoutError, match=r"sleep didn't return on ranks 0, 1 of 2 within 1 s"):
        ltx.launch(time.sleep, 2, 100.0, start_method="fork", timeout=timedelta(seconds=1))


@pytest.mark.full
def test_an_interrupt_says_nothing_of_workers_that_are_gone() -> None:
    def interrupts() -> None:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(50)

    with pytest.raises(CallInterruptedError, match=r"interrupts was interrupted: rank 0 was at [^;]*") as caught:
        ltx.launch(interrupts, 1, start_method="fork")
    assert "The workers" not in str(caught.value)
    assert not caught.value.kept


def test_nothing_is_left() -> None:
    gc.collect()  # what earlier tests have left is no gain of this one
    sockets = len(os.listdir("/proc/self/fd"))
    assert not any(Path(f"/proc/{pid}").exists() for pid in ltx.launch(os.getpid, 2, start_method="fork"))
    assert len(os.listdir("/proc/self/fd")) == sockets


@pytest.mark.full
def test_forks_are_refused_where_they_would_share_connections(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        "import torch.distributed as dist, ltx\n"
        f"dist.init_process_group('gloo', store=dist.FileStore('{tmp_path}/store', 1), rank=0, world_size=1)\n"
        "try:\n    ltx.launch(print, 2, start_method='fork')\n"
        "except ltx.errors.WorkerError as error:\n    print(error)\n"
        "dist.destroy_process_group()\n"
    )
    assert "torch.distributed is initialised in this process" in _run(script, tmp_path)[1]
    text = r'threads=2, start_method="fork".*OpenMP hangs'
    refuses(WorkerError, text, ltx.launch, print, 2, start_method="fork", threads=2)


def test_forks_are_refused_after_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    refuses(WorkerError, "CUDA is initialised in this process", ltx.launch, print, 2, start_method="fork")


def test_arguments_that_are_none_of_it(ranks: Ranks) -> None:
    for error, text, given in (
        (WorkerError, "start_method must be one of 'popen', 'spawn', 'fork', 'forkserver'", {"start_method": "thread"}),
        (ArgumentError, "launch: strategy must be Strategy or None, got 'fork' of type str", {"strategy": "fork"}),
        (WorkerError, r"ltx\.launch: threads must be a whole number of at least 1, got 0", {"threads": 0}),
    ):
        refuses(error, text, ltx.launch, print, 2, **given)
    assert "was called inside a worker" in ranks(2).run(said, WorkerError, ltx.launch, print, 2).rank(0)
