"""The example of torchft: replicas that are killed and come again have the values of a plain loop, bit for bit."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import replicas
from tests.programs import writing

pytestmark = [
    pytest.mark.timeout(300),  # several processes start, some of them twice
    pytest.mark.skipif(find_spec("torchft") is None, reason="needs pip install 'ltx[torchft]'"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:google"),
]
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


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_that_nobody_disturbs_are_ddp(start: Start, ranks: int, tmp_path: Path) -> None:
    ends_well(*[start(name, 12, ranks=ranks) for name in "ab"], folder=tmp_path)
    assert set(replicas.check(tmp_path, ranks, alive=2 * ranks)) == {2}


@pytest.mark.full
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
