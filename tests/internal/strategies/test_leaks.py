"""What a step makes goes with it, at once: nothing is left after many steps, and nothing waits for the collector."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import suppress
from itertools import repeat
from typing import Any, Literal

import pytest
import torch

import ltx
from ltx.errors import StrategyError
from ltx.peers.diagnosis import Status
from tests.contract.strategies.problem import loss, make_problem
from tests.contract.strategies.table import ROWS
from tests.train_on import go_on, on_ranks

Overlap = Literal["backward", "update"]

OVERLAPS: tuple[Overlap, ...] = ("backward", "update")
# After these, every strategy of the table is at the same place in what it does over and over: what is left once in
# sixty steps shows. By then messages have lain in every slot of shared memory too, whose views are kept.
WARMUP_STEPS, STEPS = 16, 240


def _trainers(overlap: Overlap, donate: bool = True) -> dict[str, Any]:
    """A train step for each strategy that two ranks can run so."""
    found = {}
    for name, row in ROWS.items():
        step = ltx.data_parallel(loss, row.strategy)
        if 2 in row.ranks:
            with suppress(StrategyError):
                found[name] = ltx.train_step(step, row.optimizer, overlap=overlap, donate=donate)
    return found


def _live() -> Counter[str]:
    """How many objects of each of ltx' and torch's types live: schedules, tickets, tensors, nodes of graphs, ...

    Shapes aren't counted, of which there are logs of bounded length, nor what ranks say of themselves: the watcher has
    one record of each, which it reads when it comes to that.
    """
    gc.collect()
    layout = (type(thing) for thing in gc.get_objects())
    ours = (kind for kind in layout if kind.__module__.startswith(("ltx", "torch")) and kind is not torch.Size)
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in ours if kind.__module__ != Status.__module__)


def _grown(overlap: Overlap, seed: int) -> dict[str, dict[str, int]]:
    """By strategy: how many more objects of a type live after these steps, if they are more than three.

    Memory for messages is kept, two pieces for a bucket, and whether it is both is a matter of timing.
    """
    problem, grown = make_problem(seed, 2), {}
    batch = problem.batches()[0]
    gc.freeze()  # what is there already isn't gone through each time
    for name, train in _trainers(overlap).items():
        state = train.init({key: torch.tensor(array) for key, array in problem.start.items()})
        state = go_on(train, state, repeat(batch, WARMUP_STEPS)).state
        before = _live()
        state = go_on(train, state, repeat(batch, STEPS)).state
        after = _live()
        train.finish(state)
        more = {kind: count - before[kind] for kind, count in after.items()}
        grown[name] = {kind: count for kind, count in more.items() if count > 3}
    gc.unfreeze()
    return grown


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_many_steps_leave_nothing_behind(overlap: Overlap, seed: int) -> None:
    with ltx.Pool(2) as pool:
        for grown in pool.run(_grown, overlap, seed):
            assert {"ddp", "horovod", "zero"} < set(grown)
            assert {name: layout for name, layout in grown.items() if layout} == {}


@pytest.mark.covering(1)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("overlap", OVERLAPS)
@on_ranks(2)
def test_a_step_frees_its_batch_and_state_at_once(overlap: Overlap, donate: bool, seed: int) -> None:
    """In a circle of references a batch, or a state that isn't donated, would keep a GPU's memory for many steps."""
    problem, found = make_problem(seed, 2), {}
    batch = problem.batches()[0]
    gc.disable()
    for name, train in _trainers(overlap, donate).items():
        state = train.init({key: torch.tensor(array) for key, array in problem.start.items()})
        state = go_on(train, state, repeat(batch, 6)).state
        while gc.collect():  # what other tests of this process have left may need several rounds, such as Dynamo's
            pass
        gc.set_debug(gc.DEBUG_SAVEALL)
        state = go_on(train, state, repeat(batch, 6)).state
        gc.collect()
        gc.set_debug(0)
        kinds = {type(thing) for thing in gc.garbage}
        gc.garbage.clear()
        train.finish(state)
        found[name] = sorted(kind.__name__ for kind in kinds if kind.__module__.startswith(("ltx", "torch")))
    gc.enable()
    assert {"ddp", "horovod", "zero"} < set(found)
    assert {name: kinds for name, kinds in found.items() if kinds} == {}
