"""One suite over all strategies: each does what its reference says, on every backing, and is a value.

Rows come from table.py. Processes, simulated ranks and a world of one are compared with the reference after every step.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ltx
from tests.contract.strategies.problem import Params, Problem, loss, make_problem
from tests.contract.strategies.table import KINDS, ROWS, Row
from tests.kinds import Ranks
from tests.twins.cases import assert_same_bits

Trained = list[dict[str, Tensor]]

NAMES = list(ROWS)
PROCESSES = [(name, n) for name, row in ROWS.items() for n in row.ranks]


def tensors(params: Params) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in params.items()}


def trainer(row: Row, **kwargs: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, row.strategy), row.optimizer, **kwargs)


def trained(row: Row, problem: Problem, reload_at: int = -1, **kwargs: Any) -> tuple[Trained, Any, list[str]]:
    """On one rank: (its parameters after each step, once finished in the end; its last state, what went out)"""
    train = trainer(row, **kwargs)
    state, history = train.init(tensors(problem.start)), []
    with ltx.profile.record() as trace:
        for step, batch in enumerate(problem.batches()):
            state, _ = train(pickle.loads(pickle.dumps(state)) if step == reload_at else state, *batch)
            history.append({name: x.clone() for name, x in state.params.items()})
    state = train.finish(state)
    return history, (state.params, state.opt_state, state.sync_state), [e.label for e in trace.events]


def shared(row: Row, problem: Problem, overlap: str) -> list[str]:
    """After which steps which states lie in the memory of parameters, to which the program may write between steps."""
    train, found = trainer(row, overlap=overlap), []
    state = train.init(tensors(problem.start))
    for step, batch in enumerate(problem.batches()):
        state, _ = train(state, *batch)
        places = {x.untyped_storage().data_ptr() for x in state.params.values()}
        held = {"opt_state": state.opt_state, "sync_state": state.sync_state}
        leaves = zip(ltx.tree.leaf_paths(held), ltx.tree.flatten(held)[0], strict=True)
        found += [f"{path} after step {step}" for path, x in leaves if x.untyped_storage().data_ptr() in places]
    train.finish(state)
    return found


def outputs_before(row: Row, **kwargs: Any) -> list[list[Any]]:
    """Of each step: the parameters before it, what it returned as aux, and as its buffer; these are the parameters."""

    def loss(params: Any, old: Any, x: Tensor) -> Any:
        return sum((p * x).sum() for p in params.values()), {"w": params["w"].detach()}, params["w"]

    train = ltx.train_step(ltx.data_parallel(loss, row.strategy), row.optimizer, has_aux=True, **kwargs)
    state, found = train.init({name: torch.ones(3) for name in "uvw"}, {"w": torch.ones(3)}), []
    for x in torch.ones(6, 3):
        before = state.params["w"].tolist()
        state, metrics = train(state, x)
        found.append([before, metrics.aux.tolist(), state.buffers["w"].tolist()])
    train.finish(state)
    return found


def assert_is(history: Trained, expected: list[list[Params]], rank: int, tolerance: float) -> None:
    for step, (got, by_rank) in enumerate(zip(history, expected, strict=True)):
        for name, tensor in got.items():
            np.testing.assert_allclose(
                tensor.numpy(), by_rank[rank][name], tolerance, tolerance, err_msg=f"{name} of rank {rank}, step {step}"
            )


def updates_in_buckets(row: Row) -> bool:
    try:
        return bool(trainer(row, overlap="update"))
    except ltx.errors.LtxError:
        return False


UPDATES = [(name, "backward") for name in NAMES] + [
    (name, "update") for name in NAMES if updates_in_buckets(ROWS[name])
]


@pytest.mark.full(but=4)
@pytest.mark.parametrize(("name", "overlap"), UPDATES)
def test_no_state_lies_in_the_memory_of_parameters(name: str, overlap: str, ranks: Ranks, seed: int) -> None:
    row, n = ROWS[name], ROWS[name].ranks[0]
    for found in ranks(n).run(shared, row, make_problem(seed, n), overlap):
        assert not found


@pytest.mark.full(but=4)
@pytest.mark.parametrize("guard", ["off", "skip"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_that_are_parameters_are_those_before_the_update(name: str, guard: str, ranks: Ranks) -> None:
    for found in ranks(ROWS[name].ranks[0]).run(outputs_before, ROWS[name], guard=guard):
        for before, aux, buffer in found:
            assert before == aux == buffer


@pytest.mark.full(but=3)
@pytest.mark.covering(1, of=lambda name, n: (name,))
@pytest.mark.parametrize(("name", "n"), PROCESSES)
def test_processes_do_what_the_reference_says(name: str, n: int, ranks: Ranks, seed: int) -> None:
    row, problem = ROWS[name], make_problem(seed, n)
    expected = row.reference(problem)
    results = ranks(n).run(trained, row, problem)
    for rank, (history, _, _) in enumerate(results):
        assert_is(history, expected, rank, row.tolerance)
    if row.replicated:  # to the last bit
        for history, _, _ in results:
            assert all(torch.equal(a[k], b[k]) for a, b in zip(history, results.rank(0)[0], strict=True) for k in a)
    assert row.strategy.layout.params == ("replicated" if row.replicated else "per_rank")


@pytest.mark.full(but=1)
@pytest.mark.covering(1, of=lambda name: (KINDS[name],))
@pytest.mark.parametrize("name", NAMES)
def test_a_state_may_be_kept_or_saved_halfway(name: str, ranks: Ranks, seed: int) -> None:
    """donate=False, a pickled state and updates bucket by bucket give the same bits."""
    row, n = ROWS[name], ROWS[name].ranks[0]
    problem = make_problem(seed, n)
    plain = ranks(n).run(trained, row, problem)
    by_bucket = [{"overlap": "update"}] if (name, "update") in UPDATES else []
    for kwargs in ({"donate": False}, {"reload_at": 5}, *by_bucket):
        for found, other in zip(plain, ranks(n).run(trained, row, problem, **kwargs), strict=True):
            assert_same_bits(found[:2], other[:2])


@pytest.mark.full(but=4)
@pytest.mark.covering(1, of=lambda name, n: (KINDS[name], n))
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_simulated_ranks_do_what_the_reference_says(name: str, n: int, seed: int) -> None:
    row = ROWS[name]
    if n not in row.ranks and n != 1:
        n = next((k for k in (4, 3, 2) if k in row.ranks), row.ranks[0])
    problem = make_problem(seed, n)
    expected, train = row.reference(problem), trainer(row)
    state = train.init(tensors(problem.start))
    for step in range(problem.steps):
        batch = torch.tensor(problem.x[step]), torch.tensor(problem.y[step])
        state, _ = ltx.vmap(train, in_dims=(0 if step else None, 0, 0))(state, *batch)
        for rank in range(n):
            assert_is([{k: x[rank] for k, x in state.params.items()}], expected[step : step + 1], rank, row.tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_a_world_of_one_does_what_the_reference_says(name: str, seed: int) -> None:
    row, problem = ROWS[name], make_problem(seed, 1)
    assert_is(trained(row, problem)[0], row.reference(problem), 0, row.tolerance)
