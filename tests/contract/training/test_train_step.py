"""ltx.train_step against DDP with torch's optimizers, and one process with all the data; what a step allocates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import ltx
from ltx.errors import DonatedStateError
from tests.kinds import Ranks
from tests.train_on import go_on, inner, loop_of_torch, mine, on_ranks, said, trained
from tests.twins import training
from tests.twins.cases import Params, assert_same_bits, params_of, plain_step, seeded
from tests.twins.training import (
    LR,
    adamw,
    after_some_updates,
    mean_step,
    on_a_rank,
    one_process,
    problem,
    run,
    sgd,
    weighted_step,
    whole,
)

BUCKETS = ltx.DDPStrategy(bucket_bytes=128, first_bucket_bytes=16)
EQUAL = (16, 16)

LIKE_DDP: dict[str, Callable[[nn.Module], Any]] = {
    "defaults": lambda m: ltx.train_step(mean_step(m), adamw()),
    "small buckets": lambda m: ltx.train_step(mean_step(m, BUCKETS), adamw()),
    "overlap=update": lambda m: ltx.train_step(mean_step(m, BUCKETS), adamw(), overlap="update"),
    "donate=False": lambda m: ltx.train_step(mean_step(m), adamw(), donate=False),
    "overlap=update, donate=False": lambda m: ltx.train_step(mean_step(m), adamw(), overlap="update", donate=False),
    "not fused": lambda m: ltx.train_step(mean_step(m), adamw(fused=False)),
    "not fused, overlap=update": lambda m: ltx.train_step(mean_step(m, BUCKETS), adamw(fused=False), overlap="update"),
    "outputs=mean": lambda m: ltx.train_step(mean_step(m, outputs="mean"), adamw()),
    "accumulate outside": lambda m: ltx.train_step(ltx.accumulate(mean_step(m), 4), adamw()),
    "accumulate inside": lambda m: ltx.train_step(ltx.data_parallel(ltx.accumulate(plain_step(m), 4)), adamw()),
    "accumulate, overlap=update": lambda m: ltx.train_step(
        ltx.accumulate(mean_step(m, BUCKETS), 4), adamw(), overlap="update"
    ),
    "weighted, accumulate, overlap=update": lambda m: ltx.train_step(
        ltx.accumulate(weighted_step(m, BUCKETS), 4), adamw(), overlap="update"
    ),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", LIKE_DDP)
def test_fifty_steps_are_those_of_ddp(name: str, ranks: Ranks, seed: int) -> None:
    both = ranks(2).run(lambda: (on_a_rank(LIKE_DDP[name], seed, EQUAL), training.ddp(seed, EQUAL)))
    (losses, _), (expected, _) = both.replicated()
    assert losses[-10:].mean() < 0.9 * losses[:10].mean()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


WEIGHTED: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda m: ltx.train_step(weighted_step(m), adamw()),
    "small buckets": lambda m: ltx.train_step(weighted_step(m, BUCKETS), adamw()),
    "overlap=update": lambda m: ltx.train_step(weighted_step(m, BUCKETS), adamw(), overlap="update"),
    "accumulate": lambda m: ltx.train_step(ltx.accumulate(weighted_step(m), 3), adamw()),
}


@pytest.mark.full(but=1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", [(7, 2), (1, 11), (5, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_is_the_mean_of_the_whole_batch(name: str, sizes: tuple[int, ...], ranks: Ranks, seed: int) -> None:
    losses, params = ranks(2).run(on_a_rank, WEIGHTED[name], seed, sizes, 12).replicated()
    module, batches = problem(seed, sizes, 12)
    expected, expected_params = one_process(module, whole(batches))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(params, expected_params, rtol=1e-4, atol=1e-4)  # Adam divides by small gradients


def test_without_weights_it_is_the_mean_of_means_of_ddp(ranks: Ranks, seed: int) -> None:
    both = ranks(2).run(lambda: (on_a_rank(LIKE_DDP["defaults"], seed, (7, 2)), training.ddp(seed, (7, 2))))
    (losses, _), (expected, _) = both.replicated()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    module, batches = problem(seed, (7, 2))
    assert not torch.allclose(losses, one_process(module, whole(batches))[0], rtol=1e-3)


@pytest.mark.parametrize("name", ["defaults", "overlap=update", "donate=False", "outputs=mean"])
def test_world_of_one_is_the_bare_loop_bit_for_bit(name: str, seed: int) -> None:
    module, batches = problem(seed, (8,), 10)
    losses, params = run(LIKE_DDP[name](module), module, whole(batches))
    assert_same_bits((losses, params), one_process(module, whole(batches), fused=True))  # as ltx does by default


def normed(seed: int) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def batch_norm(seed: int) -> tuple[Any, Any]:
    """By ltx and by DDP: (losses, parameters, this rank's buffers)"""
    batches, module = [mine(by_rank) for by_rank in problem(seed, EQUAL, 5)[1]], normed(seed)

    def step(params: Params, buffers: Params, x: Tensor, y: Tensor) -> Any:
        output, buffers = ltx.functional_call(module, (params, buffers), (x,), return_buffers=True)
        return (output - y).square().mean(), buffers

    found = trained(step, sgd(), params_of(module), batches, buffers=dict(module.named_buffers()))
    replica = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    losses = loop_of_torch(optimizer, lambda x, y: (replica(x) - y).square().mean(), batches)
    by_ddp = ltx.pmean(losses), params_of(module), dict(module.named_buffers())
    return (found.losses, found.params, found.state.buffers), by_ddp


def test_buffers(ranks: Ranks, seed: int) -> None:
    results = ranks(2).run(batch_norm, seed)
    for found, ddp in results:
        torch.testing.assert_close(found, ddp, rtol=1e-5, atol=1e-6)
    assert_same_bits(*(found[:2] for found, _ in results), of="rank")
    buffers = [found[2] for found, _ in results]
    assert not torch.equal(buffers[0]["1.running_mean"], buffers[1]["1.running_mean"])
    assert [b["1.num_batches_tracked"] for b in buffers] == [5, 5]


MEASURED = ltx.optim.chain(ltx.optim.measure_global_norm(), sgd(lr=0.5, momentum=0.9))
CLIPPED = ltx.optim.chain(ltx.optim.clip_by_global_norm(0.1), sgd(lr=0.5, momentum=0.9))
IN_PARTS = ltx.ZeroStrategy(bucket_bytes=64, first_bucket_bytes=64)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "limit"),
    [(BUCKETS, CLIPPED, 0.1), (BUCKETS, MEASURED, torch.inf), (IN_PARTS, MEASURED, torch.inf)],
    ids=str,
)
def test_the_norm_is_that_of_the_global_gradient(
    strategy: ltx.Strategy, optimizer: Any, limit: float, ranks: Ranks, seed: int
) -> None:
    """Clipped by, or measured alone."""
    module, batches = problem(seed, EQUAL, 5)

    def on_rank() -> tuple[list[Tensor], Params]:
        found = trained(mean_step(module, strategy), optimizer, params_of(module), [mine(step) for step in batches])
        return [metrics.grad_norm for metrics in found.metrics], found.params

    norms, params = ranks(2).run(on_rank).replicated()
    by_torch = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    for norm, batch in zip(norms, whole(batches), strict=True):
        by_torch.zero_grad()
        module(*batch).backward()
        expected = nn.utils.clip_grad_norm_(module.parameters(), limit)
        assert limit == torch.inf or expected > limit
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        by_torch.step()
    torch.testing.assert_close(params, params_of(module), rtol=1e-5, atol=1e-6)


def test_without_clipping_there_is_no_norm() -> None:
    assert trained(inner, sgd(), torch.ones(2), [torch.ones(2)]).metrics[0].grad_norm is None


def after_three_steps(seed: int, strategy: ltx.Strategy, overlap: Any, start: Callable[[Any], Any]) -> Any:
    """What comes of three steps, of which the optimizer begins with the state that `start` makes of its first one."""
    module, batches = problem(seed, EQUAL, 3)
    scheduled = ltx.optim.from_torch(torch.optim.Adam, lr=lambda count: LR * (1 + count))
    optimizer = ltx.optim.partition({"bias": scheduled, "weight": scheduled}, {"*bias": "bias", "*": "weight"})
    train = ltx.train_step(mean_step(module, strategy), optimizer, overlap=overlap)
    state = train.init(params_of(module))
    state = replace(state, opt_state=start(state.opt_state))
    state, _ = go_on(train, state, [mine(step) for step in batches])
    return state.params, state.opt_state, state.step


@pytest.mark.parametrize("strategy", [BUCKETS, ltx.ZeroStrategy(bucket_bytes=128, first_bucket_bytes=16)])
def test_the_optimizer_counts_its_own_updates(strategy: ltx.Strategy, ranks: Ranks, seed: int) -> None:
    expected, updated = (
        ranks(2).run(after_three_steps, seed, strategy, overlap, after_some_updates)
        for overlap in ("backward", "update")
    )
    assert_same_bits(list(updated), list(expected))
    from_zero = ranks(2).run(after_three_steps, seed, strategy, "update", lambda state: state)
    for (params, _, steps), (others, _, _) in zip(updated, from_zero, strict=True):
        assert steps == 3
        assert not any(torch.equal(params[path], others[path]) for path in params)


@on_ranks(2)
def test_init_takes_rank_0s_values_and_copies() -> None:
    rank = ltx.world().rank
    given = {"w": torch.full((3,), float(rank))}
    train = ltx.train_step(ltx.data_parallel(lambda p, b, x: ((p["w"] * x).sum(), b)), sgd())
    state = train.init(given, {"seen": torch.tensor(rank)})
    state, _ = train(state, torch.ones(3))
    assert given["w"].tolist() == [rank] * 3
    assert state.buffers["seen"] == 0
    torch.testing.assert_close(state.params["w"], torch.full((3,), -LR))


@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("donate", [True, False])
@on_ranks(2)
def test_donation(donate: bool, overlap: Any, seed: int) -> None:
    module, batches = problem(seed, EQUAL, 1)
    train = ltx.train_step(mean_step(module), adamw(), donate=donate, overlap=overlap)
    old = train.init(params_of(module))
    before, place = ltx.tree.map(torch.clone, old.params), old.params["0.weight"].data_ptr()
    new, _ = train(old, *mine(batches[0]))
    assert (new.params["0.weight"].data_ptr() == place) is donate
    if donate:
        assert said(DonatedStateError, train, old, *mine(batches[0])) == (
            "this TrainState (step 0) was donated to the step that made state 1: its tensors were updated in place and "
            "hold other values now. Use the state that the step returned, state, metrics = train(state, ...); to keep "
            "an old one, copy.deepcopy(state) before the step, or train_step(..., donate=False)."
        )
    else:
        assert_same_bits(old.params, before)
        assert_same_bits(train(old, *mine(batches[0]))[0].params, new.params)


class OutOfDataError(Exception):
    pass


def failing(where: str, seed: int) -> tuple[Any, Any, list[float]]:
    """(state before a failing step, after it, losses of the steps around it)"""
    module, batches = problem(seed, EQUAL, 3)
    plain, fail = plain_step(module), [False]

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        if fail[0] and where == "forward":
            raise OutOfDataError
        value = plain(params, x, y)
        if fail[0]:
            value.register_hook(broken)
        return value

    def broken(_: Tensor) -> Tensor:
        raise OutOfDataError

    train = ltx.train_step(ltx.data_parallel(loss, BUCKETS), adamw())
    own = [mine(step) for step in batches]
    state, first = train(train.init(params_of(module)), *own[0])
    before = ltx.tree.map(torch.clone, state)
    fail[0] = True
    said(OutOfDataError, lambda: train(state, *own[1]))
    fail[0] = False
    return before, ltx.tree.map(torch.clone, state), [first.loss.item(), *go_on(train, state, own[1:]).losses.tolist()]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_raises_leaves_the_state_as_it_was(where: str, real: bool, ranks: Ranks, seed: int) -> None:
    before, after, losses = ranks(2).run(failing, where, seed).replicated() if real else failing(where, seed)
    assert_same_bits((before.params, before.opt_state), (after.params, after.opt_state))
    module, batches = problem(seed, EQUAL, 3)
    expected, _ = one_process(module, whole(batches) if real else [by_rank[0] for by_rank in batches])
    torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-5, atol=0)


LARGE = 1 << 16


def allocated(step: Callable[[], object]) -> Counter[int]:
    """Sizes of the large tensors that a step makes, once it is steady."""
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return Counter(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() >= LARGE)


def setting() -> tuple[Params, Callable[[Params, Tensor], Tensor], Tensor]:
    """Four layers of 300 kB each, in buckets of one or two."""

    def loss(p: Params, x: Tensor) -> Tensor:
        for name in sorted(p):
            x = torch.tanh(x @ p[name])
        return x.square().mean()

    return {f"w{k}": torch.randn(256, 300 if k == 3 else 256) / 16 for k in range(4)}, loss, torch.randn(128, 256)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("overlap", ["backward", "update"])
@pytest.mark.parametrize("donate", [True, False])
@on_ranks(2)
def test_a_training_step(overlap: Any, donate: bool) -> None:
    params, loss, x = setting()
    mine = [p.clone().requires_grad_() for p in params.values()]
    optimizer = torch.optim.AdamW(mine, fused=True)

    def bare() -> None:
        optimizer.zero_grad()
        loss(dict(zip(params, mine, strict=True)), x).backward()
        optimizer.step()

    strategy = ltx.DDPStrategy(bucket_bytes=600_000, first_bucket_bytes=1)
    adamw = ltx.optim.from_torch(torch.optim.AdamW, fused=True)
    train = ltx.train_step(ltx.data_parallel(loss, strategy), adamw, overlap=overlap, donate=donate)
    state = [train.init(params)]

    def trained() -> None:
        state[0], _ = train(state[0], x)

    plain, step, params = allocated(bare), allocated(trained), Counter(p.numel() * 4 for p in params.values())
    assert plain, "activations and gradients are large"
    # What isn't donated is copied: parameters, and two moments of each.
    assert step - plain == (Counter() if donate else params + params + params)
    assert plain - step == Counter()


@pytest.mark.parametrize("grad", [torch.func.grad, ltx.grad], ids=["torch.func", "ltx"])
@on_ranks(2)
def test_gradients_alone(grad: Any) -> None:
    params, loss, x = setting()
    params = ltx.broadcast(params)
    mine = [p.clone().requires_grad_() for p in params.values()]
    gradient = grad(ltx.data_parallel(loss))
    found = [gradient(params, x)]

    def bare() -> None:
        torch.autograd.grad(loss(dict(zip(params, mine, strict=True)), x), mine)

    def trained() -> None:
        found[0] = gradient(params, x)

    plain, step = allocated(bare), allocated(trained)
    assert step == plain


@pytest.mark.parametrize("grad", [torch.func.grad, ltx.grad], ids=["torch.func", "ltx"])
@on_ranks(2)
def test_gradients_that_are_kept_keep_their_values(grad: Any, seed: int) -> None:
    with seeded(seed):  # the same on both ranks
        params, loss, _ = setting()
        batches = [torch.randn(2, 256) for _ in range(6)]
    both = grad(ltx.data_parallel(loss)), torch.func.grad(loss)
    found = [both[0](params, x) for x in batches]
    arrays = [{k: g.numpy() for k, g in grads.items()} for grads in found]
    del found[1], found[2]
    for x in batches:
        both[0](params, x)
    for x, array in zip(batches, arrays, strict=True):
        for name, expected in both[1](params, x).items():
            torch.testing.assert_close(torch.from_numpy(array[name]), expected)
