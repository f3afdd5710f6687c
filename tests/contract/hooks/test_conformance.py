"""Every hook that compresses, held to what all promise: one result on all ranks, nothing lost, nothing hidden."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StrategyError
from ltx.hooks import CommHook
from tests.contract.hooks.reference import flat
from tests.contract.hooks.table import BY_PATH, FED_BACK, HOOKS, MOST, ROWS
from tests.covering import some
from tests.kinds import Ranks
from tests.train_on import in_backward, reduced

Grads = dict[str, Tensor]
TWINS = ROWS | BY_PATH
EVERY = HOOKS | {name: row.hook for name, row in BY_PATH.items()}
STEPS = 4
SHAPES = {"weight": (12, 10), "bias": (7,), "scale": (), "kernel": (6, 3, 5), "none": (0, 4)}
#: Classes that hooks' functions make, by the names that reprs show.
KINDS = {
    type(made).__name__: type(made)
    for made in (hooks.after(1, hooks.FP16()), hooks.chain(hooks.RandomK(0.5), hooks.BF16()))
}


def strategy_of(hook: CommHook, bucket_bytes: int = 1 << 20) -> ltx.DDPStrategy:
    return ltx.DDPStrategy(comm_hook=hook, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)


def gradients(ranks: int, dtype: torch.dtype = torch.float64, steps: int = STEPS) -> list[Grads]:
    """By step; each leaf is stacked over ranks, which differ in size."""
    sizes = 10 ** torch.linspace(0, 1, ranks, dtype=torch.float64)
    return [
        {
            name: (sizes.view(-1, *[1] * len(shape)) * torch.randn(ranks, *shape, dtype=torch.float64)).to(dtype)
            for name, shape in SHAPES.items()
        }
        for _ in range(steps)
    ]


def of_rank(tree: Any, rank: int) -> Any:
    return ltx.tree.map(lambda x: x[rank], tree)


def simulated(hook: CommHook, grads: list[Grads], bucket_bytes: int = 1 << 20) -> tuple[list[Grads], Any]:
    results, leaves = ltx.vmap(lambda *gs: (lambda r, s: (r, s.leaves))(*reduced(strategy_of(hook, bucket_bytes), gs)))(
        *grads
    )
    return results, leaves


@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", TWINS)
def test_equals_its_slow_twin(name: str, n: int) -> None:
    row, grads = TWINS[name], gradients(n)
    results, leaves = simulated(row.hook, grads)
    begun = ltx.data_parallel(lambda p: p, strategy_of(row.hook)).init(of_rank(grads[0], 0)).leaves
    states = [{name: dict(begun.get(name, {})) for name in SHAPES} for _ in range(n)]
    states = [
        {k: {j: torch.zeros_like(v) if j == "residual" else v for j, v in of.items()} for k, of in s.items()}
        for s in states
    ]
    for t, given in enumerate(grads):
        shares = [{k: x / n for k, x in of_rank(given, rank).items()} for rank in range(n)]
        expected, states = row.twin(shares, states, t)
        for rank in range(n):
            torch.testing.assert_close(of_rank(results[t], rank), expected, rtol=1e-9, atol=1e-9)
    for rank in range(n):
        for path, entries in leaves.items():
            torch.testing.assert_close(of_rank(entries, rank), states[rank][path], rtol=1e-8, atol=1e-8)


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", [*MOST, *BY_PATH])
def test_processes_equal_simulated_ranks_and_one_another(name: str, ranks: Ranks) -> None:
    hook, grads = EVERY[name], gradients(2)
    expected, leaves = simulated(hook, grads, 700)

    def on_rank() -> Any:
        results, state = reduced(strategy_of(hook, 700), of_rank(grads, ltx.world().rank))
        return results, state.leaves, state.checked_step()

    found = list(ranks(2).run(on_rank))
    for rank, (results, entries, steps) in enumerate(found):
        assert steps == STEPS
        torch.testing.assert_close(results, of_rank(expected, rank), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(entries, of_rank(leaves, rank), rtol=1e-8, atol=1e-8)
        for mine, first in zip(ltx.tree.flatten(results)[0], ltx.tree.flatten(found[0][0])[0], strict=True):
            assert torch.equal(mine, first)  # to the last bit


@pytest.mark.full(but=5)
@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", [*FED_BACK, *BY_PATH])
def test_what_was_sent_and_what_is_left_add_up_to_the_gradients(name: str, n: int) -> None:
    grads = gradients(n)
    results, leaves = simulated(EVERY[name], grads, 700)
    for path in SHAPES:
        left = leaves.get(path, {}).get("residual")
        sent = sum(result[path][0] for result in results) + (left.sum(0) if left is not None else 0)
        torch.testing.assert_close(sent, sum(given[path].mean(0) for given in grads), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, row in TWINS.items() if row.error is not None])
def test_error_of_one_step(name: str) -> None:
    row, grads = TWINS[name], gradients(3, steps=1)
    (result,), _ = simulated(row.hook, grads)
    mean = {path: x.mean(0) for path, x in grads[0].items()}
    assert 0 < (flat(of_rank(result, 0)) - flat(mean)).norm() <= row.error * flat(mean).norm()


@pytest.mark.full
@pytest.mark.parametrize("name", some([name for name, row in TWINS.items() if row.unbiased], "randomk, unbiased"))
def test_the_mean_is_preserved(name: str) -> None:
    hook, (given,) = TWINS[name].hook, gradients(2, steps=1)
    draws = 300
    results, _ = simulated(hook, [given] * draws)
    found = torch.stack([flat(of_rank(result, 0)) for result in results])
    mean = flat({path: x.mean(0) for path, x in given.items()})
    assert found.std(0).max() > 0
    # Six standard errors; some element in 200 is beyond them once in a million runs.
    assert ((found.mean(0) - mean).abs() - 6 * found.std(0) / draws**0.5).max() <= 1e-3 * mean.abs().max()


@pytest.mark.covering(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", EVERY)
def test_what_isnt_finite_reaches_every_rank_and_isnt_kept(name: str, value: float) -> None:
    grads = gradients(3, steps=5)
    grads[2]["weight"][1, 3, 4] = value
    results, leaves = simulated(EVERY[name], grads)
    for rank in range(3):
        assert not flat(of_rank(results[2], rank)).isfinite().all()
        for t in (0, 1, 3, 4):
            assert flat(of_rank(results[t], rank)).isfinite().all()
    assert all(x.isfinite().all() for x in ltx.tree.flatten(leaves)[0])


@pytest.mark.parametrize("name", EVERY)
def test_zeros_stay_zeros_and_are_no_dead_end(name: str) -> None:
    grads = gradients(2, steps=4)
    zeros = ltx.tree.map(torch.zeros_like, grads[0])
    results, _ = simulated(EVERY[name], [zeros, zeros, *grads])
    assert all(not x.any() for result in results[:2] for x in result.values())
    assert all(x.any() for path, x in results[-1].items() if path in ("weight", "kernel"))


@pytest.mark.full(but=3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    grads = gradients(2, dtype)
    results, leaves = simulated(EVERY[name], grads)
    exact, _ = simulated(EVERY[name], [ltx.tree.map(Tensor.double, given) for given in grads])
    for result in results:
        assert all(x.dtype == dtype and x.isfinite().all() for x in result.values())
    assert all(x.dtype == torch.float32 for x in ltx.tree.flatten(leaves)[0])
    # At the first step nothing is in the state yet; from then on a rounding may tip another choice.
    error = (flat(of_rank(results[0], 0)).double() - flat(of_rank(exact[0], 0))).norm()
    assert error <= 0.02 * flat(of_rank(exact[0], 0)).norm()


def test_complex_gradients_are_refused() -> None:
    for hook in HOOKS.values():
        if hook.at(10) is hook:
            state = ltx.data_parallel(lambda p: p, strategy_of(hook)).init(torch.ones(8))
            with pytest.raises(StrategyError, match=r"real gradients.*view_as_real"):
                ltx.sync_gradients(torch.ones(8, dtype=torch.complex64), strategy_of(hook), state)


@pytest.mark.parametrize("name", EVERY)
def test_is_a_value(name: str) -> None:
    hook = EVERY[name]
    assert pickle.loads(pickle.dumps(hook)) == hook
    assert hash(pickle.loads(pickle.dumps(hook))) == hash(hook)
    assert "\n" not in repr(hook)
    assert replace(strategy_of(hook), bucket_bytes=1) != strategy_of(hook)
    if name in TWINS:
        assert eval(repr(hook), {known: getattr(hooks, known) for known in dir(hooks)} | KINDS) == hook
    assert not hook.exact or name.startswith("onebit after") or type(hook).__name__ == "After"


def loss(params: Grads, x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["first"] + params["bias"]) @ params["second"]).pow(2).mean() * params["scale"]


def parameters() -> Grads:
    shapes = {"first": (6, 16), "bias": (16,), "second": (16, 12), "scale": ()}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def trained(strategy: ltx.Strategy, params: Grads, batches: list[Tensor], saved_after: int = -1, **made: Any) -> Any:
    train = ltx.train_step(ltx.data_parallel(loss, strategy), ltx.optim.from_torch(torch.optim.SGD, lr=0.01), **made)
    state = train.init(params)
    for t, x in enumerate(batches):
        if t == saved_after:
            state = pickle.loads(pickle.dumps(state))
        state, _ = train(state, x)
    return state


def decided(strategy: ltx.Strategy, params: Grads) -> tuple[Tensor, Grads]:
    """Inputs (rank, step, ...) and what simulated ranks come to with them, which doesn't hang on a last bit.

    Sums of two ranks' codes lie on a lattice, and so in one of a hundred draws one in the middle between two codes.
    Batched and single products of matrices don't round alike, and take it to different ones, as they may.
    """
    while True:
        x = torch.randn(2, 6, 4, 6, dtype=torch.float64)
        expected, *others = (
            ltx.vmap(lambda x: trained(strategy, params, list(x)).params)(x * (1 + scale * torch.randn_like(x)))
            for scale in (0.0, *[1e-15] * 5)
        )
        if all(torch.allclose(p, other[path], 1e-8, 1e-8) for other in others for path, p in expected.items()):
            return x, expected


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", some(EVERY, "powersgd 1", "bytegrad", "by path"))
def test_training(name: str, ranks: Ranks) -> None:
    """train_step on processes and simulated ranks, saved and restored halfway, by grad_and_value, and accumulated.

    The restored one is updated bucket by bucket.
    """
    strategy, params = strategy_of(EVERY[name], 700), parameters()
    x, expected = decided(strategy, params)

    def on_rank() -> Any:
        mine = list(x[ltx.world().rank])
        whole = trained(strategy, params, mine)
        restored = trained(strategy, params, mine, saved_after=3, overlap="update")
        step = ltx.data_parallel(loss, strategy)
        state, by_hand = step.init(params), dict(params)
        for batch in mine:
            (grads, state), _ = ltx.grad_and_value(step)(by_hand, batch, sync_state=state)
            by_hand = {name: p - 0.01 * grads[name] for name, p in by_hand.items()}
        step, state = ltx.accumulate(ltx.data_parallel(loss, strategy), 2), None
        (accumulated, _), _ = ltx.grad_and_value(step)(params, mine[0], sync_state=step.init(params))
        (at_once, _), _ = ltx.grad_and_value(ltx.data_parallel(loss, strategy))(
            params, mine[0], sync_state=step.init(params)
        )
        return whole.params, restored.params, by_hand, accumulated, at_once

    found = list(ranks(2).run(on_rank))
    for rank, (whole, restored, by_hand, accumulated, at_once) in enumerate(found):
        for path, p in whole.items():
            assert torch.equal(p, restored[path])
            assert torch.equal(p, found[0][0][path])
        torch.testing.assert_close(whole, of_rank(expected, rank), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(by_hand, whole, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(accumulated, at_once, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["powersgd 1", "bytegrad, fed back", "onebit", "onebit after 1", "topk", "by path"])
def test_a_state_goes_on_with_other_buckets(name: str) -> None:
    hook, grads = EVERY[name], gradients(2)

    def rebucketed(*given: Grads) -> Any:
        results, state = reduced(strategy_of(hook, 1 << 20), given[:2])
        more, state = reduced(strategy_of(hook, 100), given[2:], state)
        return [*results, *more], state.leaves

    results, leaves = ltx.vmap(rebucketed)(*grads)
    for path in SHAPES:
        left = leaves.get(path, {}).get("residual")
        sent = sum(result[path][0] for result in results) + (left.sum(0) if left is not None else 0)
        torch.testing.assert_close(sent, sum(given[path].mean(0) for given in grads), rtol=1e-9, atol=1e-9)
    if name.startswith("powersgd"):  # whose matrices are parameters: buckets make no difference
        torch.testing.assert_close(results, simulated(hook, grads)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", ["powersgd 1", "batched powersgd", "onebit", "powersgd in eight bits"])
def test_buckets_that_arrive_in_any_order(name: str, ranks: Ranks, seed: int) -> None:
    """Where torch's PowerSGD hook aborts: several buckets, and ranks whose gradients come at different times."""
    params = {f"w{i}": torch.randn(6, 8, dtype=torch.float64) for i in range(8)}

    def branches(params: Grads, factor: Tensor, delays_s: list[float]) -> Tensor:
        late = (in_backward(w, partial(time.sleep, d)) for w, d in zip(params.values(), delays_s, strict=True))
        return sum(torch.sin(factor * w).sum() for w in late)

    step = ltx.data_parallel(branches, strategy_of(EVERY[name], 100))

    def run(factor: Tensor, delay_s: Callable[[], float] = lambda: 0.0) -> Any:
        results, state = [], step.init(params)
        for _ in range(STEPS):
            delays_s = [delay_s() for _ in params]
            (grads, state), _ = ltx.grad_and_value(step)(params, factor, delays_s, sync_state=state)
            results.append(grads)
        return results

    def on_rank() -> Any:
        drawn = random.Random(seed + ltx.world().rank)
        return run(torch.tensor(1.0 + ltx.world().rank), lambda: drawn.choice([0.0, 0.002, 0.006]))

    expected = ltx.vmap(run)(torch.tensor([1.0, 2.0, 3.0]))
    for rank, found in enumerate(ranks(3).run(on_rank)):
        torch.testing.assert_close(found, of_rank(expected, rank), rtol=1e-8, atol=1e-8)
