"""plan: times against those found by hand, and against what must be so."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch

import ltx
from ltx import hooks
from ltx.errors import InputError, StrategyError
from ltx.extend import Exchange, Update
from ltx.profile import Cost, plan
from ltx.strategies import StateLayout, StepInfo, Updated
from tests.contract.strategies.test_protocol import LocalSGD, PostLocalSGD

N, LATENCY, BANDWIDTH = 4, 1e-3, 8e6  # a byte a microsecond
PARAMS = {"a": torch.empty(30_000), "b": torch.empty(10_000)}  # 120 kB and 40 kB; b's gradient comes first
FAST = ltx.profile.Network(8e9, 1e-5)
HEADER_S = 6 * LATENCY + 96e-6


def planned(strategy: ltx.Strategy, compute_s: float = 1.0, world: int = N, **kwargs: Any) -> Cost:
    network = {"world": world, "bandwidth": BANDWIDTH, "latency": LATENCY, "compute_s": compute_s}
    return plan(strategy, PARAMS, **{**network, **kwargs})


def ring(nbytes: int) -> float:
    """A sum among four: six messages, one and a half times the bytes."""
    return 6 * LATENCY + 1.5 * nbytes * 1e-6


@dataclass(frozen=True, kw_only=True)
class Local(LocalSGD):
    @property
    def cycle(self) -> tuple[int, int]:
        return 0, self.period


@dataclass(frozen=True, kw_only=True)
class PostLocal(PostLocalSGD):
    @property
    def cycle(self) -> tuple[int, int]:
        return 3, self.period


@dataclass(frozen=True, kw_only=True)
class Background(ltx.Strategy):
    """The parameters' mean is made in the background of as many steps as it takes: `period`."""

    layout: ClassVar[StateLayout] = StateLayout(params="per_rank", opt_state="per_rank")

    period: int = 1

    @property
    def cycle(self) -> tuple[int, int]:
        return 0, self.period

    def hook(self, step: int) -> None:
        return None

    def begin(self, params: Any, states: Any, info: StepInfo, pending: Exchange | None) -> Exchange:
        if pending is not None:
            return pending
        return self.exchange(hooks.AllReduce(), list(params.values()), list(params), info, background=True)

    def update(self, update: Update, states: Any, info: StepInfo, pending: Exchange) -> Updated:
        if (info.step + 1) % self.period:
            return Updated(*update.apply(), states, pending)
        mean, _ = pending.wait()
        return Updated(dict(zip(update.params, mean, strict=True)), update.opt_state, states)


@dataclass(frozen=True, kw_only=True)
class Even(ltx.DDPStrategy):
    def check_axis(self, axis: ltx.Axis) -> None:
        if axis.size % 2:
            raise StrategyError(f"Even needs an even number of ranks, got {axis.size}.")


@dataclass(frozen=True, kw_only=True)
class Picky(ltx.DDPStrategy):
    def check_optimizer(self, optimizer: ltx.optim.Optimizer) -> None:
        if "lr=0.5" not in repr(optimizer):
            raise StrategyError("Picky trains with lr=0.5 alone.")


def ddp(**kwargs: Any) -> ltx.DDPStrategy:
    return ltx.DDPStrategy(**{"bucket_bytes": 1, "first_bucket_bytes": 1, **kwargs})


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_one_bucket_goes_out_behind_the_backward_pass() -> None:
    cost = planned(ltx.DDPStrategy())
    assert cost.time_s == pytest.approx(1.0 + ring(160_000))
    assert (cost.bytes_per_rank, cost.collectives) == (240_000, 1)
    assert cost.waiting_s == pytest.approx(ring(160_000))
    assert cost.link_s == pytest.approx(ring(160_000) + HEADER_S)


def test_buckets_go_out_while_the_backward_pass_goes_on() -> None:
    # b is there after a quarter of the backward pass, and its sum is done before a is there.
    assert planned(ddp()).time_s == pytest.approx(1.0 + ring(120_000))
    # With less work b's sum is under way when a is there, and a's waits for it.
    b_there = 0.05 * (0.3 + 0.6 / 4)
    assert planned(ddp(), 0.05).time_s == pytest.approx(b_there + ring(40_000) + ring(120_000) + 0.005)
    # No work: the header, then one after the other.
    assert planned(ddp(), 0.0).time_s == pytest.approx(HEADER_S + ring(40_000) + ring(120_000))


def test_a_hook_in_two_phases() -> None:
    hook = hooks.error_feedback(hooks.FP16())  # an exchange of 2 bytes a number, then a gather of the parts
    one = 3 * LATENCY + 0.75 * 80_000e-6
    assert planned(ltx.DDPStrategy(comm_hook=hook)).time_s == pytest.approx(1.0 + 2 * one)
    # Two buckets, which are ready at once: b's first phase, a's, and then the second ones.
    assert planned(ddp(comm_hook=hook), 0.0).time_s == pytest.approx(HEADER_S + 12 * LATENCY + 1.5 * 80_000e-6)


def test_a_second_phase_goes_out_where_the_rank_launches_another_bucket() -> None:
    """b's first phase completes long before a is there, and its second one goes out behind a's first all the same."""
    of_b, of_a = (3 * LATENCY + 1.5e-6 * numel for numel in (10_000, 30_000))
    hook = hooks.error_feedback(hooks.FP16())
    assert planned(ddp(comm_hook=hook)).time_s == pytest.approx(1.0 + 2 * of_a + of_b)


def test_nodes_inside_of_which_the_network_is_faster() -> None:
    """Four ranks, two in each node: within them a scatter and a gather, each of half; a sum of halves between them."""
    nodes = ltx.BaguaStrategy("gradient_allreduce", hierarchical=True, node_size=2)
    within, between = 1e-5 + 80_000 * 8 / 8e9, 2 * LATENCY + 80_000e-6
    for inside, gather in (({2: FAST}, within), ({}, LATENCY + 80_000e-6)):
        assert planned(nodes, 0.0, inside=inside).time_s == pytest.approx(HEADER_S + 2 * gather + between)
    # A sum over all is as slow as its slowest link, unless all are neighbours.
    assert planned(ltx.DDPStrategy(), 0.0, inside={2: FAST}) == planned(ltx.DDPStrategy(), 0.0)
    near = planned(ltx.DDPStrategy(), 0.0, bandwidth=FAST.bandwidth, latency=FAST.latency)
    assert planned(ltx.DDPStrategy(), 0.0, inside={2: ltx.profile.Network(1.0, 9.0), 8: FAST}).time_s == near.time_s


def test_local_steps_and_a_mean_in_every_third() -> None:
    cost = planned(Local(period=3))
    assert cost.time_s == pytest.approx(1.0 + (HEADER_S + ring(160_000)) / 3)
    assert (cost.bytes_per_rank, cost.collectives) == (80_000, pytest.approx(1 / 3))
    assert planned(Local(period=3), steps=range(2)).bytes_per_rank == 0
    assert planned(Local(period=3), steps=range(2, 3)).bytes_per_rank == 240_000


def test_warm_up_is_left_out() -> None:
    assert planned(PostLocal()).time_s == planned(Local()).time_s
    assert planned(PostLocal(), steps=range(2)).bytes_per_rank == 240_000
    for hook in (hooks.PowerSGD(1, start_step=10), hooks.after(10, hooks.ByteGrad())):
        first, later = (ltx.DDPStrategy(comm_hook=hook.at(step)) for step in (0, 10))
        assert planned(ltx.DDPStrategy(comm_hook=hook)).bytes_per_rank == planned(later).bytes_per_rank
        assert planned(ltx.DDPStrategy(comm_hook=hook), steps=range(10)).time_s == planned(first).time_s


@pytest.mark.parametrize("period", [1, 3])
def test_what_goes_on_in_the_background_is_hidden_as_far_as_there_is_work(period: int) -> None:
    taken = ring(160_000)
    assert planned(Background(period=period)).time_s == pytest.approx(1.0)
    # All but the last step's optimizer hides it.
    short = 0.1 / period
    assert planned(Background(period=period), short).time_s == pytest.approx((taken + 0.1 * short) / period)
    assert planned(Background(period=period)).bytes_per_rank == 240_000 / period


def test_one_rank_sends_nothing() -> None:
    for strategy in (ltx.DDPStrategy(), Local(), Background()):
        cost = planned(strategy, world=1)
        assert cost.time_s == pytest.approx(1.0)
        assert (cost.bytes_per_rank, cost.collectives, cost.traffic) == (0, 0, ())


# --- what must be so -------------------------------------------------------------------------------------------------

STRATEGIES: dict[str, ltx.Strategy] = {
    "ddp": ddp(),
    "fp16": ddp(comm_hook="fp16"),
    "bytegrad": ddp(comm_hook=hooks.ByteGrad()),
    "powersgd": ddp(comm_hook=hooks.PowerSGD(2, start_step=0)),
    "topk": ddp(comm_hook=hooks.TopK(0.1)),
    "randomk in bytes": ddp(comm_hook=hooks.chain(hooks.RandomK(0.5), hooks.ByteGrad())),
    "local": Local(),
    "background": Background(),
    "sent ahead": ltx.DiLoCoStrategy(4, fragments=2, fragment_sync_delay=1),
}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_are_those_that_are_explained(name: str) -> None:
    strategy, sgd = STRATEGIES[name], ltx.optim.from_torch(torch.optim.SGD, lr=0.1)
    params = {"u": torch.randn(30, 40), "v": torch.randn(17), "w": torch.randn(64, 8)}
    train = ltx.train_step(ltx.data_parallel(lambda p: p["u"].sum(), strategy), sgd)
    for world in (2, 5):
        cost = plan(strategy, params, world=world, bandwidth=1e9, latency=1e-5, compute_s=0.1)
        first, length = strategy.cycle
        found = [ltx.profile.explain(train, params, world=world, sync_step=first + length + k) for k in range(length)]
        assert cost.bytes_per_rank == sum(x.bytes for x in found) / length
        assert cost.collectives == sum(x.collectives for x in found) / length
        headers = [t.nbytes for t in cost.traffic if t.kind == "summaries"]
        assert sum(headers) == pytest.approx(sum(x.summary_bytes for x in found) / length)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_worse_networks_take_longer(name: str) -> None:
    strategy = STRATEGIES[name]

    def rising(times: list[float]) -> bool:
        return all(a <= b for a, b in pairwise(times)) and times[0] < times[-1]

    assert rising([planned(strategy, 0.01, world=n).time_s for n in (1, 2, 3, 8, 100, 1000)])
    assert rising([planned(strategy, 0.01, bandwidth=b).time_s for b in (1e12, 1e9, 1e8, 1e6)])
    assert rising([planned(strategy, 0.01, latency=a).time_s for a in (0.0, 1e-6, 1e-4, 1e-1)])
    assert rising([planned(strategy, c).time_s for c in (0.0, 0.01, 0.1, 1.0)])
    for compute_s in (0.0, 0.01, 1.0):
        assert planned(strategy, compute_s).time_s >= compute_s * (1 - 1e-12)


# --- as text, and errors ---------------------------------------------------------------------------------------------

TABLE = """\
DDPStrategy(comm_hook=FP16()) on 4 ranks, a step: 1.13 s

traffic      sent  collectives  on the link
---------  ------  -----------  -----------
summaries    96 B            1       6.1 ms
gradients  120 kB            1       126 ms

computing 1 s, waiting 126 ms"""


@pytest.mark.full
def test_many_ranks_take_no_longer_to_plan_for() -> None:
    """10,000 of them as 8, by the calls made: seconds would be the machine's."""
    params = {str(i): torch.empty(160_000, device="meta") for i in range(160)}
    for strategy in (
        ltx.DDPStrategy(comm_hook=hooks.PowerSGD(rank=4)),
        ltx.ZeroStrategy(),
        ltx.DiLoCoStrategy(period=30),
        ltx.BaguaStrategy("async", schedule=(8, 4)),
        ltx.BaguaStrategy("decentralized", peer_selection_mode="shift_one"),
        ltx.BaguaStrategy("low_precision_decentralized"),
        ltx.BaguaStrategy("gradient_allreduce", hierarchical=True, node_size=4),
    ):
        _, few, many = [calls_of_plan(strategy, params, ranks) for ranks in (8, 8, 10_000)]  # the first also imports
        assert many < 2 * few, strategy


def calls_of_plan(strategy: ltx.Strategy, params: dict[str, torch.Tensor], ranks: int) -> int:
    network = {"world": ranks, "bandwidth": 1e10, "latency": 5e-5, "compute_s": 0.1}
    count = itertools.count()
    sys.setprofile(lambda *_: next(count))
    try:
        plan(strategy, params, **network)
    finally:
        sys.setprofile(None)
    return next(count)


def test_table() -> None:
    cost = planned(ltx.DDPStrategy(comm_hook="fp16"))
    assert str(cost) == TABLE
    assert cost._repr_html_().startswith("<div><pre>DDPStrategy(comm_hook=FP16()) on 4 ranks")
    assert cost._repr_html_().count("<tr>") == 1 + len(cost.traffic)
    assert str(planned(Local(period=5))).startswith("Local(period=5) on 4 ranks, mean of 5 steps: 1.05 s\n")
    assert str(planned(ltx.DDPStrategy(), world=1)).startswith("DDPStrategy() on 1 rank, a step: 1 s\ncomputing 1 s")


def test_a_strategy_that_insists_on_an_optimizer() -> None:
    own = ltx.optim.from_torch(torch.optim.SGD, lr=0.5)
    with pytest.raises(StrategyError, match=re.escape("Picky trains with lr=0.5 alone.")):
        planned(Picky())
    assert planned(Picky(), optimizer=own).bytes_per_rank == 240_000
    train = ltx.train_step(ltx.data_parallel(lambda p: p["a"].sum(), Picky()), own)
    assert ltx.profile.explain(train, PARAMS, world=N).bytes == 240_000


def test_errors() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"world": 0}, "plan: world must be a whole number of at least 1, got 0."),
        ({"world": 2.0}, "plan: world must be a whole number of at least 1, got 2.0."),
        ({"bandwidth": 0}, "plan: bandwidth must be a finite number of more than 0, got 0."),
        ({"latency": -1.0}, "plan: latency must be a finite number of at least 0, got -1.0."),
        ({"compute_s": float("nan")}, "plan: compute_s must be a finite number of at least 0, got nan."),
        ({"inside": {0: FAST}}, "plan: a group of inside must be a whole number of at least 1, got 0."),
        ({"inside": {2: 1e9}}, "plan: inside maps numbers of ranks to ltx.profile.Network, got {2: 1000000000.0}."),
        ({"steps": range(0)}, "plan: steps must be a range of steps that follow one another, got range(0, 0)."),
        ({"steps": 3}, "plan: steps must be a range of steps that follow one another, got 3."),
    ]
    for wrong, text in cases:
        with pytest.raises(InputError, match=re.escape(text)):
            planned(ltx.DDPStrategy(), **wrong)
    with pytest.raises(StrategyError, match=re.escape("Even needs an even number of ranks, got 3.")):
        planned(Even(), world=3)


@pytest.mark.parametrize("op", ["average", "adasum"])
def test_steps_without_a_message_are_in_the_mean(op: str) -> None:
    each, third = (planned(ltx.HorovodStrategy(op=op, backward_passes_per_step=passes)) for passes in (1, 3))
    assert each.bytes_per_rank >= 240_000
    assert third.bytes_per_rank == pytest.approx(each.bytes_per_rank / 3)


def test_a_cycle_that_isnt_one_is_found() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Forgotten(PostLocal):
        cycle = ltx.Strategy.cycle

    arguments: dict[str, Any] = {"world": 2, "bandwidth": 1e9, "latency": 1e-4, "compute_s": 0.1}
    text = "Forgotten.cycle says that from step 0 on steps repeat every 1, and communicates_after_update(1) isn't"
    with pytest.raises(StrategyError, match=re.escape(text)):
        plan(Forgotten(), {"w": torch.ones(4)}, **arguments)
    said = plan(Forgotten(), {"w": torch.ones(4)}, **arguments, steps=range(3, 6))
    assert said.traffic == plan(PostLocal(), {"w": torch.ones(4)}, **arguments, steps=range(3, 6)).traffic
