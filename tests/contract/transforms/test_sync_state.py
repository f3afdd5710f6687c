"""Communication state: every transform threads it, and misuse is told."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from ltx import hooks
from ltx.errors import StepError, SyncStateError, UnsupportedError
from tests.kinds import Ranks
from tests.train_on import in_all_worlds, refuses, said
from tests.twins import feedback
from tests.twins.cases import (
    MLP,
    Batch,
    Params,
    assert_close,
    assert_same_bits,
    gradient,
    params_of,
    plain_step,
    seeded,
)
from tests.twins.feedback import FUNC_WAYS, STRATEGY, WAYS, ErrorFeedback, errors_of, slow_twin

STEPS = 4


def problem(seed: int, ranks: int) -> tuple[torch.nn.Module, list[list[Batch]]]:
    """(model, batches by step and rank)"""
    # In float64, since a last bit that differs in float32 may round to another bfloat16.
    kind = {"dtype": torch.float64}
    with seeded(seed):
        batches = [[(torch.randn(4, 5, **kind), torch.randn(4, 3, **kind)) for _ in range(ranks)] for _ in range(STEPS)]
        return MLP().double(), batches


def expected(seed: int, ranks: int) -> tuple[list[Params], list[Params], list[list[Params]]]:
    """(reduced gradients by step, errors by rank, local gradients by step and rank), at fixed parameters"""
    module, batches = problem(seed, ranks)
    local = [[gradient(module, module(*batch)) for batch in by_rank] for by_rank in batches]
    return *slow_twin(local), local


def run(way: feedback.Way, step: Any, params: Params, batches: list[Batch], after: int | None = None) -> Any:
    """(reduced gradients by step, the state in the end); it is pickled and restored after some steps."""
    state, reduced = step.init(params), []
    for t, batch in enumerate(batches):
        state = pickle.loads(pickle.dumps(state)) if t == after else state
        grads, state = way(step, params, state, *batch)
        reduced.append(grads)
    return reduced, state


def on_a_rank(way: str, seed: int, strategy: ltx.Strategy = STRATEGY, after: int | None = None) -> Any:
    module, batches = problem(seed, ltx.world().size)
    mine = [by_rank[ltx.world().rank] for by_rank in batches]
    reduced, state = run(WAYS[way], ltx.data_parallel(plain_step(module), strategy), params_of(module), mine, after)
    return reduced, errors_of(state), state.checked_step()


@pytest.mark.full(but=2)
@pytest.mark.parametrize("way", WAYS)
def test_real_ranks(way: str, ranks: Ranks, seed: int) -> None:
    results = ranks(2).run(on_a_rank, way, seed)
    reduced, errors, _ = expected(seed, 2)
    for rank, (got, got_errors, steps) in enumerate(results):
        assert steps == STEPS
        assert_same_bits(results[0][0], got, of="rank")
        torch.testing.assert_close(got, reduced, rtol=0, atol=1e-12)
        torch.testing.assert_close(got_errors, errors[rank], rtol=0, atol=1e-12)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("way", FUNC_WAYS)
def test_simulated_ranks(way: str, seed: int) -> None:
    module, batches = problem(seed, 3)
    step, params = ltx.data_parallel(plain_step(module), STRATEGY), params_of(module)
    x, y = (torch.stack([torch.stack([b[i] for b in by_rank]) for by_rank in batches], 1) for i in (0, 1))
    reduced, state = ltx.vmap(lambda x, y: run(FUNC_WAYS[way], step, params, list(zip(x, y, strict=True))))(x, y)
    wanted, errors, _ = expected(seed, 3)
    for rank in range(3):
        mine, residual = ltx.tree.map(lambda t, rank=rank: t[rank], (reduced, errors_of(state)))
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(residual, errors[rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_world_of_one(way: str, seed: int) -> None:
    reduced, errors, steps = on_a_rank(way, seed)
    wanted, wanted_errors, _ = expected(seed, 1)
    assert steps == STEPS
    assert_same_bits(reduced, wanted)
    assert_same_bits(errors, wanted_errors[0])


@dataclass(frozen=True, kw_only=True)
class Switching(ltx.Strategy):
    """Exact before step `first`, with error feedback from then on; or the other way round."""

    first: int = 2
    feedback_early: bool = False

    def hook(self, step: int) -> hooks.CommHook:
        return ErrorFeedback() if (step < self.first) is self.feedback_early else hooks.AllReduce()

    def init(self, param: Tensor, path: str = "") -> dict[str, Tensor]:
        return ErrorFeedback().init(param, path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_that_change_with_the_step(way: str, early: bool, size: int, ranks: Ranks, seed: int) -> None:
    strategy = Switching(feedback_early=early)
    results = [on_a_rank(way, seed, strategy)] if size == 1 else ranks(2).run(on_a_rank, way, seed, strategy)
    _, _, local = expected(seed, size)
    rounded, errors = slow_twin(local[:2] if early else local[2:])
    exact = [ltx.tree.map(lambda *gs: sum(gs) / size, *by_rank) for by_rank in (local[2:] if early else local[:2])]
    for rank, (got, got_errors, steps) in enumerate(results):
        assert steps == STEPS
        torch.testing.assert_close(got, rounded + exact if early else exact + rounded, rtol=0, atol=1e-12)
        torch.testing.assert_close(got_errors, errors[rank], rtol=0, atol=1e-12)


W, X = torch.tensor([1.0, 2.0]), torch.tensor([0.3, 0.7])
STEP = ltx.data_parallel(lambda w, x: (w * x).sum(), STRATEGY)
USED_TWICE = (
    "this communication state was used 2 times in one loss, or its gradients were accumulated. Its next value is its "
    "gradient, so it must go through exactly one call of the step; for several backward passes take the state that "
    "each one gives (ltx.grad_and_value), or set .grad to None between them."
)


def test_a_state_used_twice_in_one_loss_raises_at_the_next_call() -> None:
    both = torch.func.grad(lambda s: STEP(s, X) + STEP(s, 2 * X))(ltx.Synced(W, STEP.init(W)))
    for use in (
        lambda: ltx.grad_and_value(STEP)(W, X, sync_state=both.sync_state),
        lambda: torch.func.grad(STEP)(both, X),
        lambda: ltx.sync_gradients(W, STRATEGY, both.sync_state),
    ):
        assert said(SyncStateError, use) == USED_TWICE


def test_gradients_that_were_not_zeroed_raise_at_the_next_call() -> None:
    synced = feedback.required(W, STEP.init(W))
    STEP(synced, X).backward()
    STEP(synced, X).backward()
    assert said(SyncStateError, lambda: STEP(ltx.tree.map(lambda t: t.grad.requires_grad_(), synced), X)) == USED_TWICE


def test_used_twice_on_simulated_ranks() -> None:
    def on_rank(x: Tensor) -> Tensor:
        both = torch.func.grad(lambda s: STEP(s, x) + STEP(s, 2 * x))(ltx.Synced(W, STEP.init(W)))
        return torch.func.grad(STEP)(both, x).params

    refuses(SyncStateError, "was used 2 times in one loss", ltx.vmap(on_rank), torch.stack([X, X]))


BARE = (
    f"{STRATEGY!r} has communication state, but the step was given bare parameters. Use ltx.grad_and_value(step)("
    "params, batch, sync_state=step.init(params)), ltx.train_step, or ltx.Synced(params, state)."
)
NOT_DIFFERENTIATED = (
    "the value itself: its communication state 'error' isn't differentiated, so its next value would be lost. "
    "Differentiate with respect to ltx.Synced(params, state) as a whole, or use ltx.grad_and_value(step)(params, "
    "batch, sync_state=state)."
)
MISUSES: dict[str, tuple[Callable[[], Any], str]] = {
    "bare, called": (lambda: STEP(W, X), BARE),
    "bare, func.grad": (lambda: torch.func.grad(STEP)(W, X), BARE),
    "bare, grad_and_value": (lambda: ltx.grad_and_value(STEP)(W, X), BARE),
    "bare, sync_gradients": (
        lambda: ltx.sync_gradients(W, STRATEGY),
        "ErrorFeedback() has communication state: pass sync_state=step.init(params) and keep what comes back.",
    ),
    "not differentiated, func.grad": (
        lambda: torch.func.grad(lambda w, s: STEP(ltx.Synced(w, s), X))(W, STEP.init(W)),
        NOT_DIFFERENTIATED,
    ),
    "not differentiated, backward": (
        lambda: STEP(ltx.Synced(W.clone().requires_grad_(), STEP.init(W)), X),
        NOT_DIFFERENTIATED,
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str) -> None:
    call, text = MISUSES[name]
    assert said(SyncStateError, call) == text


def test_a_state_goes_with_one_argument() -> None:
    call = partial(ltx.grad_and_value(STEP, argnums=(0, 1)), W, X, sync_state=STEP.init(W))
    assert said(StepError, call) == "a communication state goes with one argument of parameters, got argnums=(0, 1)."


def blocked(x: Tensor) -> tuple[Tensor, list[Params]]:
    """A local gradient, and a rank's own errors before two blocked calls and after each of them."""
    local = ltx.block_backward_sync(STEP)
    _, before = feedback.func_grad(STEP, W, STEP.init(W), x)
    grads, after = torch.func.grad(local)(ltx.Synced(W, before), 3 * x)
    (_, again), _ = ltx.grad_and_value(local)(W, x, sync_state=after)
    _, following = feedback.func_grad(STEP, W, again, x)
    assert [state.checked_step() for state in (before, after, again, following)] == [1, 1, 1, 2]
    return grads, [errors_of(state) for state in (before, after, again)]


def test_a_blocked_step_passes_the_state_through(ranks: Ranks) -> None:
    """Its count of steps too, which schedules read; the step itself goes on from it."""
    xs = torch.stack([X, 2 * X])
    for found in (*in_all_worlds(blocked, ranks, xs), [blocked(X)]):
        for x, (grads, errors) in zip(xs, found, strict=False):
            assert_same_bits(grads, 3 * x)
            assert_same_bits(*errors)


def test_a_value_without_gradient_needs_no_state_to_be_differentiated() -> None:
    assert STEP(ltx.Synced(W, STEP.init(W)), X) == (W * X).sum()


def hessian_products(x: Tensor, autograd: bool = True) -> list[Tensor]:
    """The derivative of the sum of the gradient of w³x, which is 6wx, in several ways."""
    step = ltx.data_parallel(lambda w, x: (w**3 * x).sum(), STRATEGY)
    state = step.init(W)

    def gradient(w: Tensor) -> Tensor:
        return torch.func.grad(step)(ltx.Synced(w, state), x).params

    def double_backward() -> Tensor:
        synced = feedback.required(W, state)
        leaves = ltx.tree.flatten(synced)[0]
        first = torch.autograd.grad(step(synced, x), leaves, create_graph=True, allow_unused=True)[0]
        return torch.autograd.grad(first.sum(), leaves[0])[0]

    return [
        torch.func.jacrev(gradient)(W).sum(0),
        torch.func.jacfwd(gradient)(W).sum(0),
        *([double_backward()] if autograd else []),
    ]


@pytest.mark.parametrize("backing", ["real", "simulated", "one"])
def test_second_derivatives_are_exact_with_error_feedback_too(backing: str, ranks: Ranks) -> None:
    """Those of hooks without a state are the conformance table's; without vmap, contract/reports/test_orders.py's."""
    x = torch.stack([X, 2 * X])
    if backing == "real":
        results = ranks(2).run(lambda: hessian_products(x[ltx.world().rank])).replicated()
    elif backing == "simulated":
        results = ltx.vmap(lambda x: hessian_products(x, autograd=False))(x)
        results = [both[rank] for both in results for rank in range(2)]
    else:
        results = hessian_products(X)
    for result in results:
        torch.testing.assert_close(result, 6 * W * (X if backing == "one" else 1.5 * X), rtol=1e-6, atol=0)


def test_per_sample_gradients_of_a_stateful_strategy_are_refused(ranks: Ranks) -> None:
    per_sample = torch.vmap(lambda x: torch.func.grad(STEP)(ltx.Synced(W, STEP.init(W)), x))
    assert ranks(2).run(said, UnsupportedError, per_sample, torch.stack([X, X])).replicated() == (
        "ErrorFeedback() can't reduce gradients of several samples at once between processes. For per-sample gradients "
        "use ltx.block_backward_sync(step) under vmap, then ltx.sync_gradients on their mean; for several cotangents "
        "call the step once for each."
    )


def test_stateless_strategies_have_an_empty_state() -> None:
    step = ltx.data_parallel(lambda w, x: (w * x).sum())
    state = step.init(W)
    assert state.leaves == {}
    (grads, state), _ = ltx.grad_and_value(step)(W, X, sync_state=state)
    assert_same_bits(grads, X)
    assert state.step == 1


def test_only_floating_leaves_have_state() -> None:
    state = STEP.init({"a": [W, torch.tensor(3)], "b": {"c": W.bfloat16()}})
    assert sorted(state.leaves) == ["a.0", "b.c"]
    assert state.leaves["b.c"]["error"].dtype == torch.bfloat16
    assert_close(errors_of(state), {"a.0": torch.zeros(2), "b.c": torch.zeros(2).bfloat16()})
