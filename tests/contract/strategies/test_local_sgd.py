"""Local SGD: torch's schedules, torch's own run, what is sent and when, and what is refused."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging import averagers, utils
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

import ltx
from ltx.errors import DeadlockDetectedError, StrategyError, SyncStateError, UnsupportedError
from tests import inside
from tests.contract.strategies.test_bagua import odd_params
from tests.inside import constant_hook, stateful
from tests.kinds import Params, Ranks
from tests.sent import recorded, ring
from tests.train_on import go_on, on_ranks, refuses, said, trained
from tests.twins.cases import assert_same_bits


def groups_of(averager: averagers.ModelAverager, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The group in which an averager of torch averages after each step, or None."""
    found: list[Any] = []
    monkeypatch.setattr(utils, "average_parameters_or_parameter_groups", lambda params, group: found.append(group))
    for step in range(steps):
        averager.average_parameters([])
        found.extend([None] * (step + 1 - len(found)))
    return found


@pytest.mark.parametrize("_", range(5))
def test_the_schedule_is_that_of_torchs_averager(_: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    period, warmup = int(torch.randint(2, 7, ())), int(torch.randint(0, 9, ()))
    theirs = groups_of(averagers.PeriodicModelAverager(period, warmup, process_group="all"), 40, monkeypatch)
    mine = ltx.LocalSGDStrategy(period, warmup)
    ddp = ltx.DDPStrategy(model_averaging_period=period, start_local_sgd_step=warmup)
    for step, group in enumerate(theirs):
        assert mine.group(step, 8) == (1 if group is None else 8)
        assert mine.communicates_after_update(step) == ddp.communicates_after_update(step) == (group is not None)
        assert (mine.hook(step) is None) == (ddp.hook(step) is None) == (step >= warmup)


def test_at_end_averages_one_step_earlier() -> None:
    for period, warmup in ((3, 0), (3, 2), (1, 1), ({2: 2, 4: 4, 8: 8}, 0), ({2: 4, 3: 8}, 5)):
        first, last = ltx.LocalSGDStrategy(period, warmup), ltx.LocalSGDStrategy(period, warmup, at_end=True)
        assert [last.group(step, 8) for step in range(warmup, 30)] == [
            first.group(step + 1, 8) for step in range(warmup, 30)
        ]
        assert [last.group(step, 8) for step in range(warmup)] == [1] * warmup


@pytest.mark.parametrize("period", [3, {2: 2, 4: 4, 8: 8}, {2: 4, 3: 8}, {4: 2, 6: 8}])
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_cycle_is_how_often_the_schedule_repeats(period: Any, warmup: int) -> None:
    strategy = ltx.LocalSGDStrategy(period, warmup)
    first, length = strategy.cycle
    groups = [strategy.group(step, 8) for step in range(first, first + 4 * length)]
    repeats = [n for n in range(1, 2 * length + 1) if groups[n:] == groups[:-n]]
    assert (first, length) == (warmup, repeats[0])


@pytest.mark.parametrize("levels", [{2: 2, 4: 4, 8: 8}, {3: 4, 5: 8}, {1: 2, 6: 8}, {7: 8}])
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_hierarchical_schedule_is_that_of_torchs_averager(
    levels: dict[int, int], warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 8)
    monkeypatch.setattr(dist, "new_subgroups", lambda group_size, group: (group_size, []))
    theirs = groups_of(HierarchicalModelAverager(OrderedDict(levels), warmup, process_group=8), 60, monkeypatch)
    mine = ltx.LocalSGDStrategy(levels, warmup)
    assert [mine.group(step, 8) for step in range(60)] == [group or 1 for group in theirs]
    assert [mine.communicates_after_update(step) for step in range(60)] == [group is not None for group in theirs]


def loss(params: Params, x: Tensor) -> Tensor:
    return ((params["w"] @ x).sum() + params["b"] - 1).square() + params["w"].square().sum()


PARAMS = {"w": torch.ones(5, 4), "b": torch.zeros(())}
NUMEL = 21


def trainer(strategy: ltx.Strategy) -> Any:
    return ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.Adam, lr=0.1))


def sent(strategy: ltx.Strategy, steps: int = 8) -> tuple[Params, list[list[tuple[str, int]]], list[Tensor]]:
    """(parameters, what each step sent, losses)"""
    train, generator = trainer(strategy), torch.Generator().manual_seed(int(ltx.axis_index()))
    found, traces = recorded(train, train.init(PARAMS), torch.randn(steps, 4, generator=generator))
    issued = [[(event.label, event.nbytes) for event in trace.events] for trace in traces]
    return found.params, issued, list(found.losses)


@pytest.mark.parametrize("n", [2, 3])
def test_local_steps_send_nothing_and_periods_send_the_parameters_once(n: int, ranks: Ranks) -> None:
    results = ranks(n).run(sent, ltx.LocalSGDStrategy(3, warmup_steps=2))
    _, issued, losses = results.rank(0)
    header = ring(inside.SUMMARY_BYTES, n)
    assert [sum(nbytes for _, nbytes in step) for step in issued[2:]] == [
        ring(4 * NUMEL, n) + header if step in (2, 5) else 0 for step in range(2, 8)
    ]
    assert issued[3] == issued[4] == []
    assert all("bucket 0" in [label for label, _ in step] for step in issued[:2])
    assert losses[:2] == results.rank(1)[2][:2]
    assert all(mine != other for mine, other in zip(losses[2:], results.rank(1)[2][2:], strict=True))


def test_at_end_ten_steps_of_period_five_end_with_equal_replicas(ranks: Ranks) -> None:
    results = ranks(2).run(sent, ltx.LocalSGDStrategy(5, at_end=True), 10)
    assert [step for step, events in enumerate(results.rank(0)[1], 1) if events] == [5, 10]
    assert_same_bits(results.rank(0)[0], results.rank(1)[0])


def test_gradients_stay_within_nodes(ranks: Ranks) -> None:
    """Each step sends them around a node of two, and its header too."""
    results = ranks(4).run(sent, ltx.LocalSGDStrategy({2: 2, 3: 4}, subgroup=2), 4)
    gradients = ("bucket 0", ring(4 * NUMEL, 2))
    of_all, of_node = ring(4 * NUMEL, 4) + ring(inside.SUMMARY_BYTES, 4), ring(inside.SUMMARY_BYTES, 2)
    for params, issued, _ in results:
        assert all(gradients in step for step in issued)
        assert [sum(nbytes for _, nbytes in step) for step in issued] == [
            gradients[1] + of_node + more for more in (of_all, 0, ring(4 * NUMEL, 2) + of_node, of_all)
        ]
        assert params["w"].equal(results.rank(0)[0]["w"])


@pytest.mark.parametrize("strategy", [ltx.LocalSGDStrategy(1), ltx.DiLoCoStrategy(1, 1.0, 0.0)], ids=["SGD", "DiLoCo"])
@on_ranks(2)
def test_parameters_of_all_kinds(strategy: ltx.Strategy, seed: int) -> None:
    params = odd_params(torch.Generator().manual_seed(seed))
    scale = 1.0 + int(ltx.axis_index())

    def loss(p: Params) -> Tensor:
        return scale * sum(x.double().square().sum() for x in p.values())

    state, _ = trained(loss, ltx.optim.from_torch(torch.optim.SGD, lr=0.1), params, [()], strategy)
    expected = {k: (x - 0.1 * 2 * 1.5 * x.double()).to(x.dtype) for k, x in params.items()}
    half, expected_half = state.params.pop("half"), expected.pop("half")
    torch.testing.assert_close(state.params, expected)
    torch.testing.assert_close(half, expected_half, rtol=0.02, atol=0)  # three roundings of 2^-8


@on_ranks(4)
def test_second_derivatives_of_a_nodes_mean_are_refused() -> None:
    """They would be those of the mean over all ranks, beside first ones of the node's."""
    step = ltx.data_parallel(lambda w, x: x * w**2, ltx.LocalSGDStrategy(4, subgroup=2))
    w, x = torch.tensor(1.0), torch.tensor(10.0 ** ltx.world().rank)
    text = r"needs a mean of gradients, which WithinNode\(ranks=2\) doesn't offer"
    for derivative in (torch.func.grad(torch.func.grad(step)), torch.func.hessian(step)):
        refuses(UnsupportedError, text, derivative, w, x)
    assert torch.func.grad(step)(w, x).item() == (11.0 if ltx.world().rank < 2 else 1100.0)


@on_ranks(4)
def test_sparse_gradients_stay_within_nodes_too() -> None:
    rank = ltx.world().rank
    own = torch.zeros(4).index_fill(0, torch.tensor(rank), 1.0)
    (dense, sparse), _ = ltx.sync_gradients([own, own.to_sparse()], ltx.LocalSGDStrategy(4, subgroup=2))
    assert sparse.to_dense().tolist() == dense.tolist() == ([0.5, 0.5, 0, 0] if rank < 2 else [0, 0, 0.5, 0.5])


@on_ranks(4)
def test_a_node_waits_for_no_other() -> None:
    """The ranks of the second node only begin once those of the first have done two steps alone."""
    rank, world = int(ltx.axis_index()), torch.distributed.distributed_c10d._get_default_store()
    step = ltx.data_parallel(lambda w, x: (w - x).square(), ltx.LocalSGDStrategy(3, subgroup=2))
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
    x = torch.tensor(float(rank))
    state, _ = train(train.init(torch.zeros(())), x)  # averages
    if rank > 1:
        world.wait(["first/0", "first/1"])
    alone = go_on(train, state, [x] * 2)
    world.set(f"first/{rank}", "done")
    state, _ = train(alone.state, x)
    # After the mean of the first step, 1.5, each node goes to its own mean; then all average.
    assert [*alone.losses.tolist(), state.params.item()] == [1.25, 0.25, 1.5]


@on_ranks(4)
def test_nodes_may_reduce_in_half_precision() -> None:
    """Mixed precision rounds a node's shares, and they stay in the node."""
    step = ltx.data_parallel(lambda w, x: (w * x).sum(), ltx.LocalSGDStrategy(5, 1, subgroup=2))
    step = ltx.mixed_precision(step, ltx.Precision(reduce=torch.bfloat16))
    train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=1.0))
    state = train.init(torch.zeros(2))
    state = replace(state, sync_state=replace(state.sync_state, step=2))
    state, _ = train(state, torch.full((2,), float(ltx.axis_index())))
    assert state.params.tolist() == ([-0.5, -0.5] if ltx.axis_index() < 2 else [-2.5, -2.5])


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (
            ltx.LocalSGDStrategy(2, subgroup=2),
            "LocalSGDStrategy.subgroup=2: axis 'data' has 3 ranks, which don't divide into nodes of that size. Give a "
            "divisor.",
        ),
        (
            ltx.LocalSGDStrategy({2: 2, 4: 4}),
            "LocalSGDStrategy.period=((2, 2), (4, 4)): the last number of ranks must be all of axis 'data', 3.",
        ),
    ],
)
def test_ranks_that_dont_divide(strategy: ltx.Strategy, text: str) -> None:
    train = trainer(strategy)
    train(train.init(PARAMS), torch.ones(4))  # one rank alone takes any
    assert said(StrategyError, ltx.vmap(train, in_dims=(None, 0)), train.init(PARAMS), torch.ones(3, 4)) == text


def test_steps_have_to_be_counted() -> None:
    with pytest.raises(SyncStateError, match=re.escape("was given bare parameters")):
        ltx.data_parallel(loss, ltx.LocalSGDStrategy(2, warmup_steps=1))(PARAMS, torch.ones(4))


ONE_PHASE_LATER = [
    ltx.LocalSGDStrategy(3, 2),
    ltx.DDPStrategy(model_averaging_period=3, start_local_sgd_step=2),
    ltx.BaguaStrategy("qadam", warmup_steps=2),
    ltx.BaguaStrategy("async", warmup_steps=2),
]


@pytest.mark.parametrize("strategy", ONE_PHASE_LATER, ids=str)
def test_a_graph_holds_one_phase(strategy: ltx.Strategy) -> None:
    refuses(UnsupportedError, "a graph that is compiled at step 1 needs one reduction", constant_hook, strategy, 1)
    assert constant_hook(strategy, 2) == strategy.hook(2)
    assert stateful(strategy), "its steps are counted"


def test_a_rank_that_fails_in_its_node_is_missed_by_the_others_when_they_meet(ranks: Ranks) -> None:
    """Rank 1 raises in a backward pass, which rank 0 waits for; the other node is told at the first mean of all."""

    def run(fails: bool) -> tuple[list[str], int]:
        rank, broken = int(ltx.axis_index()), []

        def loss(w: Tensor, x: Tensor) -> Tensor:
            product = w * x
            if broken:
                product.register_hook(lambda grad: 1 / broken.pop())
            return (product - 1).square()

        step = ltx.data_parallel(loss, ltx.LocalSGDStrategy(4, subgroup=2))
        train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        state, raised = train.init(torch.zeros(())), []
        for number in range(5):
            broken += [0] if fails and (rank, number) == (1, 2) else []
            try:
                state, _ = train(state, torch.tensor(1.0 + rank))
            except (ZeroDivisionError, DeadlockDetectedError) as error:
                raised.append(type(error).__name__)
                break
        return raised, state.step

    found = ranks(4).run(run, True)
    told = ["DeadlockDetectedError"]
    assert [raised for raised, _ in found] == [told, ["ZeroDivisionError"], told, told]
    assert [step for _, step in found] == [2, 2, 4, 4]
    assert [raised for raised, _ in ranks(4).run(run, False)] == [[]] * 4
