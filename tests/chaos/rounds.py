"""A round of chaos: a short training of three ranks with the troubles of one seed, and what has to hold afterwards."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.chaos.schedule import LOSSES, Trouble, draw
from tests.chaos.training import EPOCHS, SIZE, shares, training
from tests.contract.runtime.elastic_training import SAMPLES, STEPS
from tests.forks import Body, Ranks

# Longer than a pause; a rank that has been stopped for so long counts as lost.
_HEARTBEAT_S = 6.0
_PAUSE_S = 0.3
_LIMIT_S = 90.0

Entry = tuple[int, int, int, int, list[int], float]  # which world, step, rank, size, samples, loss


def play(seed: int) -> list[Trouble]:
    """One round. Returns what went wrong in it; raises AssertionError if that did more than it may."""
    troubles = draw(seed, SIZE, EPOCHS * STEPS)
    # What cuts connections goes for sockets; other rounds go through shared memory half of the time.
    cut = any(trouble.kind == "cut" for trouble in troubles)
    sockets = cut or bool(seed % 2)
    # A third of them on streams, where a connection that breaks shows by a timeout alone.
    streams = not cut and seed % 3 == 0
    before = _left_behind()
    with tempfile.TemporaryDirectory(prefix="ltx-chaos-") as folder:
        ended = _train(Path(folder), troubles, sockets, streams)
        assert ended, "no rank has come to the end"
        _check_agreement(ended)
        losses = _check_samples(Path(folder))
        _check_snapshots(Path(folder) / "snapshots")
    if not any(trouble.kind in (*LOSSES, "join") for trouble in troubles):
        assert [end["size"] for end in ended] == [SIZE] * SIZE, "a rank was lost for good"
        with tempfile.TemporaryDirectory(prefix="ltx-chaos-") as folder:
            calm = _train(Path(folder), [trouble for trouble in troubles if trouble.kind == "nan"], sockets, streams)
            assert ended[0]["state"] == calm[0]["state"], "the state isn't that of the undisturbed run"
            assert losses == _check_samples(Path(folder)), "the losses aren't those of the undisturbed run"
    left = {kind: sorted(set(names) - set(before[kind])) for kind, names in _left_behind().items()}
    assert not any(left.values()), left
    return troubles


def _train(folder: Path, troubles: Sequence[Trouble], sockets: bool, streams: bool) -> list[dict[str, Any]]:
    """What the ranks that came to the end say; starts all of them again where the troubles want that."""
    for generation in range(2):
        body = partial(training, folder, troubles, generation)
        world = Ranks(SIZE, body(), sockets=sockets, streams=streams, timeout_s=20.0, heartbeat_s=_HEARTBEAT_S)
        try:
            ended = _watch(world, body)
        finally:
            world.close()
        if ended is not None:
            return ended
    raise AssertionError("a second restart")


def _watch(world: Ranks, newcomer: Callable[[int], Body]) -> list[dict[str, Any]] | None:
    """What ranks say at their end; None once they are to start again."""
    told: dict[int, Any] = {}
    stopped: set[int] = set()
    deadline, waiting = time.monotonic() + _LIMIT_S, dict(enumerate(world.lines))
    while waiting.keys() - stopped:
        assert time.monotonic() < deadline, f"ranks {sorted(waiting)} don't come to an end; so far: {told}"
        for line in wait(list(waiting.values()), 1.0):
            rank = next(rank for rank, other in waiting.items() if other is line)
            try:
                said = line.recv()  # type: ignore[union-attr]
            except EOFError:  # killed
                del waiting[rank]
                continue
            match said:
                case "restart":
                    return None
                case "join":
                    new = world.join(newcomer(len(world.processes)))
                    waiting[new] = world.lines[new]
                case "stop":
                    stopped.add(rank)
                case "pause":
                    time.sleep(_PAUSE_S)
                    os.kill(world.processes[rank].pid, signal.SIGCONT)
                case str() if rank >= SIZE and said.endswith("is over: there is nothing left to join."):
                    del waiting[rank]
                case str():
                    raise AssertionError(f"rank {rank}: {said}")
                case _:
                    told[rank] = said
                    del waiting[rank]
    for rank in stopped:  # they come back too late, and are told so
        os.kill(world.processes[rank].pid, signal.SIGCONT)
        assert "the others have gone on without this rank" in world.told(rank), rank
    return list(told.values())


def _check_agreement(ended: Sequence[dict[str, Any]]) -> None:
    assert all(end["state"] == ended[0]["state"] for end in ended), "ranks differ"
    assert ended[0]["state"][0] == EPOCHS * STEPS, "steps were lost"
    assert {end["size"] for end in ended} == {len(ended)}, "a rank of the last world hasn't come to the end"


def _check_samples(folder: Path) -> dict[int, float]:
    """Every sample once in each epoch, by what the ranks have written down. Returns the losses by step.

    A step that was done again, after a restart from a snapshot, counts as it was done last. Ranks that took part in a
    step and didn't live to write it down had their share of it.
    """
    done: dict[int, dict[tuple[int, int], dict[int, Entry]]] = {}
    for file in folder.glob("*.jsonl"):
        generation = int(file.name.partition(".")[0])
        for text in file.read_text().splitlines():
            entry: Entry = json.loads(text)
            done.setdefault(entry[1], {}).setdefault((generation, entry[0]), {})[entry[2]] = entry
    assert sorted(done) == list(range(1, EPOCHS * STEPS + 1))
    share, losses = shares(), {}
    seen = [Counter[int]() for _ in range(EPOCHS)]
    for step, by_world in done.items():
        entries = by_world[max(by_world)]
        size = next(iter(entries.values()))[3]
        for rank in range(size):
            samples = entries[rank][4] if rank in entries else share[step, rank, size]
            seen[(step - 1) // STEPS].update(samples)
        by_rank = {str(entry[5]) for entry in entries.values()}
        assert len(by_rank) == 1, f"step {step}: losses {by_rank}"
        losses[step] = float(by_rank.pop())
    assert seen == [Counter(range(SAMPLES))] * EPOCHS, "samples were lost or seen twice"
    return {step: losses[step] for step in sorted(losses) if losses[step] == losses[step]}  # NaN is unequal to itself


def _check_snapshots(path: Path) -> None:
    names = sorted(name for name in os.listdir(path) if name != ".in-use")  # the lock that a run holds
    assert all(name.startswith("step_") for name in names), names
    assert len(names) == 2, names


def _left_behind() -> dict[str, list[str]]:
    """What a round may leave behind: shared memory, open files and sockets of this process, and its children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    shared = [name for name in os.listdir("/dev/shm") if f"{os.getpid()}" in name or name.startswith("ltx")]
    return {"children": children, "files": sorted(os.listdir("/proc/self/fd")), "shared memory": sorted(shared)}


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
    end, rounds, say = time.monotonic() + 60 * parsed.minutes, 0, partial(print, flush=True)
    while time.monotonic() < end:
        seed = secrets.randbelow(2**31)
        say(f"--seed {seed}", end=": ")  # first: it is there also if the round fails
        say(", ".join(f"{trouble.kind} {trouble.rank} at {trouble.step}" for trouble in play(seed)))
        rounds += 1
    say(f"{rounds} rounds, all as they should be")
    return 0
