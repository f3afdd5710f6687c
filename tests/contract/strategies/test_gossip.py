"""Ranks that share weights: which ranks communicate, what they send, and that they notice when they have come apart."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import DeadlockDetectedError, RankMismatchError, ReplicaDivergedError, StrategyError
from tests.contract.strategies.problem import loss, make_problem
from tests.contract.strategies.test_failures import BrokenError
from tests.kinds import OnNewAxis, Ranks

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
NODES = {"hierarchical": True, "node_size": 2}


def trainer(algorithm: str, **fields: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, ltx.BaguaStrategy(algorithm, **fields)), SGD)


# --- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "fields", "what"), [(3, {}, "ranks"), (6, NODES, "nodes")])
def test_an_odd_number_cant_pair(n: int, fields: dict[str, Any], what: str) -> None:
    train, problem = trainer("decentralized", peer_selection_mode="shift_one", **fields), make_problem(0, n)
    text = f"\"shift_one\" pairs {what}, and axis 'data' has 3 of them. Use an even number of {what}, or "
    with pytest.raises(StrategyError, match=re.escape(text)):
        ltx.vmap(lambda x: train.init({k: torch.tensor(v) for k, v in problem.start.items()}))(torch.ones(n))


# --- bytes ------------------------------------------------------------------------------------------------------------


def sent(algorithm: str, steps: int = 4, **fields: Any) -> list[list[tuple[str, str, int]]]:
    """What each step issues, without headers: (channel, operation, bytes)."""
    problem, rank = make_problem(0, int(ltx.axis_size())), int(ltx.axis_index())
    start = {"w": torch.ones(3, 4), "b": torch.ones(3), "s": torch.ones(()), "pad": torch.ones(1000)}
    train, issued = trainer(algorithm, **fields), []
    state = train.init(start)
    for step in range(steps):
        with ltx.profile.record() as trace:
            state, _ = train(state, *(torch.tensor(a[step, rank]).float() for a in (problem.x, problem.y)))
        issued.append([(e.channel, e.operation, e.nbytes) for e in trace.events if " " in e.label])
    return issued


NUMEL, TAG = 1016, 40


def test_shift_one_sends_each_parameter_once(ranks: Ranks) -> None:
    for issued in ranks(4).run(sent, "decentralized", peer_selection_mode="shift_one", communication_interval=2):
        assert issued == [[("buckets 0", "ppermute", 4 * (NUMEL + TAG))], []] * 2


def test_all_is_one_all_reduce(ranks: Ranks) -> None:
    for issued in ranks(2).run(sent, "decentralized"):
        assert issued == [[("buckets 0", "psum", 4 * (NUMEL + TAG))]] * 4


def test_a_node_gossips_as_one(ranks: Ranks) -> None:
    """Its two ranks send a half of the parameters each to another node."""
    half = 2 * (NUMEL + TAG)
    for issued in ranks(4).run(sent, "decentralized", peer_selection_mode="shift_one", steps=1, **NODES):
        assert [(operation, nbytes) for _, operation, nbytes in issued[0]] == [
            ("psum_scatter", half),
            ("ppermute", half),
            ("all_gather", half),
        ]


@pytest.mark.parametrize(("n", "messages"), [(2, 1), (3, 2)])
def test_low_precision_sends_two_messages_of_a_quarter(n: int, messages: int, ranks: Ranks) -> None:
    for issued in ranks(n).run(sent, "low_precision_decentralized", communication_interval=3):
        steps = [[(operation, nbytes) for _, operation, nbytes in step] for step in issued]
        assert steps == [[("ppermute", NUMEL + 8)] * messages, [], [], [("ppermute", NUMEL + 8)] * messages]


def test_low_precision_by_node(ranks: Ranks) -> None:
    for issued in ranks(4).run(sent, "low_precision_decentralized", steps=1, **NODES):
        message = NUMEL // 2 + 8
        assert [(operation, nbytes) for _, operation, nbytes in issued[0]] == [
            ("psum_scatter", 2 * NUMEL),
            ("ppermute", message),
            ("all_gather", 2 * message),  # the node's own, and the other one's
        ]


# --- copies of weights ------------------------------------------------------------------------------------------------


def trained(algorithm: str, seed: int, **fields: Any) -> list[tuple[Any, Any]]:
    """After each step: (parameters, communication state); parameters of several dtypes and strides."""
    generator, rank = torch.Generator().manual_seed(seed), int(ltx.axis_index())
    train = ltx.train_step(ltx.data_parallel(odd_loss, ltx.BaguaStrategy(algorithm, **fields)), SGD)
    state, history = train.init(odd_params(generator)), []
    for _ in range(5):
        x = torch.randn(8, generator=generator)[rank]
        state, _ = train(state, x)
        history.append(ltx.tree.map(torch.clone, (state.params, state.sync_state.leaves)))
    return history


def odd_params(generator: torch.Generator) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "turned": normal(5, 3).t(),
        "half": normal(7).bfloat16(),
        "none": normal(0, 2),
        "one": normal(),
        "wide": normal(4).double(),
    }


def odd_loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return sum(((p.double() - x) * (1 + x)).square().sum() for p in params.values())


@pytest.mark.full(but=1)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_neighbours_know_each_other_to_the_last_bit(n: int, ranks: Ranks, seed: int) -> None:
    results = list(ranks(n).run(trained, "low_precision_decentralized", seed, first_bucket_bytes=40, bucket_bytes=40))
    assert_ring(results)


@pytest.mark.full
def test_nodes_know_each_other_to_the_last_bit(ranks: Ranks, seed: int) -> None:
    results = list(ranks(4).run(trained, "low_precision_decentralized", seed, **NODES))
    assert_ring(results[::2])
    for one, other in (results[:2], results[2:]):
        assert all(map(torch.equal, ltx.tree.flatten(one)[0], ltx.tree.flatten(other)[0]))


def assert_ring(results: list[list[tuple[Any, Any]]]) -> None:
    n = len(results)
    for step in range(5):
        params, states = zip(*(result[step] for result in results), strict=True)
        for rank in range(n):
            for path, mine in states[rank].items():
                assert torch.equal(mine["own"], states[(rank - 1) % n][path]["right"])
                assert torch.equal(mine["own"], states[(rank + 1) % n][path]["left"])
                assert mine["own"].dtype == (torch.float64 if path == "wide" else torch.float32)
                assert torch.equal(params[rank][path], mine["own"].to(params[rank][path].dtype))
    assert not torch.equal(params[0]["turned"], params[1]["turned"])  # they are each one's own


def test_a_broadcast_state_knows_its_neighbours(ranks: Ranks) -> None:
    """Ranks that all have one rank's weights know them of each other: copies of others would pull at every step."""

    def run() -> list[Tensor]:
        train = ltx.train_step(
            ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.BaguaStrategy("low_precision_decentralized")), SGD
        )
        state, x = train.init(torch.ones(3)), torch.full((3,), float(ltx.axis_index()))
        for _ in range(3):
            state, _ = train(state, x)
        state = train.broadcast(state, src=1)
        weights = [state.params.clone()]
        for _ in range(10):
            state, _ = train(state, torch.zeros(3))
        return [*weights, state.params]

    for before, after in ranks(2).run(run):
        torch.testing.assert_close(after, before)


@pytest.mark.full
def test_ranks_without_data_come_to_agree(ranks: Ranks) -> None:
    """Where nobody learns anything, gossip makes weights equal."""

    def run() -> Tensor:
        train = ltx.train_step(
            ltx.data_parallel(lambda p, x: (p["w"] * x).sum(), ltx.BaguaStrategy("low_precision_decentralized")), SGD
        )
        state, rank = train.init({"w": torch.zeros(5)}), int(ltx.axis_index())
        for step in range(60):
            state, _ = train(state, torch.full((5,), float(rank)) if step < 3 else torch.zeros(5))
        return state.params["w"]

    weights = torch.stack(list(ranks(3).run(run)))
    assert weights.abs().max() > 0.1
    torch.testing.assert_close(weights, weights.mean(0).expand_as(weights), rtol=0, atol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"peer_selection_mode": "shift_one"}, NODES], ids=str)
def test_weights_of_several_dtypes_travel(fields: dict[str, Any], ranks: Ranks, seed: int) -> None:
    results = list(ranks(2).run(trained, "decentralized", seed, first_bucket_bytes=40, **fields))
    for rank, history in enumerate(results):
        for step in range(1, 5):
            x, other = history[step - 1][0], results[1 - rank][step - 1][0]
            inputs = inputs_of(seed, step, rank)
            grads = torch.func.grad(odd_loss)(x, inputs)
            expected = {k: (x[k].double() + other[k].double()) / 2 - 0.1 * grads[k].double() for k in x}
            for k, got in history[step][0].items():
                off = 3e-2 if k == "half" else 1e-5
                torch.testing.assert_close(got.double(), expected[k], rtol=off, atol=off)


def inputs_of(seed: int, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    odd_params(generator)
    return [torch.randn(8, generator=generator)[rank] for _ in range(step + 1)][-1]


def test_complex_weights() -> None:
    def step(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (params["w"] * x).abs().square().sum()

    start = {"w": torch.tensor([1 + 1j, 2.0])}
    train = ltx.train_step(ltx.data_parallel(step, ltx.BaguaStrategy("decentralized")), SGD)
    state = train.init(start)
    for _ in range(2):
        x = torch.tensor([1.0, 2.0])
        state, _ = ltx.vmap(train, in_dims=(0 if state.step else None, 0))(state, x)
    w = start["w"] * (1 - 0.2 * x[:, None] ** 2)
    torch.testing.assert_close(state.params["w"], w.mean(0) - 0.2 * x[:, None] ** 2 * w)
    train = ltx.train_step(ltx.data_parallel(step, ltx.BaguaStrategy("low_precision_decentralized")), SGD)
    with pytest.raises(StrategyError, match=r"parameter 'w', complex64\[.*\], needs work on complex numbers"):
        train.init(start)


# --- ranks that come apart --------------------------------------------------------------------------------------------


def behind(algorithm_fields: dict[str, Any]) -> tuple[str, bool, float]:
    """Rank 1 goes back to an earlier state by itself. (what is raised, whether the state is kept, that it goes on)"""
    problem, rank = make_problem(0, 2, steps=6), int(ltx.axis_index())
    train = trainer("decentralized", communication_interval=2, **algorithm_fields)
    state = train.init({k: torch.tensor(v) for k, v in problem.start.items()})
    for step in range(4):
        if step == 2 and rank == 1:
            state = replace(state, sync_state=replace(state.sync_state, step=0))
        batch = torch.tensor(problem.x[step, rank]), torch.tensor(problem.y[step, rank])
        before = ltx.tree.map(torch.clone, state.params)
        try:
            state, _ = train(state, *batch)
        except RankMismatchError as error:
            kept = all(map(torch.equal, ltx.tree.flatten(before)[0], ltx.tree.flatten(state.params)[0]))
            ltx.init()
            state = replace(state, sync_state=replace(state.sync_state, step=2))  # now they agree
            state, metrics = train(state, *batch)
            return str(error), kept, float(metrics.loss)
    raise AssertionError("the ranks' steps were mixed up without a word")


@pytest.mark.parametrize("sockets", [False, True], ids=["shared memory", "sockets"])
def test_weights_of_another_step_are_refused(sockets: bool, on_new_axis: OnNewAxis) -> None:
    (text, kept, loss), (text_1, kept_1, loss_1) = on_new_axis(
        lambda: behind({"peer_selection_mode": "shift_one"}), sockets=sockets
    )
    assert text.startswith(
        "rank 0: its parameters, at step 2, were averaged with those of rank 1, which was at its step 0. Ranks must"
    )
    assert text_1.startswith("rank 1: its parameters, at step 0, were averaged with those of rank 0, which was at its ")
    assert kept
    assert kept_1
    assert loss > 0
    assert loss_1 > 0


@pytest.mark.parametrize("fields", [{}, NODES], ids=str)
def test_means_over_different_steps_are_refused(fields: dict[str, Any], on_new_axis: OnNewAxis) -> None:
    for rank, (text, kept, _) in enumerate(on_new_axis(lambda: behind(fields))):
        step = 0 if rank else 2
        assert text.startswith(f"rank {rank}: its parameters, at step {step}, were averaged with others, which were at")
        assert kept


def fails_in_the_optimizer() -> tuple[list[str], float]:
    """Rank 1's optimizer raises, when its peer has all that it needs. What is raised, and a sum in the last world."""
    problem, rank, calls = make_problem(0, 2), int(ltx.axis_index()), []

    def descend(grads: Any, state: Any, params: Any) -> Any:
        calls.append(state)
        if rank == 1 and len(calls) == 3:
            raise BrokenError
        return ltx.tree.map(lambda g: -0.1 * g, grads), state

    optimizer = ltx.optim.from_functions(lambda params: (), descend)
    train = ltx.train_step(ltx.data_parallel(loss, ltx.BaguaStrategy("decentralized", **NODES)), optimizer)
    state, raised = train.init({k: torch.tensor(v) for k, v in problem.start.items()}), []
    while "ReplicaDivergedError" not in raised:
        try:
            state, _ = train(state, torch.tensor(problem.x[0, rank]), torch.tensor(problem.y[0, rank]))
        except (BrokenError, DeadlockDetectedError, ReplicaDivergedError) as error:
            raised.append(type(error).__name__)
            ltx.init()
    return raised, ltx.psum(torch.ones(())).item()


def test_a_rank_that_waits_in_the_next_step_is_told(on_new_axis: OnNewAxis) -> None:
    """And if both go on as if nothing had happened, one of them a step behind, both hear that they have parted."""
    (raised, works), (raised_1, works_1) = on_new_axis(fails_in_the_optimizer)
    assert raised == ["DeadlockDetectedError", "ReplicaDivergedError"]
    assert raised_1 == ["BrokenError", "ReplicaDivergedError"]
    assert works == works_1 == 2.0
