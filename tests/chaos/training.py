"""The training of a round of chaos, on one rank, and what it writes down for :mod:`tests.chaos.rounds`."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import ltx
from tests.chaos.schedule import Trouble
from tests.runtime.elastic_ranks import START, STEPS, batch, make, values

EPOCHS = 4
SIZE = 3
Tell = Callable[[Any], None]


def training(folder: Path, troubles: Sequence[Trouble], generation: int) -> Callable[[Tell], Any]:
    """The body of a rank: trains to the end, whatever happens on the way."""

    def body(tell: Tell) -> Any:
        me, resets, taken = ltx.world().rank, [0], list[Any]()
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
                    _do(trouble, tell)
            return x, y

        def on_step(state: Any, metrics: Any, position: Any) -> None:
            world = ltx.world()
            entry = [resets[0], state.step, world.rank, world.size, taken[0], metrics.loss.item()]
            log.write(json.dumps(entry) + "\n")
            log.flush()  # a rank that is killed has written what it has done

        def on_reset(world: ltx.World) -> None:
            resets[0] += 1

        state, position = ltx.elastic(
            train,
            state,
            data,
            START,
            epochs=EPOCHS,
            on_step=on_step,
            on_reset=[on_reset],
            snapshots=folder / "snapshots",
            every=3,
        )
        log.close()
        assert (position.epoch, position.done) == (EPOCHS, 0)
        return {"state": values(state), "size": ltx.world().size, "resets": resets[0]}

    return body


def shares() -> dict[tuple[int, int, int], list[int]]:
    """By (step, rank, size): which samples that rank takes in that step."""
    position, found = START, {}
    for step in range(1, EPOCHS * STEPS + 1):
        for size in range(1, SIZE + 1):
            found.update({(step, rank, size): position.indices(rank, size).tolist() for rank in range(size)})
        position = position.after_step()
    return found


#: From a rank's samples to the step that takes them.
STEP_OF = {tuple(indices): step for (step, _, _), indices in shares().items()}
assert len(STEP_OF) == EPOCHS * STEPS * sum(range(1, SIZE + 1)), "two steps that give a rank the same samples"


def _first_time(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _do(trouble: Trouble, tell: Tell) -> None:
    match trouble.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop" | "pause":
            tell(trouble.kind)
            os.kill(os.getpid(), signal.SIGSTOP)
        case "restart":
            tell(trouble.kind)
            time.sleep(60)
        case "cut":
            _cut(int(os.environ["MASTER_PORT"]))


def _cut(store: int) -> None:
    """Break this process' TCP connections, but for those with the store."""
    for name in os.listdir("/proc/self/fd"):
        try:
            end = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket
            continue
        with end:
            try:
                if end.type == socket.SOCK_STREAM and end.getpeername()[1] != store:
                    end.shutdown(socket.SHUT_RDWR)
            except (OSError, IndexError):  # one without a peer, or of another family
                continue
