"""A round of chaos of each kind, with new seeds each time; the how-to's program, of which ranks are killed at random.

``make chaos CHAOS="--minutes 120"`` goes on for longer.
"""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.chaos.rounds import draw, play
from tests.programs import writing
from tests.restarts import STEPS, check_end


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["restarts", "three replicas", "two replicas"])
def test_a_round_of_chaos(kind: str, seed: int) -> None:
    if kind != "restarts" and find_spec("torchft") is None:
        pytest.skip("needs pip install 'ltx[torchft]'")
    rng, drawn = random.Random(seed), -1
    while {"restarts": drawn % 3 != 0, "two replicas": drawn % 6 not in (2, 4)}.get(kind, drawn % 6 not in (1, 5)):
        drawn = rng.randrange(2**31)
    print(f"python -m tests.chaos --seed {drawn} plays this round again")
    play(drawn)


def test_a_seed_draws_the_same_troubles_and_spares_one() -> None:
    kinds = set()
    for seed in range(300):
        troubles = draw(seed, 3)
        assert troubles == draw(seed, 3)
        assert 1 <= len(troubles) <= 3
        assert len({trouble.who for trouble in troubles}) < 3
        kinds |= {trouble.kind for trouble in troubles}
    assert kinds == {"kill", "stop"}


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


@pytest.mark.full
@pytest.mark.timeout(300)  # several processes start, all of them twice
def test_all_ranks_start_again_from_the_last_checkpoint(tmp_path: Path, seed: int) -> None:
    at, who = random.Random(seed).randrange(STEPS), random.Random(seed).randrange(2)
    mine = "tests.restarts", str(tmp_path), str(at), str(who)
    done = writing(tmp_path, "ltx", "run", "-n", "2", "--max-restarts", "1", "-m", *mine)
    assert done.wait(200) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    check(tmp_path, at, (2, 2), at // EVERY * EVERY)


@pytest.mark.full
@pytest.mark.timeout(300)  # several processes start, all of them twice
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
