"""Two real processes with torchrun's environment: they meet, and they end without being aborted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import some
from tests.forks import free_port

ROOT = Path(__file__).parents[3]

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
