"""Processes that a launcher has started as ranks, in which nobody has called ltx.init, and workers that ranks start."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.core.ranks import axis
from ltx.core.world import world as worlds
from ltx.errors import WorldError
from ltx.runtime.launchers import LAUNCHERS
from tests.contract.runtime.environments import TORCHRUN
from tests.internal.runtime.test_launchers import HYDRA, JOB, OPENMPI, STEP
from tests.train_on import refuses

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """``environment(variables)`` makes this a process of its own, with these of the launchers' variables."""
    marks = {name for row in LAUNCHERS for name in row.marks} | {worlds.RANK_VARIABLE, "SLURM_JOB_ID"}

    def become(variables: dict[str, str]) -> None:
        for name in marks:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(axis, "checks_alone", [worlds._check_alone])

    yield become
    assert not axis.axes_in_scope()


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).sum()


X = torch.ones(3)
STEP_FN = ltx.data_parallel(loss)
CALLS: dict[str, Callable[[], Any]] = {
    "psum": lambda: ltx.psum(X),
    "pmean on data": lambda: ltx.pmean(X, "data"),
    "joined": lambda: ltx.psum(X, ("data",)),
    "barrier": ltx.barrier,
    "broadcast_object": lambda: ltx.broadcast_object("a"),
    "axis_index": ltx.axis_index,
    "axis_size": ltx.axis_size,
    "a step": lambda: STEP_FN(X, X),
    "its gradient": lambda: torch.func.grad(STEP_FN)(X, X),
    "train.init": lambda: ltx.train_step(STEP_FN, SGD).init({"w": X}),
    "sync_gradients": lambda: ltx.sync_gradients({"w": X}),
}
#: Whose environment -> the rank and size that it says.
RANKS = {
    "torchrun": (TORCHRUN, "rank 5 of 8"),
    "by hand, without a place to meet": ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 1 of 2"),
    "mpirun": (OPENMPI, "rank 5 of 8"),
    "hydra": (HYDRA, "rank 5 of 8"),
    "srun": (STEP, "rank 4 of 5"),
}
ALONE: dict[str, dict[str, str]] = {
    "nothing": {},
    "a job script": JOB | {"SLURM_STEP_ID": "batch"},
    "the shell of salloc": JOB,
    "a terminal of srun --pty": STEP | {"SLURM_PTY_PORT": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "srun with such a terminal's variable": STEP | {"SLURM_PTY_PORT": "1"},
    "WORLD_SIZE of a job script": {"WORLD_SIZE": "4"},
    "torchrun of one": {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
}


@pytest.mark.parametrize("call", CALLS)
def test_without_a_world_every_call_raises(environment: Callable[..., None], call: str) -> None:
    environment(TORCHRUN)
    for _ in range(2):
        refuses(WorldError, r"rank 5: .*RANK=5.*`with ltx\.init\(\):`.*ltx\.init\(rank=0, size=1\)", CALLS[call])


@pytest.mark.parametrize("who", RANKS)
def test_what_shows_that_a_process_is_one_of_several(environment: Callable[..., None], who: str) -> None:
    variables, place = RANKS[who]
    environment(variables)
    refuses(WorldError, place, ltx.psum, X)


@pytest.mark.parametrize("who", ALONE)
def test_what_does_not(environment: Callable[..., None], who: str) -> None:
    environment(ALONE[who])
    assert torch.equal(ltx.psum(X), X)
    assert torch.equal(ltx.grad(STEP_FN)(X, X), X)


def test_simulated_ranks_are_no_processes(environment: Callable[..., None]) -> None:
    environment(TORCHRUN)
    assert torch.equal(ltx.vmap(ltx.psum)(X), 3 * X)
    assert torch.equal(torch.func.grad(loss)(X, X), X)  # nothing of ltx
    refuses(WorldError, "rank 5 of 8", lambda: ltx.vmap(lambda x: ltx.psum(x, "data"), axis_name="other")(X))


def test_alone_on_purpose_and_after_a_world(environment: Callable[..., None]) -> None:
    environment(TORCHRUN)
    with ltx.init(rank=0, size=1) as world:
        assert (world.size, float(ltx.psum(torch.tensor(2.0)))) == (1, 2.0)
        assert worlds.RANK_VARIABLE not in worlds.os.environ
    assert torch.equal(ltx.psum(X), X)  # evaluation after training


WORLD = ltx.World(3, 4, 1, 1, 2, torch.device("cuda", 1), "gloo", "torchrun", 2)


@pytest.fixture
def worker(environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that rank 3 of 4 has started by multiprocessing, without what a fork inherits."""
    environment({**TORCHRUN, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    monkeypatch.setenv(worlds.RANK_VARIABLE, "")
    worlds.tell_children(WORLD)
    pid = worlds.os.getpid()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=pid))


@pytest.mark.usefixtures("worker")
def test_a_worker_knows_its_rank_and_does_not_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ltx.world() == WORLD
    for call in CALLS.values():
        refuses(WorldError, r"a worker of rank 3 of 4, and can't communicate", call)
    refuses(WorldError, "a worker of rank 3 of 4, whose own process", ltx.init)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=1))  # another's
    assert ltx.world().size == 1
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)  # a program that the rank has called
    assert ltx.world().size == 1


@pytest.mark.usefixtures("worker")
def test_a_worker_may_be_a_world_alone() -> None:
    with ltx.init(rank=0, size=1):
        assert ltx.world().size == 1
        assert torch.equal(ltx.psum(X), X)
