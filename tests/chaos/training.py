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
Tell = Callable[[Any], None]


def training(folder: Path, troubles: Sequence[Trouble], generation: int) -> Callable[[Tell], Any]:
    """The body of a rank: trains to the end, whatever happens on the way."""

    def body(tell: Tell) -> Any:
        me, resets, taken = ltx.world().rank, [0], list[Any]()
        train, state = make(guard="skip")
        step_of = _StepCount(folder / "snapshots")
        log = open(folder / f"{generation}.{me}.jsonl", "w")  # noqa: SIM115

        def data(indices: torch.Tensor) -> Any:
            taken[:] = [indices.tolist()]
            x, y = batch(indices)
            for number, trouble in enumerate(troubles):
                if (trouble.rank, trouble.step) != (me, step_of(indices)):
                    continue
                if trouble.kind == "nan":  # as often as the step is begun
                    x = torch.full_like(x, float("nan"))
                elif _first_time(folder / f"done {number}"):
                    _do(trouble, tell)
            return x, y

        def on_step(state: Any, metrics: Any, position: Any) -> None:
            step_of.done(state.step)
            world = ltx.world()
            entry = [resets[0], state.step, world.rank, world.size, taken[0], metrics.loss.item()]
            log.write(json.dumps(entry) + "\n")
            log.flush()  # a rank that is killed has written what it has done

        def on_reset(world: ltx.World) -> None:
            resets[0] += 1

        state, position = ltx.elastic(
            train, state, data, START, epochs=EPOCHS, on_step=on_step, on_reset=[on_reset],
            snapshots=folder / "snapshots", every=3,
        )
        log.close()
        assert (position.epoch, position.done) == (EPOCHS, 0)
        return {"state": values(state), "size": ltx.world().size, "resets": resets[0]}

    return body
