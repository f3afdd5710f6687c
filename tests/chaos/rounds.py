"""Rounds of chaos: trainings with troubles at random moments, and what has to hold afterwards.

Two rounds of three are of replicas (examples/torchft_hook.py), two or three of them: they are killed, stopped, started
again. Those that live have to agree bit for bit after each step, no sample may be lost, and the end has to be that of a
plain loop. In the third, ranks that save checkpoints (docs/how-to/elastic.md) are killed and stopped, and all of them
start again: the end has to be that of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests import replicas, restarts
from tests.programs import writing

_LIMIT_S = 150.0
#: A restart, or a replica that is looked for, takes some seconds; the troubles come when the training runs.
_PAUSE_S = "0.1"


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong, drawn from a seed: the same seed gives the same troubles.

    Attributes:
        kind: "kill": SIGKILL, and after `lasts_s` it is started again. "stop": SIGSTOP, and after `lasts_s` SIGCONT.
        who: to which replica, or to which rank.
        after_s: so long after the trouble before has begun, or the training.
        lasts_s: see `kind`.
    """

    kind: Literal["kill", "stop"]
    who: int
    after_s: float
    lasts_s: float


def draw(seed: int, count: int, troubles: int = 3) -> list[Trouble]:
    """Some troubles to one or several of `count` replicas, at any moment; one of them has none."""
    rng = random.Random(seed)
    spared = rng.randrange(count)  # if all were lost, their state would be too
    return [
        Trouble(
            rng.choice(("kill", "stop")),
            rng.choice([who for who in range(count) if who != spared]),
            rng.uniform(0.0, 3.0),
            rng.choice((rng.uniform(0.0, 1.0), rng.uniform(0.0, 8.0))),
        )
        for _ in range(rng.randint(1, troubles))
    ]


def play(seed: int) -> list[Trouble]:
    """One round. Returns what went wrong in it; raises AssertionError if that did more than it may."""
    with tempfile.TemporaryDirectory(prefix="ltx-chaos-") as folder:
        try:
            return (with_restarts if seed % 3 == 0 else with_replicas)(Path(folder), seed)
        except AssertionError as error:
            error.add_note((Path(folder) / "output.txt").read_text(errors="replace")[-6000:])
            raise


def with_restarts(folder: Path, seed: int) -> list[Trouble]:
    """Two ranks; each kill ends both, which start again from their last checkpoint."""
    troubles = draw(seed, 3, troubles=2)
    command = ["ltx", "run", "-n", "2", "--max-restarts", "9", "-m", "tests.restarts", str(folder), "-1", "0"]
    process = writing(folder, *command, LTX_TEST_PAUSE=_PAUSE_S)
    with _all({0: process}):
        for trouble in troubles:
            _until(lambda: _pids(folder), process)
            time.sleep(trouble.after_s)
            pid = _pids(folder)[trouble.who % 2]
            with suppress(ProcessLookupError):  # it has come to its end
                os.kill(pid, signal.SIGKILL if trouble.kind == "kill" else signal.SIGSTOP)
                time.sleep(trouble.lasts_s)
                os.kill(pid, signal.SIGCONT)
        assert process.wait(_LIMIT_S) == 0
    restarts.check_end(folder, [2] * restarts.STEPS)
    return troubles


def _pids(folder: Path) -> list[int]:
    """The process ids of the latest attempt's ranks, once both have begun a step."""
    attempts = sorted({int(file.name.partition(".")[0]) for file in folder.glob("*.jsonl")})
    files = sorted(folder.glob(f"{attempts[-1]}.*.jsonl")) if attempts else []
    pids = [json.loads(file.read_text().partition("\n")[0])["pid"] for file in files]
    return pids if len(pids) == 2 else []


def with_replicas(folder: Path, seed: int) -> list[Trouble]:
    """Two or three replicas of a rank each, of which one lives all the time."""
    from torchft.coordination import LighthouseServer

    count = 2 + seed % 2
    troubles, signals = draw(seed, count), list[tuple[str, float]]()
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000)
    environment = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "LTX_TEST_REPLICAS": str(count)}
    environment["LTX_TEST_PAUSE"] = _PAUSE_S
    running: dict[int, subprocess.Popen[bytes]] = {}
    with _all(running):

        def start(who: int) -> None:
            running[who] = writing(folder, "tests.replicas", str(folder), str(who), "?", **environment)

        def took_part(since: float) -> bool:
            """Whether all replicas have been in a step since then."""
            done = [entry for entry in replicas.steps_of(folder) if entry.get("committed") and entry["time"] > since]
            return {entry["name"] for entry in done if entry["replicas"] == count} == {*map(str, range(count))}

        for who in range(count):
            start(who)
        _until(lambda: took_part(0.0), *running.values())
        for trouble in troubles:
            time.sleep(trouble.after_s)
            process = running[trouble.who]
            signals.append((str(trouble.who), time.time()))
            process.send_signal(signal.SIGKILL if trouble.kind == "kill" else signal.SIGSTOP)
            time.sleep(trouble.lasts_s)
            process.send_signal(signal.SIGCONT)
            if trouble.kind == "kill":
                process.wait()
                start(trouble.who)
        since = time.time()
        _until(lambda: took_part(since), *running.values())
        last = max(entry["step"] for entry in replicas.steps_of(folder) if "step" in entry) + 10
        (folder / "last.new").write_text(str(last))
        (folder / "last.new").rename(folder / "last")
        for process in running.values():
            assert process.wait(_LIMIT_S) == 0
    lighthouse.shutdown()
    entries = replicas.steps_of(folder)

    def stray(entry: dict[str, Any]) -> bool:
        mine = [e["time"] for e in entries if (e["name"], e["attempt"]) == (entry["name"], entry["attempt"])]
        following = min((at for at in mine if at > entry["time"]), default=float("inf"))
        return any(name == entry["name"] and entry["time"] - 1 < at < following for name, at in signals)

    replicas.check(folder, 1, count, stray)
    return troubles


def _until(happens: Callable[[], object], *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not happens():
        if all(process.poll() == 0 for process in processes):
            return  # they have come to their end already
        assert not any(process.poll() for process in processes), "a process has failed"
        assert time.monotonic() < deadline, "it doesn't happen"
        time.sleep(0.1)


@contextmanager
def _all(running: dict[int, subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in running.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(30)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m tests.chaos --minutes 120``: round after round, until one fails or the time is over."""
    import argparse
    import secrets

    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=play.__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="for how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="play the round of this seed, and no other")
    parsed = parser.parse_args(arguments)
    if parsed.seed is not None:
        print(*play(parsed.seed), sep="\n")
        return 0
    end, rounds = time.monotonic() + 60 * parsed.minutes, 0
    while time.monotonic() < end:
        seed = secrets.randbelow(2**31)
        print(f"--seed {seed}", end=": ", flush=True)  # first: it is there also if the round fails
        told = [f"{t.kind} {t.who} after {t.after_s:.1f} s for {t.lasts_s:.1f} s" for t in play(seed)]
        print(*told, sep=", ", flush=True)
        rounds += 1
    print(f"{rounds} rounds, all as they should be")
    return 0
