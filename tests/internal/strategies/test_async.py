"""Asynchronous averaging by the clock, between processes of very different speeds; and what its rows don't say."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import CollectiveTimeoutError, PeerLostError, UnsupportedError, WorkerError
from ltx.strategies.async_averaging import AsyncAveraging
from tests.inside import stateful
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import go_on, on_ranks, refuses, said

ALWAYS = AsyncAveraging(sync_interval_ms=0)
LR = 0.01


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Its gradient is x, whatever the parameters are: so all that ranks have learned can be added up."""
    return x * sum(p.double().sum() for p in params.values())


def trainer(strategy: ltx.Strategy, fn: Callable[..., Tensor] = loss, **kwargs: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(fn, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=LR), **kwargs)


def start() -> dict[str, Tensor]:
    return {"w": torch.arange(6.0, dtype=torch.float64).view(2, 3).t(), "b": torch.tensor(0.5, dtype=torch.float64)}


def went(state: Any) -> dict[str, Tensor]:
    return {name: x - start()[name] for name, x in state.params.items()}


def rounds_of(trace: Any) -> int:
    """The rounds that this rank has begun: one bucket each."""
    return sum(event.label.startswith("background") for event in trace.events)


@pytest.mark.parametrize(("n", "node"), [(2, 1), (3, 1), (4, 2)], ids=["2 ranks", "3 ranks", "2 nodes"])
def test_nodes_go_at_their_own_pace_and_end_together(n: int, node: int, ranks: Ranks) -> None:
    """Nobody waits in a step, nothing that a node learns is lost, and finish ends with the same mean for all.

    The ranks of a node hold the same parameters at every step, with the mean gradient.
    """
    nodes = n // node
    strategy = AsyncAveraging(sync_interval_ms=0, hierarchical=True, node_size=node) if node > 1 else ALWAYS

    def run() -> Any:
        rank = int(ltx.axis_index())
        place, blocked = rank // node, [rank // node == nodes - 1]

        def held_up(params: dict[str, Tensor], x: Tensor) -> Tensor:
            if blocked.pop() if blocked else False:
                ltx.barrier()  # in its first step the last node waits until the others have done all of theirs
            return loss(params, x)

        train, results, alike = trainer(strategy, held_up), [], True
        state, mates = train.init(start()), ltx.core.ranks.axis.inner(ltx.core.comm.resolve(None), node)
        with ltx.profile.record() as trace:
            for steps in (5 * place + 3, 2 * (nodes - place)):  # after the first finish the others are the slow ones
                for step in range(steps):
                    state, metrics = train(state, torch.tensor(float(rank + 1)))
                    alike &= len(ltx.all_gather(state.params["w"], mates).unique(dim=0)) == 1
                    if place < nodes - 1 and not results and step == steps - 1:
                        ltx.barrier()
                state = train.finish(state)
                results.append((went(state), state.pending, state.step))
        return results, rounds_of(trace), metrics.loss.item(), alike

    found = list(ranks(n).run(run))
    learned = 0.0
    for phase in range(2):
        for place in range(nodes):
            mean = node * place + (node + 1) / 2
            learned -= LR * mean * (5 * place + 3, 2 * (nodes - place))[phase] / nodes
        for results, *_ in found:
            by_name, pending, _ = results[phase]
            assert pending is None
            for name, x in by_name.items():
                torch.testing.assert_close(x, torch.full_like(x, learned), rtol=0, atol=1e-9)
                assert torch.equal(x, found[0][0][phase][0][name])
    assert [results[1][2] for results, *_ in found] == [5 * (r // node) + 3 + 2 * (nodes - r // node) for r in range(n)]
    counts = {rounds for _, rounds, *_ in found}
    assert len(counts) == 1, "all have begun the same number of rounds"
    assert counts.pop() >= 4
    assert all(alike for *_, alike in found)
    losses = [[own for _, _, own, _ in found][place * node : place * node + node] for place in range(nodes)]
    assert all(len(set(of_node)) == 1 for of_node in losses)
    assert len({of_node[0] for of_node in losses}) == nodes, "losses are the nodes' own"


@on_ranks(2)
def test_rounds_keep_their_distance() -> None:
    """With an hour between two rounds there is the first, and that of finish."""
    train = trainer(AsyncAveraging(sync_interval_ms=3.6e6))
    with ltx.profile.record() as trace:
        state, _ = go_on(train, train.init(start()), [torch.tensor(1.0)] * 5)
        assert rounds_of(trace) == 1
        assert isinstance(pickle.loads(pickle.dumps(state)).params["w"], Tensor)
        train.finish(state)
    assert rounds_of(trace) == 2


def test_all_kinds_of_leaves(ranks: Ranks) -> None:
    def run() -> dict[str, Tensor]:
        rank = int(ltx.axis_index())
        params = {"half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.ones(0, 2), "number": torch.tensor(1.0)}
        params["turned"] = torch.ones(2, 4, dtype=torch.float64).t()
        train, x = trainer(AsyncAveraging(sync_interval_ms=0, bucket_bytes=8)), torch.tensor(100.0 * rank).double()
        return train.finish(go_on(train, train.init(params), [x] * (3 + rank)).state).params

    mine, theirs = ranks(2).run(run)
    for name, x in mine.items():
        assert torch.equal(x, theirs[name])
        # Rounds differ from run to run, and each rounds.
        tolerance = 0.05 if x.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(x, torch.full_like(x, -1.0), rtol=0, atol=tolerance)


@on_ranks(2)
def test_a_rank_may_fail_alone_and_do_its_step_again() -> None:
    """Its peer hears nothing of it, and what is under way stays."""
    rank, fails = int(ltx.axis_index()), [False]

    def faulty(params: dict[str, Tensor], x: Tensor) -> Tensor:
        if fails[0]:
            raise ArithmeticError
        return loss(params, x)

    train = trainer(ALWAYS, faulty)
    state = train.init(start())
    for step in range(6):
        if rank == 1 and step in (1, 4):
            fails[0] = True
            said(ArithmeticError, train, state, torch.tensor(1.0))
            fails[0] = False
        state, _ = train(state, torch.tensor(rank + 1.0))
    torch.testing.assert_close(went(train.finish(state))["b"].item(), -LR * 1.5 * 6, rtol=0, atol=1e-9)


@on_ranks(2)
def test_it_goes_with_debug_checks_and_accumulation() -> None:
    rank = int(ltx.axis_index())
    step = ltx.accumulate(ltx.data_parallel(lambda p, x: loss(p, x.mean()), ALWAYS), 2)
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=LR))
    with ltx.debug_checks():
        batches = [torch.full((4,), rank + 1.0)] * (2 + 2 * rank)
        b = went(train.finish(go_on(train, train.init(start()), batches).state))["b"]
    torch.testing.assert_close(b.item(), -LR * (2 * 1 + 4 * 2) / 2, rtol=0, atol=1e-9)


@pytest.mark.full
def test_a_peer_that_dies(ranks: Ranks, tmp_path: Path) -> None:
    """The next step that would begin or wait for a round raises, and the state is as it was before it."""

    def run(strategy: ltx.Strategy, told: Path) -> None:
        train = trainer(strategy)
        state, _ = go_on(train, train.init(start()), [torch.tensor(1.0)] * 3)
        ltx.barrier()
        if int(ltx.axis_index()) == 1:
            os._exit(3)
        text = ""
        while not text:
            before = ltx.tree.map(torch.clone, state.params)
            try:
                state, _ = train(state, torch.tensor(1.0))
            except PeerLostError as error:
                text = str(error)
        said(PeerLostError, train, state, torch.tensor(1.0)), said(PeerLostError, train.finish, state)
        assert all(torch.equal(before[name], x) for name, x in state.params.items())
        told.write_text(text)

    for i, strategy in enumerate((ALWAYS, AsyncAveraging(schedule=(1, 1)))):
        told = tmp_path / str(i)
        refuses(WorkerError, "exited with status 3", ranks(2).run, run, strategy, told)
        # A broken connection tells it on the round's own axis; the watcher may be the first to see that rank 1 is gone.
        text = told.read_text()
        assert "background 0 on axis 'data'" in text or "the process of rank 1 is gone" in text, text


@pytest.mark.full
def test_a_peer_that_begins_no_round(on_new_axis: OnNewAxis) -> None:
    """It counts as lost after the axis' timeout; until then steps go on."""

    def run() -> int:
        train, steps, lost = trainer(ALWAYS), 0, False
        state = train.init(start())
        if int(ltx.axis_index()) == 1:
            return 0
        while not lost:
            try:
                state, _ = train(state, torch.tensor(1.0))
                steps += 1
            except CollectiveTimeoutError:
                lost = True
        assert torch.allclose(went(state)["b"], torch.tensor(-LR * steps, dtype=torch.float64))
        return steps

    assert on_new_axis(run, timeout_s=4.0).rank(0) > 1


def test_without_a_warm_up_steps_are_not_counted() -> None:
    assert not stateful(AsyncAveraging())


def test_simulated_ranks_have_no_clock() -> None:
    train, text = trainer(AsyncAveraging()), re.escape("Give the rounds a schedule: AsyncAveraging(schedule=(")
    refuses(UnsupportedError, text, ltx.vmap(train, in_dims=(None, 0)), train.init(start()), torch.ones(2))
