"""Rounds of chaos of each kind, with new seeds; the how-to's program and torchft's example, whose ranks die.

``make chaos CHAOS="--minutes 120"`` goes on for longer.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests import replicas
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


NEEDS_TORCHFT = pytest.mark.skipif(find_spec("torchft") is None, reason="needs pip install 'ltx[torchft]'")
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(name, steps, kill=0, ranks=1)`` starts a replica, one of two that begin together."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000)
    common = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "LTX_TEST_REPLICAS": "2"}
    running: list[subprocess.Popen[bytes]] = []

    def run(name: str, steps: int, kill: int = 0, ranks: int = 1) -> subprocess.Popen[bytes]:
        mine = ["-m", "tests.replicas", str(tmp_path), name, str(steps), str(kill)]
        launcher = ["ltx", "run", "-n", str(ranks), "--max-restarts", "1"]
        running.append(writing(tmp_path, *launcher, *mine, **common))
        return running[-1]

    yield run
    for process in running:
        process.terminate()  # the launcher ends its ranks
        process.wait(30)
    lighthouse.shutdown()


def ends_well(*processes: subprocess.Popen[bytes], folder: Path) -> None:
    for process in processes:
        if process.wait(200) != 0:
            pytest.fail((folder / "output.txt").read_text(errors="replace")[-4000:])


@NEEDS_TORCHFT
@pytest.mark.filterwarnings("ignore::DeprecationWarning:google")
@pytest.mark.full
@pytest.mark.timeout(300)  # several processes start, some of them twice
@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_that_nobody_disturbs_are_ddp(start: Start, ranks: int, tmp_path: Path) -> None:
    ends_well(*[start(name, 12, ranks=ranks) for name in "ab"], folder=tmp_path)
    assert set(replicas.check(tmp_path, ranks, alive=2 * ranks)) == {2}


@NEEDS_TORCHFT
@pytest.mark.filterwarnings("ignore::DeprecationWarning:google")
@pytest.mark.full
@pytest.mark.timeout(300)  # several processes start, some of them twice
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replica_is_killed_and_healed(start: Start, ranks: int, tmp_path: Path, seed: int) -> None:
    at, steps = random.Random(seed).randrange(2, 10), 20
    ends_well(start("a", steps, ranks=ranks), start("b", steps, kill=at, ranks=ranks), folder=tmp_path)
    counts = replicas.check(tmp_path, ranks, alive=2 * ranks)
    assert counts[: at - 1] == [2] * (at - 1)
    assert {1, 2} == set(counts), "one goes on alone, and the other comes back"
    entries = replicas.steps_of(tmp_path)
    (killed,) = [entry["killed"] for entry in entries if "killed" in entry]
    mine = [entry for entry in entries if entry["name"] == "a" and entry["rank"] == 0]
    assert [entry["step"] for entry in mine if not entry["committed"]] == [at - 1], "one step doesn't count"
    print(f"killed in step {at}: {min(e['time'] for e in mine if e['step'] == at) - killed:.1f} s to the next step")
