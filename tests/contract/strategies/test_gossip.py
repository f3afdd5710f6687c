"""Ranks that share weights: which ranks communicate, what they send, and that they notice when they have come apart."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import DeadlockDetectedError, RankMismatchError, StrategyError
from tests.contract.strategies.problem import loss, make_problem
from tests.contract.strategies.test_failures import BrokenError
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import go_on, on_ranks, refuses
from tests.twins.cases import assert_same_bits

SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
NODES = {"hierarchical": True, "node_size": 2}


def trainer(algorithm: str, **fields: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, ltx.BaguaStrategy(algorithm, **fields)), SGD)


@pytest.mark.parametrize(("n", "fields", "what"), [(3, {}, "ranks"), (6, NODES, "nodes")])
def test_an_odd_number_cant_pair(n: int, fields: dict[str, Any], what: str) -> None:
    train, problem = trainer("decentralized", peer_selection_mode="shift_one", **fields), make_problem(0, n)
    text = f"\"shift_one\" pairs {what}, and axis 'data' has 3 of them. Use an even number of {what}, or "
    with pytest.raises(StrategyError, match=re.escape(text)):
        ltx.vmap(lambda x: train.init({k: torch.tensor(v) for k, v in problem.start.items()}))(torch.ones(n))


def sent(algorithm: str, steps: int = 4, **fields: Any) -> list[list[tuple[str, int]]]:
    """What each step issues, without headers: (operation, bytes)."""
    start = {"w": torch.ones(3, 4), "b": torch.ones(3), "s": torch.ones(()), "pad": torch.ones(1000)}
    train, issued = trainer(algorithm, **fields), []
    state = train.init(start)
    for x, y in make_problem(0, int(ltx.axis_size()), steps).batches():
        with ltx.profile.record() as trace:
            state, _ = train(state, x.float(), y.float())
        issued.append([(e.operation, e.nbytes) for e in trace.events if " " in e.label])
    return issued


NUMEL, TAG = 1016, 40


HALF, MESSAGE = 2 * (NUMEL + TAG), NUMEL // 2 + 8

#: Of so many ranks an algorithm, and the operations and bytes of each of its steps.
SENT: dict[str, tuple[int, str, dict[str, Any], list[list[tuple[str, int]]]]] = {
    "shift_one, each parameter once": (
        4,
        "decentralized",
        {"peer_selection_mode": "shift_one", "communication_interval": 2},
        [[("ppermute", 2 * HALF)], []] * 2,
    ),
    "all, in one all-reduce": (2, "decentralized", {}, [[("psum", 2 * HALF)]] * 4),
    "a node as one, whose two ranks send a half each": (
        4,
        "decentralized",
        {"peer_selection_mode": "shift_one", "steps": 1, **NODES},
        [[("psum_scatter", HALF), ("ppermute", HALF), ("all_gather", HALF)]],
    ),
    **{
        f"low precision, messages of a quarter, to {k}": (
            k + 1,
            "low_precision_decentralized",
            {"communication_interval": 3},
            [[("ppermute", NUMEL + 8)] * k, [], [], [("ppermute", NUMEL + 8)] * k],
        )
        for k in (1, 2)
    },
    "low precision by node, its own message and the other one's": (
        4,
        "low_precision_decentralized",
        {"steps": 1, **NODES},
        [[("psum_scatter", 2 * NUMEL), ("ppermute", MESSAGE), ("all_gather", 2 * MESSAGE)]],
    ),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name: str, ranks: Ranks) -> None:
    n, algorithm, fields, expected = SENT[name]
    for issued in ranks(n).run(sent, algorithm, **fields):
        assert issued == expected


def trained(algorithm: str, seed: int, **fields: Any) -> list[tuple[Any, Any]]:
    """After each step: (parameters, communication state); parameters of several dtypes and strides."""
    generator, rank = torch.Generator().manual_seed(seed), int(ltx.axis_index())
    train = ltx.train_step(ltx.data_parallel(odd_loss, ltx.BaguaStrategy(algorithm, **fields)), SGD)
    state, history = train.init(odd_params(generator)), []
    for _ in range(5):
        state, _ = train(state, torch.randn(8, generator=generator)[rank])
        history.append(ltx.tree.map(torch.clone, (state.params, state.sync_state.leaves)))
    return history


def written_between(overlap: Any, seed: int) -> list[Tensor]:
    """The weights, and the copy of the left neighbour's, of steps between which the program halves a module's weights.

    With n = 2 both neighbours are the same.
    """
    model = torch.nn.Linear(3, 2)
    loss = ltx.data_parallel(
        lambda p, x: ltx.functional_call(model, p, x).square().mean(), ltx.BaguaStrategy("low_precision_decentralized")
    )
    train, draw = (
        ltx.train_step(loss, SGD, overlap=overlap),
        torch.Generator().manual_seed(seed + int(ltx.axis_index())),
    )
    state = train.init(model)
    for number in range(6):
        if number == 3:
            with torch.no_grad():
                model.weight.mul_(0.5)
        state, _ = train(state, torch.randn(4, 3, generator=draw))
    return [state.params["weight"].clone(), state.sync_state.leaves["weight"]["left"].clone()]


@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_what_neighbours_know_is_right_after_a_write_between_steps(overlap: Any, ranks: Ranks, seed: int) -> None:
    (mine, of_other), (other, of_mine) = ranks(2).run(written_between, overlap, seed)
    assert torch.equal(of_mine, mine)
    assert torch.equal(of_other, other)


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
    small = {"first_bucket_bytes": 40, "bucket_bytes": 40}
    assert_ring(list(ranks(n).run(trained, "low_precision_decentralized", seed, **small)))


@pytest.mark.full
def test_nodes_know_each_other_to_the_last_bit(ranks: Ranks, seed: int) -> None:
    first, same, second, other = ranks(4).run(trained, "low_precision_decentralized", seed, **NODES)
    assert_ring([first, second])
    assert_same_bits((first, second), (same, other))


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


RING = ltx.train_step(
    ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.BaguaStrategy("low_precision_decentralized")), SGD
)


@on_ranks(2)
def test_a_broadcast_state_knows_its_neighbours() -> None:
    """Ranks that all have one rank's weights know them of each other: copies of others would pull at every step."""
    x = torch.full((3,), float(ltx.axis_index()))
    state = RING.broadcast(go_on(RING, RING.init(torch.ones(3)), [x] * 3).state, src=1)

    before, after = [state.params.clone(), go_on(RING, state, [torch.zeros(3)] * 10).params]
    torch.testing.assert_close(after, before)


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
    refuses(StrategyError, r"parameter 'w', complex64\[.*\], needs work on complex numbers", train.init, start)


def behind(algorithm_fields: dict[str, Any]) -> tuple[str, bool, float]:
    """Rank 1 goes back to an earlier state by itself. (what is raised, whether the state is kept, that it goes on)"""
    problem, rank = make_problem(0, 2, steps=4), int(ltx.axis_index())
    train = trainer("decentralized", communication_interval=2, **algorithm_fields)
    state = train.init({k: torch.tensor(v) for k, v in problem.start.items()})
    for step, batch in enumerate(problem.batches()):
        if step == 2 and rank == 1:
            state = replace(state, sync_state=replace(state.sync_state, step=0))
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
    while "RankMismatchError" not in raised:
        try:
            state, _ = train(state, *problem.batches()[0])
        except (BrokenError, DeadlockDetectedError, RankMismatchError) as error:
            raised.append(type(error).__name__)
            ltx.init()
    return raised, ltx.psum(torch.ones(())).item()


def test_a_rank_that_waits_in_the_next_step_is_told(on_new_axis: OnNewAxis) -> None:
    """And if both go on as if nothing had happened, one of them a step behind, both hear that they have parted."""
    (raised, works), (raised_1, works_1) = on_new_axis(fails_in_the_optimizer)
    assert raised == ["DeadlockDetectedError", "RankMismatchError"]
    assert raised_1 == ["BrokenError", "RankMismatchError"]
    assert works == works_1 == 2.0
