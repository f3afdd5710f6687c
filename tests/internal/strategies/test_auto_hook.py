"""Buckets and hooks that are chosen: what, when and why, and that all else is as if it had been said."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ltx
from ltx import hooks
from ltx.core.comm import network as measured_network
from ltx.core.gradients.planning import MIB, bucket_sizes
from ltx.errors import InputError, RankMismatchError, SyncStateError, UnsupportedError
from ltx.strategies.ddp import candidates, choice_for
from tests.kinds import Ranks
from tests.twins.cases import Params, assert_same_bits, own_axis, params_of, seeded
from tests.twins.training import adamw, mean_step, problem, run

FAST = ltx.profile.Network(bandwidth=100e9, latency=5e-6)
GIGABIT = ltx.profile.Network(bandwidth=1e9, latency=1e-4)
NEAR = ltx.profile.Network(bandwidth=1e9, latency=2e-5)
SLOW = ltx.profile.Network(bandwidth=1e8, latency=1e-4)
AUTO = ltx.DDPStrategy(comm_hook="auto", bucket_bytes="auto")
#: What the candidates are, by name.
HOOKS = {name: hook for name, (hook, _) in candidates().items()}


def wide(numel: int = 2_000_000) -> Params:
    """Large enough for bandwidth to count, on the meta device."""
    return {"w": torch.empty(numel // 1000, 1000, device="meta"), "b": torch.empty(1000, device="meta")}


def on(network: ltx.profile.Network | None, **fields: Any) -> ltx.DDPStrategy:
    return dataclasses.replace(AUTO, network=network, **fields)


# --- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("bandwidth", "chosen"), [(100e9, "none"), (10e9, "bf16"), (1e9, "bytegrad"), (1e8, "powersgd"), (1e6, "powersgd")]
)
def test_the_slower_the_link_the_more_is_left_out(bandwidth: float, chosen: str) -> None:
    choice = choice_for(AUTO, wide(), 2, ltx.profile.Network(bandwidth, 1e-4))
    assert choice.name == chosen
    assert list(choice.sent)[-1] == chosen


def test_what_cannot_be_made_smaller_is_left_as_it_is() -> None:
    """Gradients in half precision, and vectors, of which there is no low rank."""
    vectors = {"w": torch.empty(2_000_000, device="meta")}
    assert choice_for(AUTO, vectors, 2, SLOW).name == "bytegrad"
    half = {"w": torch.empty(2_000_000, device="meta", dtype=torch.bfloat16)}
    assert choice_for(AUTO, half, 2, ltx.profile.Network(10e9, 1e-4)).name == "none"


def test_latency_alone_is_no_reason() -> None:
    assert choice_for(AUTO, {"w": torch.empty(10, 10)}, 2, ltx.profile.Network(1e9, 1e-2)).name == "none"
    assert choice_for(AUTO, {}, 2, SLOW).name == "none"


def test_hooks_that_cannot_be_wrapped_or_never_begin_are_no_candidates() -> None:
    """A sum in half precision is asked of hooks that have sums; local SGD may start before PowerSGD compresses."""
    casted = choice_for(on(None, comm_wrapper="bf16"), wide(), 2, SLOW)
    assert {"none", "powersgd"} <= casted.sent.keys()
    local = on(None, model_averaging_period=4, start_local_sgd_step=500)
    assert list(choice_for(local, wide(), 2, SLOW).sent)[-1] == "bytegrad"
    never = on(None, model_averaging_period=4, start_local_sgd_step=0)
    assert choice_for(never, wide(), 2, SLOW).name == "none"


def test_in_a_world_of_one_there_is_nothing_to_choose() -> None:
    for network in (None, SLOW):
        state = ltx.data_parallel(lambda p: p["w"].sum(), on(network)).init({"w": torch.ones(3)})
        assert (state.choice, state.leaves) == ("none", {})


def test_the_choice_is_part_of_the_states_structure() -> None:
    state = ltx.data_parallel(lambda p: p["w"].sum(), AUTO).init({"w": torch.ones(3)})
    leaves, spec = ltx.tree.flatten(state)
    assert ltx.tree.unflatten(spec, leaves).choice == "none"
    assert ltx.tree.flatten(dataclasses.replace(state, choice="bf16"))[1] != spec
    assert pickle.loads(pickle.dumps(state)).choice == "none"
    assert state.advanced().choice == "none"


# --- simulated ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("network", "hook"), [(None, "none"), (FAST, "none"), (GIGABIT, "bytegrad")])
def test_simulated_ranks_take_what_they_are_told_of_the_network(
    network: ltx.profile.Network | None, hook: str, seed: int
) -> None:
    params, x = {"w": torch.randn(1000, 700)}, torch.randn(3, 4, 1000)

    def gradients(strategy: ltx.Strategy) -> Params:
        step = ltx.data_parallel(lambda p, x: (x @ p["w"]).square().mean(), strategy)

        def one(x: Tensor) -> Any:
            state = step.init(params)
            assert strategy != on(network) or state.choice == hook
            (grads, _), _ = ltx.grad_and_value(step)(params, x, sync_state=state)
            return grads

        return cast(Params, ltx.vmap(one)(x))

    # Elementwise or by parts: sizes of buckets matter to one of them alone.
    sizes = {} if network is None else {"bucket_bytes": "auto", "network": network}
    assert_same_bits(gradients(on(network)), gradients(ltx.DDPStrategy(comm_hook=HOOKS[hook], **sizes)))


# --- processes -------------------------------------------------------------------------------------------------------


def module_of(seed: int) -> nn.Module:
    with seeded(seed):
        return nn.Linear(300, 400)


def loss_of(module: nn.Module) -> Callable[[Params, Tensor], Tensor]:
    return lambda p, x: torch.func.functional_call(module, p, (x,)).square().mean()


@pytest.mark.full(but=1)
@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("network", [FAST, GIGABIT, SLOW])
def test_training_is_that_of_the_hook_that_was_chosen(
    ranks: Ranks, network: ltx.profile.Network, overlap: Any, seed: int
) -> None:
    def trained() -> Any:
        module = module_of(seed)
        batches = [torch.randn(4, 300) for _ in range(3)]
        found = []
        wanted = choice_for(on(network), params_of(module), 2, network).name
        for strategy in (on(network), on(network, comm_hook=HOOKS[wanted])):
            train = ltx.train_step(ltx.data_parallel(loss_of(module), strategy), adamw(), overlap=overlap)
            state = train.init(params_of(module))
            for batch in batches:
                state, metrics = train(state, batch)
            found.append((state.params, metrics.loss))
            assert state.sync_state.choice == (wanted if strategy.auto_hook else "")
            assert state.layout.strategy == repr(on(network, comm_hook=HOOKS[wanted]))
        assert_same_bits(*found)
        return found[0], wanted

    for (values, wanted), *_ in [ranks(2).run(trained)]:
        assert wanted in HOOKS
        assert values


def test_ranks_measure_when_they_make_their_state(ranks: Ranks) -> None:
    def made() -> Any:
        axis = own_axis()
        axis_comm = axis.comm
        step = ltx.data_parallel(lambda p, x: (p["w"] @ x).sum(), AUTO, axis=axis)
        with ltx.profile.record() as trace:
            state = step.init({"w": torch.ones(1000, 1000)})
            again = step.init({"w": torch.ones(1000, 1000)})
        labels = {event.label for event in trace.events}
        axis.close()
        return state.choice, again.choice, axis_comm.network, labels

    first, second = ranks(2).run(made)
    assert first == second
    assert first[0] == first[1]
    assert first[3] == {"measuring"}


def test_ranks_that_measure_differently_choose_alike(ranks: Ranks) -> None:
    """All go by rank 0; to rank 1 everything seems to take a million times as long."""

    def chosen() -> Any:
        axis, rank, inner = own_axis(), dist.get_rank(), time.perf_counter
        params = {"w": torch.ones(1000, 1000)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measured_network, "time", SimpleNamespace(perf_counter=lambda: 1e6**rank * inner()))
            state = ltx.data_parallel(lambda p: p["w"].sum(), AUTO, axis=axis).init(params)
        network = axis.comm.network
        axis.close()
        assert network is not None
        assert state.choice == choice_for(AUTO, params, 2, network).name
        return state.choice, sorted(state.leaves), network

    first, second = ranks(2).run(chosen)
    assert first == second
    assert first[2].bandwidth > 1e8


def test_buckets_are_those_of_the_sizes_that_were_chosen(ranks: Ranks) -> None:
    def counted() -> Any:
        # Leaves of 256 KiB, 8 MiB in all.
        params = [torch.ones(1 << 16) for _ in range(32)]
        found = []
        bucket, first = bucket_sizes(SLOW, 2, 32 << 18, MIB)
        for strategy in (
            ltx.DDPStrategy(bucket_bytes="auto", network=SLOW),
            ltx.DDPStrategy(bucket_bytes=bucket, first_bucket_bytes=first),
            ltx.DDPStrategy(),
        ):
            step = ltx.data_parallel(lambda p: sum(x.sum() for x in p), strategy)
            with ltx.profile.record() as trace:
                torch.func.grad(step)(params)
            found.append([event.nbytes for event in trace.events if event.kind == "bucket"])
            assert ltx.profile.explain(step, params).matches(trace)
        return found

    for auto, said, default in ranks(2).run(counted):
        assert auto == said
        assert len(auto) > len(default)
        assert sum(auto) == sum(default)


def test_the_first_call_measures_without_a_state_too(ranks: Ranks) -> None:
    def called() -> Any:
        axis = own_axis()
        axis_comm = axis.comm
        grad = torch.func.grad(ltx.data_parallel(lambda p: p.sum(), ltx.DDPStrategy(bucket_bytes="auto"), axis=axis))
        labels = []
        for _ in range(2):
            with ltx.profile.record() as trace:
                value = grad(torch.ones(3))
            labels.append([event.label for event in trace.events if event.label != "summary"])
        network = axis_comm.network
        axis.close()
        return value, network, labels

    first, second = ranks(2).run(called)
    assert first[1] == second[1]
    assert isinstance(first[1], ltx.profile.Network)
    for value, _, (measuring, after) in (first, second):
        assert torch.equal(value, torch.ones(3))
        assert set(measuring) == {"measuring", "bucket 0"}
        assert after == ["bucket 0"]


@pytest.mark.parametrize(
    ("strategies", "says"),
    [
        ((on(GIGABIT), on(SLOW)), ("powersgd", "PowerSGD", "ByteGrad")),
        ((ltx.DDPStrategy(bucket_bytes="auto", network=GIGABIT), ltx.DDPStrategy(bucket_bytes="auto")), ("automatic",)),
        ((ltx.DDPStrategy(), ltx.DDPStrategy(bucket_bytes="auto", network=GIGABIT)), ("4194304", "Network")),
    ],
)
def test_ranks_that_are_told_different_things(ranks: Ranks, strategies: tuple[Any, Any], says: tuple[str, ...]) -> None:
    def differ() -> str:
        axis = own_axis()
        step = ltx.data_parallel(lambda p: p["w"].sum(), strategies[dist.get_rank()], axis=axis)
        params = {"w": torch.ones(1000, 1000)}
        with pytest.raises(RankMismatchError) as raised:
            ltx.grad_and_value(step)(params, sync_state=step.init(params))
        axis.close()
        return str(raised.value)

    for text in ranks(2).run(differ):
        assert any(word in text for word in says), text


def test_one_rank_that_measures_alone(ranks: Ranks) -> None:
    def differ() -> str:
        axis = own_axis()
        strategy = [AUTO, ltx.DDPStrategy()][dist.get_rank()]
        step = ltx.data_parallel(lambda p: p["w"].sum(), strategy, axis=axis)
        with pytest.raises(RankMismatchError) as raised:
            ltx.grad_and_value(step)({"w": torch.ones(2)}, sync_state=step.init({"w": torch.ones(2)}))
        axis.close()
        return str(raised.value)

    for text in ranks(2).run(differ):
        assert "rank 0: init of an automatic strategy" in text
        assert "rank 1: data_parallel" in text


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    "make",
    [
        ltx.ZeroStrategy,
        ltx.HorovodStrategy,
        lambda **fields: ltx.LocalSGDStrategy(2, **fields),
        lambda **fields: ltx.DiLoCoStrategy(2, **fields),
        lambda **fields: ltx.BaguaStrategy("gradient_allreduce", **fields),
        lambda **fields: ltx.BaguaStrategy("decentralized", **fields),
        lambda **fields: ltx.DDPStrategy(model_averaging_period=2, start_local_sgd_step=1, comm_hook="auto", **fields),
    ],
)
def test_every_strategy_chooses_buckets(ranks: Ranks, make: Callable[..., ltx.Strategy], seed: int) -> None:
    """Two ranks' sums don't depend on where in a bucket a number lies."""

    def trained() -> None:
        module, by_step = problem(seed, (4, 4), steps=4)
        batches, axis = [by_rank[dist.get_rank()] for by_rank in by_step], own_axis()
        found = []
        for strategy in (make(), make(bucket_bytes="auto"), make(bucket_bytes="auto", network=SLOW)):
            train = ltx.train_step(mean_step(module, strategy, axis=axis), adamw())
            found.append(run(train, module, batches))
        assert_same_bits(*found)
        assert axis.comm.network is not None
        axis.close()

    ranks(2).run(trained)


def test_accumulation_and_mixed_precision(ranks: Ranks, seed: int) -> None:
    def both() -> None:
        module, by_step = problem(seed, (4, 4), steps=3)
        batches = [by_rank[dist.get_rank()] for by_rank in by_step]
        network = ltx.profile.Network(1e5, 0.0)
        hook = HOOKS[choice_for(on(network), params_of(module), 2, network).name]
        assert hook != hooks.AllReduce()
        found = []
        for strategy in (on(network), on(network, comm_hook=hook)):
            step = ltx.accumulate(mean_step(module, strategy), 2)
            found.append(run(ltx.train_step(step, adamw()), module, batches))
        assert_same_bits(*found)
        half = ltx.mixed_precision(mean_step(module, on(network)), ltx.Precision(reduce=torch.bfloat16))
        losses, _ = run(ltx.train_step(half, adamw()), module, batches)
        assert losses.isfinite().all()

    ranks(2).run(both)


def test_broadcast_brings_the_choice_along(ranks: Ranks) -> None:
    def broadcast() -> Any:
        module = module_of(0)
        networks = [SLOW, FAST]
        made = [ltx.train_step(ltx.data_parallel(loss_of(module), on(n)), adamw()) for n in networks]
        states = [train.init(params_of(module)) for train in made]
        state = made[0].broadcast(states[dist.get_rank()])
        state, _ = made[0](state, torch.ones(2, 300))
        return state.sync_state.choice, sorted(state.sync_state.leaves)

    first, second = ranks(2).run(broadcast)
    assert first == second == ("powersgd", ["weight"])


# --- what can't be ---------------------------------------------------------------------------------------------------


def test_bare_parameters_and_states_of_others(ranks: Ranks) -> None:
    step = ltx.data_parallel(lambda w: w.square().sum(), AUTO)
    with pytest.raises(SyncStateError, match="was given bare parameters"):
        torch.func.grad(step)(torch.ones(2))
    with pytest.raises(SyncStateError, match="pass sync_state="):
        ltx.sync_gradients(torch.ones(2), AUTO)
    other = ltx.data_parallel(lambda w: w.square().sum()).init(torch.ones(2))
    with pytest.raises(SyncStateError, match=r"says that '' was chosen.*take that of step\.init\(params\)"):
        ltx.grad_and_value(step)(torch.ones(2), sync_state=other)
    with pytest.raises(SyncStateError, match="says that 'noop' was chosen"):
        ltx.sync_gradients(torch.ones(2), AUTO, dataclasses.replace(other, choice="noop"))
    assert ltx.sync_gradients(torch.ones(2), AUTO, step.init(torch.ones(2)))[1].step == 1


@pytest.mark.full
def test_compiled(ranks: Ranks, seed: int) -> None:
    def compiled() -> Any:
        torch._dynamo.reset()
        axis = own_axis()
        module, call = module_of(seed), torch.func.functional_call
        params, x = params_of(module), torch.randn(4, 300)

        def loss(p: Params, x: Tensor) -> Tensor:  # without globals, whose module workers don't have
            return call(module, p, (x,)).square().mean()

        buckets = ltx.data_parallel(loss, ltx.DDPStrategy(bucket_bytes="auto"), axis=axis)
        refused = ""
        try:
            torch.compile(torch.func.grad(buckets), fullgraph=True, backend="aot_eager")(params, x)
        except Exception as error:
            refused = f"{type(error).__name__} {error}"
        ltx.profile.measure_network(axis)
        got = torch.compile(torch.func.grad(buckets), fullgraph=True, backend="aot_eager")(params, x)
        assert_same_bits(got, torch.func.grad(buckets)(params, x))
        for network in (FAST, NEAR):
            step = ltx.data_parallel(loss, on(network), axis=axis)
            state = step.init(params)
            both = ltx.grad_and_value(step)
            eager = both(params, x, sync_state=state)
            graph = torch.compile(both, fullgraph=True, backend="aot_eager")(params, x, sync_state=state)
            assert graph[0][1].choice == state.choice
            for a, b in zip(ltx.tree.flatten(graph[0][0])[0], ltx.tree.flatten(eager[0][0])[0], strict=True):
                torch.testing.assert_close(a, b)
        axis.close()
        return refused, state.choice

    for refused, choice in ranks(2).run(compiled):
        assert UnsupportedError.__name__ in refused
        assert "ltx.profile.measure_network()" in refused
        assert choice == "bytegrad"


# --- going on from a checkpoint --------------------------------------------------------------------------------------


def test_resuming_with_another_choice(ranks: Ranks, tmp_path: Path) -> None:
    def trained_on() -> Any:
        module, x = module_of(0), torch.ones(2, 300)
        loss = loss_of(module)

        def trainer(network: ltx.profile.Network, **fields: Any) -> Any:
            return ltx.train_step(ltx.data_parallel(loss, on(network, **fields)), adamw())

        slow, fast = trainer(SLOW), trainer(FAST)
        state = slow.init(params_of(module))
        for _ in range(2):
            state, _ = slow(state, x)
        ltx.checkpoint.save(tmp_path, state)
        again = ltx.checkpoint.load(tmp_path, slow.init(params_of(module))).state
        assert again.sync_state.choice == "powersgd"
        with pytest.raises(InputError) as raised:
            ltx.checkpoint.load(tmp_path, fast.init(params_of(module)))
        # Into the one that it was saved with, which the error names, and on with what is chosen here.
        saved = trainer(FAST, comm_hook=hooks.PowerSGD(rank=2))
        state = ltx.checkpoint.load(tmp_path, saved.init(params_of(module))).state
        fresh = dataclasses.replace(fast.step.init(state.params), step=state.step)
        state, _ = fast(dataclasses.replace(state, sync_state=fresh), x)
        return str(raised.value), state.sync_state.choice, state.step, state.sync_state.step

    for text, *found in ranks(2).run(trained_on):
        assert "comm_hook=PowerSGD(rank=2)" in text
        assert found == ["none", 3, 3]


# --- what is said of it ----------------------------------------------------------------------------------------------


def test_explain_says_what_and_why() -> None:
    step = ltx.data_parallel(lambda p: p["w"].sum(), on(SLOW))
    explained = ltx.profile.explain(step, wide(), world=2, sync_step=1000)
    assert explained.strategy == on(SLOW)
    assert explained.hook == HOOKS["powersgd"]
    network, hook, sizes, _ = explained.notes
    assert network == "the network, as was said: 100 Mbit/s, 100 us a message"
    assert hook == (
        "comm_hook=\"auto\" is 'powersgd': of those for such a bandwidth the one that sends least, unless latency "
        "counts for more: none 8.00 MB, bf16 4.00 MB, bytegrad 2.00 MB, powersgd 28.0 kB"
    )
    assert sizes.startswith(
        'bucket_bytes="auto" is 4 MiB, the first 1: a sum of one takes 336 ms, of which its start 200'
    )
    state = dataclasses.replace(step.init(wide()), choice="bf16")
    told = ltx.profile.explain(step, ltx.Synced(wide(), state), world=2)
    assert told.hook == hooks.BF16()
    assert "is 'bf16' in this state, where 'powersgd' would be chosen now" in told.notes[1]


def test_explain_measures_nothing() -> None:
    explained = ltx.profile.explain(ltx.data_parallel(lambda p: p["w"].sum(), AUTO), wide(), world=2)
    assert explained.hook == hooks.AllReduce()
    assert explained.notes == (
        "the network isn't known yet, so these are the sizes and the hook without one; step.init(params) measures it "
        "on all ranks, or say what it is: network=ltx.profile.Network(bandwidth=, latency=)",
    )


def test_plan_chooses_for_the_network_that_it_is_given() -> None:
    network = {"world": 2, "bandwidth": 1e9, "latency": 1e-4, "compute_s": 0.1}
    cost = ltx.profile.plan(AUTO, wide(), **network)
    said = ltx.profile.plan(on(GIGABIT, comm_hook=hooks.ByteGrad()), wide(), **network)
    assert (cost.time_s, cost.bytes_per_rank) == (said.time_s, said.bytes_per_rank)
    assert cost.time_s < ltx.profile.plan(ltx.DDPStrategy(), wide(), **network).time_s
