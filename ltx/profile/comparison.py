"""What steps cost on these ranks: compare measures train steps in turns."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ltx.core import collectives
from ltx.core.base import tree
from ltx.core.base.arguments import brief, whole
from ltx.core.base.readable import Shown, Table, format_bytes, format_seconds
from ltx.core.training import TrainState
from ltx.core.training.train_state import counted
from ltx.core.training.train_step import TrainStep
from ltx.errors import InputError
from ltx.profile.traces import record


class Compared(NamedTuple):
    """A candidate: the slowest rank's seconds per step, and the bytes that this rank sends per step."""

    name: str
    step_s: float
    sent: float


class Comparison(Shown, tuple[Compared, ...]):
    """The candidates, fastest first; ``print`` shows them as a table."""

    def _parts(self) -> list[str | Table]:
        rows = [(x, format_seconds(s), f"{s / self[0].step_s:.2f}", format_bytes(round(sent))) for x, s, sent in self]
        return [Table(("candidate", "a step", "to the first", "sent"), rows, (False, True, True, True))]


def compare(candidates: dict[str, TrainStep], state: TrainState, *batch: Any, steps: int = 20) -> Comparison:
    """Time train steps in turns, on all ranks, as Horovod's autotuner does with settings.

    A turn is as long as the longest period of a schedule; the first turn isn't counted. Steps begin after a strategy's
    warm-up, so that a hook that is exact at first does compress. So few steps don't show the effect on the loss.

    Args:
        candidates: train steps by name.
        state: the state of one candidate, which doesn't change. The others begin with its parameters and buffers.
        batch: this rank's batch, for all steps.
        steps: the least number of steps that each candidate is timed for.

    Returns:
        The candidates, fastest first, the same on every rank; ``print`` shows them as a table.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda p, x: (p["w"] * x).square().mean())
        >>> sgd = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
        >>> candidates = {way: ltx.train_step(step, sgd, overlap=way) for way in ("backward", "update")}
        >>> state = candidates["backward"].init({"w": torch.ones(3)})
        >>> sorted(row.name for row in ltx.profile.compare(candidates, state, torch.ones(3), steps=2))
        ['backward', 'update']
    """
    whole("compare: steps", steps, 1)
    if not candidates or not isinstance(state, TrainState):
        raise InputError(f"compare takes train steps by name and a state, got {brief(candidates)} and {brief(state)}.")
    cycles = {name: train.step.strategy.cycle or (0, 1) for name, train in candidates.items()}
    trained, length = set(tree.leaf_paths(state.trained)), max(length for _, length in cycles.values())
    states, sent, times = dict[str, TrainState](), dict[str, float](), {name: list[float]() for name in candidates}
    candidates = {name: replace(train, trainable=trained.__contains__) for name, train in candidates.items()}
    for name, train in candidates.items():
        at = max(state.step, cycles[name][0])
        states[name] = counted(train.init(state.params, state.buffers), at, at)
        with record() as trace:
            states[name], _ = _turn(train, states[name], batch, length)
        sent[name] = sum(x.nbytes for x in trace.events if x.kind in ("bucket", "exchange", "background")) / length
    for _ in range(-(-steps // length)):
        for name, train in candidates.items():
            states[name], taken = _turn(train, states[name], batch, length)
            times[name].append(taken / length)
    rows = (Compared(name, statistics.median(taken), sent[name]) for name, taken in times.items())
    return Comparison(sorted(rows, key=lambda row: row.step_s))


def _turn(train: TrainStep, state: TrainState, batch: tuple[Any, ...], length: int) -> tuple[TrainState, float]:
    """Run `length` steps. Returns the state after them, and the slowest rank's seconds."""
    collectives.barrier(axis=train.step.axis)
    began = time.perf_counter()
    for _ in range(length):
        state, metrics = train(state, *batch)
    state = train.finish(state)
    metrics.loss.item()  # waits until an accelerator has done all of it
    taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=metrics.loss.device)
    return state, float(collectives.pmax(taken, train.step.axis))
