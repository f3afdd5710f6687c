"""The training of a round of chaos, on one rank, and what it writes down for :mod:`tests.chaos.rounds`."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import ltx
from ltx.core.world.world import process
from tests.chaos.schedule import Trouble
from tests.contract.runtime.elastic_training import START, STEPS, batch, make, values
from tests.forks import noticed, open_now, settles
from tests.kinds import Tell

EPOCHS = 4
SIZE = 3
MOST = SIZE + 1  # with a newcomer


def training(
    folder: Path, troubles: Sequence[Trouble], generation: int, newcomer: int | None = None
) -> Callable[[Tell], Any]:
    """The body of a rank, or of a `newcomer`: trains to the end, whatever happens on the way."""

    def body(tell: Tell) -> Any:
        me = ltx.world().rank if newcomer is None else newcomer
        taken, waiting, most = list[Any](), noticed(), dict[str, int]()
        train, state = make(guard="skip")
        log = open(folder / f"{generation}.{me}.jsonl", "w")  # noqa: SIM115

        def data(indices: torch.Tensor) -> Any:
            taken[:] = [indices.tolist()]
            x, y = batch(indices)
            for number, trouble in enumerate(troubles):
                if (trouble.rank, trouble.step) != (me, STEP_OF[tuple(taken[0])]):
                    continue
                if trouble.kind == "nan":  # as often as the step is begun
                    x = torch.full_like(x, float("nan"))
                elif _first_time(folder / f"done {number}"):
                    _do(trouble, tell, waiting)
            return x, y

        def on_step(state: Any, metrics: Any, position: Any) -> None:
            world = ltx.world()
            entry = [process.worlds, state.step, world.rank, world.size, taken[0], metrics.loss.item()]
            log.write(json.dumps(entry) + "\n")
            log.flush()  # a rank that is killed has written what it has done

        def note_open(world: ltx.World) -> None:
            most.update(most or open_now())

        state, position = ltx.elastic(
            train,
            state,
            data,
            START,
            epochs=EPOCHS,
            on_step=on_step,
            on_reset=[note_open],
            snapshots=folder / "snapshots",
            every=3,
        )
        log.close()
        assert (position.epoch, position.done) == (EPOCHS, 0)
        # A world more, and there is as much as when the first was made anew: nothing is left of those in between.
        now = settles(open_now, lambda now: not _more(now, most) or _waits_for_gloo())
        assert not _more(now, most) or _waits_for_gloo(), f"left behind: {_more(now, most)}; {now}"
        return {"state": values(state), "size": ltx.world().size}

    return body


def _more(now: dict[str, int], before: dict[str, int]) -> list[str]:
    """Of what there is more `now`. A connection and two threads for each of a line's channels and each peer more.

    And the second store, of a rank that has come to be the last: 4 pipes, 3 anonymous inodes, 3 sockets.
    """
    if not before:
        return []
    spare = {
        "anon_inode": 6,
        "pipe": 6,
        "socket": 16,
        "/memfd:ltx segment (deleted)": 12,
        "/memfd:ltx lock (deleted)": 12,
    }
    return [kind for kind in now if now[kind] > before.get(kind, 0) + spare.get(kind, 2)]


def _waits_for_gloo() -> bool:
    """Whether a world of before is held up by a collective under way that nobody will join, until its timeout."""
    return any(thread.name == "ltx-teardown" for thread in threading.enumerate())


def shares() -> dict[tuple[int, int, int], list[int]]:
    """By (step, rank, size): which samples that rank takes in that step."""
    position, found = START, {}
    for step in range(1, EPOCHS * STEPS + 1):
        for size in range(1, MOST + 1):
            found.update({(step, rank, size): position.indices(rank, size).tolist() for rank in range(size)})
        position = position.after_step()
    return found


#: From a rank's samples to the step that takes them.
STEP_OF = {tuple(indices): step for (step, _, _), indices in shares().items()}
assert len(STEP_OF) == EPOCHS * STEPS * sum(range(1, MOST + 1)), "two steps that give a rank the same samples"


def _first_time(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _do(trouble: Trouble, tell: Tell, waiting: Sequence[int]) -> None:
    match trouble.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop" | "pause":
            tell(trouble.kind)
            os.kill(os.getpid(), signal.SIGSTOP)
        case "restart":
            tell(trouble.kind)
            time.sleep(60)
        case "join":
            before = waiting[0]
            tell(trouble.kind)
            settles(lambda: waiting[0], lambda now: now > before)
        case "cut":
            _cut(int(os.environ["MASTER_PORT"]))


def _cut(store: int) -> None:
    """Break this process' TCP connections, but for those with the store."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # closed by now
            continue
        try:
            end = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with end:
            try:
                if end.type == socket.SOCK_STREAM and end.getpeername()[1] != store:
                    end.shutdown(socket.SHUT_RDWR)
            except (OSError, IndexError):  # one without a peer, or of another family
                continue
