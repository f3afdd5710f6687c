"""guard="skip" and guard="raise": gradients that aren't finite on one rank, and what all ranks make of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import NotFiniteError, StrategyError, UnsupportedError
from tests.contract.bad_input.public import loss as linear
from tests.contract.strategies.problem import make_problem
from tests.contract.strategies.table import KINDS, ROWS
from tests.contract.strategies.test_conformance import tensors, trainer
from tests.kinds import OnNewAxis, Params, Ranks
from tests.train_on import go_on, inner, on_ranks, refuses, said, trained
from tests.twins.cases import assert_same_bits

NAN, INF = float("nan"), float("inf")
SGD = ltx.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = ltx.optim.from_torch(torch.optim.Adam, lr=0.1)
PLAIN_SGD = ltx.optim.from_torch(torch.optim.SGD, lr=1.0)
BAD_STEP = 4


def bits(state: Any) -> list[Tensor]:
    return [x.clone() for x in ltx.tree.flatten((state.params, state.buffers, state.opt_state, state.sync_state))[0]]


# --- every strategy --------------------------------------------------------------------------------------------------


@pytest.mark.full(but=1)
@pytest.mark.covering(1, of=lambda name, value: (KINDS[name], value))
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ROWS)
def test_every_strategy_skips_on_all_ranks(name: str, value: float, ranks: Ranks, seed: int) -> None:
    """One element on the last rank. Strategies that keep ranks together leave everything as it was."""
    row = ROWS[name]
    n = row.ranks[0]
    problem = make_problem(seed, n)
    problem.x[BAD_STEP, n - 1, 0, 0] = value

    def on_a_rank() -> tuple[list[bool], int, bool, list[Tensor]]:
        train = trainer(row, guard="skip")
        state, *begun = go_on(train, train.init(tensors(problem.start)), problem.batches(0, BAD_STEP))
        before = bits(state)
        state, *bad = go_on(train, state, problem.batches(BAD_STEP, BAD_STEP + 1))
        same = not row.replicated or all(map(torch.equal, before, bits(state)))
        state, *rest = go_on(train, state, problem.batches(BAD_STEP + 1))
        skipped = [bool(metrics.skipped) for part in (*begun, *bad, *rest) for metrics in part]
        return skipped, state.step, same, bits(train.finish(state))

    for skipped, count, same, end in ranks(n).run(on_a_rank):
        assert skipped == [step == BAD_STEP for step in range(problem.steps)]
        assert count == problem.steps
        assert same
        assert all(x.isfinite().all() for x in end)


@pytest.mark.full(but=1)
@pytest.mark.covering(1, of=lambda name: (KINDS[name],))
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if 2 in row.ranks])
def test_simulated_ranks_skip_as_processes_do(name: str, ranks: Ranks, seed: int) -> None:
    problem = make_problem(seed, 2)
    problem.x[BAD_STEP, 1, 0, 0] = NAN
    train, skipped = trainer(ROWS[name], guard="skip"), []

    def on_a_rank() -> Params:
        return train.finish(go_on(train, train.init(tensors(problem.start)), problem.batches()).state).params

    state = train.init(tensors(problem.start))
    for step in range(problem.steps):
        state, metrics = ltx.vmap(train, in_dims=(0 if step else None, 0, 0))(
            state, torch.tensor(problem.x[step]), torch.tensor(problem.y[step])
        )
        skipped.append(metrics.skipped.tolist())
    assert skipped == [[step == BAD_STEP] * 2 for step in range(problem.steps)]
    finished = ltx.vmap(train.finish)(state).params
    for rank, params in enumerate(ranks(2).run(on_a_rank)):
        for leaf, x in params.items():
            torch.testing.assert_close(finished[leaf][rank], x, rtol=1e-9, atol=1e-9)


def with_a_bad_step(strategy: ltx.Strategy, value: float | None, **kwargs: Any) -> tuple[list[str], bool, list[Tensor]]:
    """guard="raise": rank 1's batch is bad at a step, which every rank then does again with a good one."""
    rank, raised, kept = int(ltx.axis_index()), [], True

    def loss(p: Params, x: Tensor) -> Tensor:
        return ((p["w"] * x).sum() + p["b"] - 1).square() + 0 * p["unused"].sum()

    train = ltx.train_step(ltx.data_parallel(loss, strategy), ADAM, guard="raise", **kwargs)
    state = train.init({"w": torch.linspace(0, 1, 6), "b": torch.zeros(()), "unused": torch.ones(3)})
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        x = torch.randn(6, generator=generator)
        if step == BAD_STEP and value is not None:
            bad, before = x.clone(), bits(state)
            bad[2] = value if rank == 1 else bad[2]
            raised.append(said(NotFiniteError, train, state, bad))
            kept = all(map(torch.equal, bits(state), before))
        state, metrics = train(state, x)
        assert not metrics.skipped
    return raised, kept, bits(train.finish(state))


RAISING = {
    "ddp": ltx.DDPStrategy(),
    "several buckets": ltx.DDPStrategy(bucket_bytes=8, first_bucket_bytes=8),
    "zero": ltx.ZeroStrategy(),
    "error feedback": ltx.DDPStrategy(comm_hook=ltx.hooks.ByteGrad(error_feedback=True)),
    "local SGD": ltx.LocalSGDStrategy(3),
    "gossip": ltx.BaguaStrategy("decentralized"),
    "adasum": ltx.HorovodStrategy(op="adasum"),
    "DiLoCo": ltx.DiLoCoStrategy(3),
    "DiLoCo, sent ahead": ltx.DiLoCoStrategy(6, fragment_sync_delay=2),
}


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kwargs", [{}, {"donate": False}], ids=str)
@pytest.mark.parametrize("name", RAISING)
def test_all_ranks_raise_and_the_step_can_be_done_again(
    name: str, kwargs: dict[str, Any], on_new_axis: OnNewAxis
) -> None:
    results = on_new_axis(lambda: with_a_bad_step(RAISING[name], NAN, **kwargs))
    undisturbed = on_new_axis(lambda: with_a_bad_step(RAISING[name], None, **kwargs))
    told = results[0][0][0]
    assert told.startswith(
        "train_step: gradients of step 4 aren't finite. rank 1: leaf 'b' (NaN, 1 of 1 elements), leaf 'w' (NaN, "
        "6 of 6 elements). The state is as it was before the step, and may be used again."
    )
    for (raised, kept, end), (_, _, expected) in zip(results, undisturbed, strict=True):
        assert raised == [told]
        assert kept
        assert_same_bits(end, expected)


@on_ranks(3)
def test_infinite_ones_on_several_ranks_are_listed() -> None:
    train = ltx.train_step(ltx.data_parallel(lambda p, x: sum((q * x).sum() for q in p.values())), SGD, guard="raise")
    rank, state = int(ltx.axis_index()), train.init({str(i): torch.ones(4) for i in range(6)})
    x = torch.tensor([1.0, INF, 1.0, INF if rank == 2 else 1.0]) if rank else torch.ones(4)
    told = said(FloatingPointError, train, state, x)
    leaves = [", ".join(f"leaf '{i}' (infinite, {count} of 4 elements)" for i in range(4)) for count in (1, 2)]
    assert f"rank 1: {leaves[0]} and 2 more; rank 2: {leaves[1]} and 2 more. The state" in told


@on_ranks(2)
def test_what_only_the_sum_makes_infinite() -> None:
    train = ltx.train_step(ltx.data_parallel(inner, ltx.HorovodStrategy(op="sum")), SGD, guard="raise")
    told = said(NotFiniteError, train, train.init(torch.zeros(2)), torch.tensor([3e38, 1]))
    what = "each rank's own, computed again, are finite, but the reduced ones aren't"
    assert f"{what}: the value itself (infinite, 1 of 2 elements)." in told


class _Spoiling(ltx.hooks.CommHook):
    """The mean, whose first element is spoiled once it has arrived: what the wire has added up doesn't tell."""

    def reduce(self, share: ltx.hooks.BucketInput) -> ltx.hooks.Reduction:
        total, states = yield from ltx.hooks.AllReduce().reduce(share)
        total[0] = total[0] / 0
        return total, states


@on_ranks(2)
def test_what_a_hook_does_afterwards_is_seen() -> None:
    for hook, seen in ((ltx.hooks.AllReduce(), False), (_Spoiling(), True)):
        strategy = ltx.DDPStrategy(comm_hook=hook)
        assert trained(inner, SGD, torch.zeros(8), [torch.ones(8)], strategy, guard="skip").skipped == [seen]


@on_ranks(2)
def test_what_a_weight_makes_infinite_is_seen() -> None:
    """A sum of weights below the number of ranks makes gradients larger once they are reduced."""

    def loss(w: Tensor, x: Tensor, weight: Tensor) -> ltx.Weighted:
        return ltx.Weighted((w * x).sum(), weight)

    x, small = torch.tensor([2e38, -2e38]), torch.tensor(0.25 * (int(ltx.axis_index()) == 0))
    for weight, seen in ((torch.ones(()), False), (small, True)):
        assert trained(loss, SGD, torch.zeros(2), [(x, weight)], guard="skip").skipped == [seen]


@pytest.mark.parametrize("place", [0, 300_000, 700_000, -1])
@on_ranks(2)
def test_one_element_of_many_pieces(place: int) -> None:
    good = torch.ones(1_000_003)
    bad = good.clone()
    bad[place] = NAN if int(ltx.axis_index()) == 1 else 1.0
    skipped = trained(inner, SGD, torch.zeros(1_000_003), [good, bad, good], guard="skip").skipped
    assert skipped == [False, True, False]


# --- what is finite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", ["raise", "skip"])
@on_ranks(2)
def test_huge_gradients_are_no_alarm(guard: str) -> None:
    state, (metrics,) = trained(inner, SGD, torch.zeros(100), [torch.full((100,), 3e38)], guard=guard)
    assert not metrics.skipped
    assert state.params.all()


# --- together with the rest ------------------------------------------------------------------------------------------


def start(train: Any) -> Any:
    return train.init({"w": torch.linspace(-1, 1, 4), "b": torch.zeros(())})


def weighted(p: Params, x: Tensor) -> ltx.Weighted:
    return ltx.Weighted((x @ p["w"] + p["b"]).square().sum(), len(x))


CLIPPED = ltx.optim.chain(ltx.optim.clip_by_global_norm(0.5), ADAM)
COMBINED: dict[str, Callable[[ltx.Strategy], Any]] = {
    "accumulated": lambda s: (ltx.accumulate(ltx.data_parallel(linear, s), 2), ADAM),
    "clipped": lambda s: (ltx.data_parallel(linear, s), CLIPPED),
    "weighted": lambda s: (ltx.data_parallel(weighted, s), ADAM),
    "weighted, accumulated, clipped": lambda s: (ltx.accumulate(ltx.data_parallel(weighted, s), 2), CLIPPED),
    "bfloat16": lambda s: (ltx.mixed_precision(ltx.data_parallel(linear, s), ltx.Precision()), ADAM),
    "compiled loss": lambda s: (ltx.data_parallel(torch.compile(linear, backend="eager"), s), ADAM),
}


@pytest.mark.full(but=1)
@pytest.mark.slow_compile
@pytest.mark.parametrize("strategy", [ltx.DDPStrategy(), ltx.ZeroStrategy()], ids=["ddp", "zero"])
@pytest.mark.parametrize("name", COMBINED)
def test_combined_with(name: str, strategy: ltx.Strategy, ranks: Ranks, seed: int) -> None:
    """Skipped on processes, on simulated ranks and alone; raised on processes, on simulated ranks and alone."""

    def made(guard: Any) -> Any:
        step, optimizer = COMBINED[name](strategy)
        return ltx.train_step(step, optimizer, guard=guard, donate=False)

    good, bad = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    bad[1, 5, 3] = INF  # of the last micro-batch

    def on_a_rank(rank: int) -> tuple[list[Tensor], list[Tensor], str]:
        train = made("skip")
        state, first = train(start(train), good[rank])
        before = bits(state)
        state, metrics = train(state, bad[rank])
        assert (bool(first.skipped), bool(metrics.skipped)) == (False, True)
        told = said(NotFiniteError, made("raise"), state, bad[rank])
        return before, bits(state), told

    for before, after, told in ranks(2).run(lambda: on_a_rank(int(ltx.axis_index()))):
        assert_same_bits(after, before)
        assert re.search(r"rank 1: leaf 'b' \((NaN|infinite), 1 of 1 elements\), leaf 'w'", told)
        assert "rank 0" not in told
    before, after, told = on_a_rank(1)
    assert_same_bits(after, before)
    assert "rank 0: leaf 'b'" in told
    if name != "compiled loss":
        train = made("skip")
        state, _ = ltx.vmap(train, in_dims=(None, 0))(start(train), good)
        after, metrics = ltx.vmap(train)(state, bad)
        assert metrics.skipped.tolist() == [True, True]
        assert_same_bits(bits(after), bits(state))
        told = said(NotFiniteError, ltx.vmap(made("raise")), state, bad)
        assert "rank 1: leaf 'b' (" in told
        assert "rank 0" not in told


@pytest.mark.parametrize("kind", ["ranks", "vmap"])
def test_a_skipped_step_has_no_norm(kind: str, ranks: Ranks) -> None:
    """Neither the last step's; and the state keeps that one, as it keeps all else."""
    optimizer = ltx.optim.chain(ltx.optim.clip_by_global_norm(100.0), PLAIN_SGD)
    batches = torch.tensor([3.0, NAN, 4.0])

    def on_a_rank() -> list[Tensor]:
        return [m.grad_norm for m in trained(inner, optimizer, torch.zeros(1), batches[:, None], guard="skip").metrics]

    found = ranks(2).run(on_a_rank) if kind == "ranks" else [ltx.vmap(lambda _: on_a_rank())(torch.ones(2))]
    for norms in found:
        expected = torch.tensor([3.0, NAN, 4.0]) if kind == "ranks" else torch.tensor([[3.0] * 2, [NAN] * 2, [4.0] * 2])
        torch.testing.assert_close(torch.stack(list(norms)), expected, equal_nan=True)


@on_ranks(2)
def test_buffers_of_a_skipped_step_are_kept() -> None:
    def loss(p: Tensor, buffers: Params, x: Tensor) -> Any:
        return (p * x).sum(), {"mean": 0.9 * buffers["mean"] + 0.1 * x.mean()}

    batches = [torch.full((3,), value if ltx.world().rank else 1.0) for value in (1.0, NAN, 1.0)]
    found = trained(loss, SGD, torch.ones(3), batches, buffers={"mean": torch.zeros(())}, guard="skip")
    assert found.skipped == [False, True, False]
    assert found.state.buffers["mean"].item() == pytest.approx(0.19)
    assert found.params[0].item() == pytest.approx(1 - 0.1 - 0.19)  # two steps of momentum SGD


@on_ranks(2)
def test_random_numbers_are_drawn_again_to_find_out(seed: int) -> None:
    """Dropout decides which leaf it is; the generator then goes on as after a step that went well."""

    def loss(p: Params, x: Tensor) -> Tensor:
        place = torch.randint(100, ())
        return sum((p[name] * (x if i == place else 1.0)).sum() for i, name in enumerate(sorted(p)))

    torch.manual_seed(seed + int(ltx.axis_index()))
    train = ltx.train_step(ltx.data_parallel(loss), SGD, guard="raise", donate=False)
    state = train.init({f"{i:02}": torch.ones(2) for i in range(100)})
    before = torch.get_rng_state()
    train(state, torch.ones(2))
    after = torch.rand(1)
    torch.set_rng_state(before)
    told = said(NotFiniteError, train, state, torch.full((2,), NAN))
    assert torch.equal(torch.rand(1), after)
    torch.set_rng_state(before)
    assert f"rank {int(ltx.axis_index())}: leaf '{int(torch.randint(100, ())):02}' (NaN, 2 of 2 elements)" in told


@on_ranks(2)
def test_dynamic_loss_scaling_skips_until_it_isnt_to_blame() -> None:
    precision = ltx.Precision(compute=torch.float16, loss_scale=ltx.DynamicLossScale(init=8.0))
    train = ltx.train_step(ltx.mixed_precision(ltx.data_parallel(inner), precision), SGD, guard="raise")
    x = torch.full((3,), 1e6 if ltx.world().rank else 1.0)  # infinite in float16, whatever the scale
    state, metrics = go_on(train, train.init(torch.ones(3)), [x] * 3)
    assert [each.loss_scale.item() for each in metrics] == [8.0, 4.0, 2.0]
    refuses(NotFiniteError, r"gradients of step 3 aren't finite\. rank 1: the value itself ", train, state, x)
    assert state.params.tolist() == [1.0] * 3


# --- a limit ---------------------------------------------------------------------------------------------------------

#: Which steps are bad, with two in a row allowed: the last of them is the third.
BAD = [False, True, True, False, True, True, True]


def check_too_many(train: Any, x: Callable[[bool], Tensor], culprit: int) -> None:
    """What is skipped, the error after that, which leaves the state alone, and that the next bad step is skipped."""
    state = start(train)
    for bad in BAD[:-1]:
        state, metrics = train(state, x(bad))
        assert metrics.skipped.unique().tolist() == [bad]
    before = bits(state)
    told = said(NotFiniteError, train, state, x(True))
    assert told.startswith(f"train_step: gradients of step 6 aren't finite. rank {culprit}: leaf 'b'")
    assert " Nor were those of 2 steps before, which were skipped. The state is as it was before the step" in told
    assert "max_skipped=2 allows no more in a row" in told
    assert_same_bits(bits(state), before)
    state, _ = train(state, x(False))
    assert train(state, x(True))[1].skipped.all()


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", [name for name in RAISING if name not in ("several buckets", "adasum")])
@on_ranks(2)
def test_no_more_than_so_many_in_a_row(name: str) -> None:
    train = ltx.train_step(ltx.data_parallel(linear, RAISING[name]), SGD, guard="skip", max_skipped=2)
    value = NAN if int(ltx.axis_index()) == 1 else 0.5
    check_too_many(train, lambda bad: torch.full((3, 4), value if bad else 0.5), culprit=1)


def test_no_more_than_so_many_alone_and_on_simulated_ranks() -> None:
    train = ltx.train_step(ltx.data_parallel(linear), SGD, guard="skip", max_skipped=2)
    check_too_many(train, lambda bad: torch.full((3, 4), NAN if bad else 0.5), culprit=0)

    def of_ranks(state: Any, x: Tensor) -> Any:
        x = torch.stack([torch.full_like(x, 0.5), x])
        return ltx.vmap(train, in_dims=(None if state.step == 0 else 0, 0))(state, x)

    of_ranks.init = train.init  # type: ignore[attr-defined]
    check_too_many(of_ranks, lambda bad: torch.full((3, 4), NAN if bad else 0.5), culprit=1)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kwargs", [{"guard": "raise"}, {"guard": "skip", "max_skipped": 1}], ids=str)
def test_a_step_that_autograd_differentiates_raises_as_others(kwargs: dict[str, Any], requires_grad: bool) -> None:
    train = ltx.train_step(ltx.data_parallel(lambda p, x: (p * x).sqrt()), PLAIN_SGD, donate=False, **kwargs)
    state, bad = train.init(torch.tensor(1.0)), torch.tensor(-1.0, requires_grad=requires_grad)
    for _ in range(kwargs.get("max_skipped", 0)):
        state, metrics = train(state, bad)
        assert metrics.skipped
    with pytest.raises(NotFiniteError):
        train(state, bad)


def test_a_limit_beside_a_loss_scale_and_in_a_checkpoint() -> None:
    precision = ltx.Precision(compute=torch.float16, loss_scale=ltx.DynamicLossScale(init=8.0, growth_interval=2))
    train = ltx.train_step(ltx.mixed_precision(ltx.data_parallel(linear), precision), SGD, max_skipped=2)
    check_too_many(train, lambda bad: torch.full((3, 4), NAN if bad else 0.5), culprit=0)

    for made in (train, ltx.train_step(ltx.data_parallel(linear), SGD, guard="skip", max_skipped=2)):
        bad, resumed = torch.full((3, 4), NAN), start(made)
        state, _ = go_on(made, start(made), [bad] * 2)
        resumed.load_state_dict(state.state_dict())
        refuses(NotFiniteError, "step 2 aren't finite", made, resumed, bad)
    unlimited = start(ltx.train_step(ltx.data_parallel(linear), SGD))  # whose state counts from here on
    assert made(unlimited, bad)[0].loss_scale.good_steps == -1


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"guard": "skip", "max_skipped": 0}, "max_skipped must be None or"),
        ({"max_skipped": 2}, 'max_skipped=2 is a limit on skipped steps, and guard="off" skips none'),
        ({"guard": "raise", "max_skipped": 2}, 'guard="raise" skips none'),
    ],
)
def test_what_cant_be(kwargs: dict[str, Any], text: str) -> None:
    refuses(StrategyError, text, ltx.train_step, ltx.data_parallel(linear), SGD, **kwargs)


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow_compile
@pytest.mark.parametrize("kwargs", [{"guard": "raise"}, {"guard": "skip", "max_skipped": 2}], ids=str)
def test_compiled_steps_cant_raise(kwargs: dict[str, Any]) -> None:
    train = ltx.train_step(ltx.data_parallel(linear), ADAM, donate=False, **kwargs)
    refused = (UnsupportedError, torch._dynamo.exc.TorchDynamoException)
    with pytest.raises(refused, match='guard="raise" or max_skipped needs the gradients'):
        torch.compile(train, backend="eager", fullgraph=True)(start(train), torch.randn(5, 4))
