"""The how-to's program is killed at random, and ends with the values of a run that nobody has disturbed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.programs import writing
from tests.restarts import STEPS, check_end

# Several processes start, all of them twice.
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
EVERY = 4  # the page's program saves so often


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]


def check(folder: Path, killed_at: int, sizes: tuple[int, int], went_on_at: int) -> None:
    """Every step was done by `sizes` ranks (before, after the restart), and the values are those of a plain loop."""
    done = entries(folder)
    again = [entry for entry in done if entry["attempt"] > 0]
    assert {entry["step"] for entry in again} == set(range(went_on_at, STEPS))
    assert {entry["size"] for entry in again} == {sizes[1]}
    killed = max(entry["time"] for entry in done if entry["attempt"] == 0 and entry["step"] == killed_at)
    print(f"killed in step {killed_at}; {min(e['time'] for e in again) - killed:.1f} s to the next step, {went_on_at}")
    check_end(folder, [sizes[0]] * went_on_at + [sizes[1]] * (STEPS - went_on_at))


def test_all_ranks_start_again_from_the_last_checkpoint(tmp_path: Path, seed: int) -> None:
    at, who = random.Random(seed).randrange(STEPS), random.Random(seed).randrange(2)
    mine = "tests.restarts", str(tmp_path), str(at), str(who)
    done = writing(tmp_path, "ltx", "run", "-n", "2", "--max-restarts", "1", "-m", *mine)
    assert done.wait(200) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    check(tmp_path, at, (2, 2), at // EVERY * EVERY)


def test_a_machine_is_lost_and_the_other_goes_on_alone(tmp_path: Path, seed: int) -> None:
    """Two launchers stand for two machines; one is killed with its rank."""
    at = random.Random(seed).randrange(STEPS)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # the endpoint, which lives
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1"]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{store.port}", "--local-addr=localhost"]
    options += ["--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2,is_host=0"]
    mine = "tests.restarts", str(tmp_path), str(at), "1", "and its launcher"
    both = [writing(tmp_path, "torch.distributed.run", *options, "-m", *mine) for _ in range(2)]
    codes = sorted(launcher.wait(200) for launcher in both)
    if codes[0] != -9 or not list(tmp_path.glob("end.*.pt")):
        pytest.fail((tmp_path / "output.txt").read_text()[-3000:])
    check(tmp_path, at, (2, 1), at // EVERY * EVERY)
