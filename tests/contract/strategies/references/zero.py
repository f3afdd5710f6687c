"""ZeRO: what synchronous data parallelism does, whoever holds the optimizer's state."""

from __future__ import annotations

from tests.contract.strategies.problem import Adam, Params, Problem, Sgd, mean_of, on_each


def _trained(problem: Problem, optimizer: Sgd | Adam, max_norm: float = float("inf")) -> list[list[Params]]:
    params, history = problem.start, []
    for step in range(problem.steps):
        grads = mean_of(problem.grads([params] * problem.ranks, step))
        norm = sum((g**2).sum() for g in grads.values()) ** 0.5
        factor = min(1.0, max_norm / (norm + 1e-6))
        params = optimizer.step(params, on_each(lambda g, by=factor: g * by, grads))
        history.append([params] * problem.ranks)
    return history


def momentum(problem: Problem) -> list[list[Params]]:
    return _trained(problem, Sgd())


def clipped_adam(problem: Problem) -> list[list[Params]]:
    """Gradients are clipped to norm 0.3, which is below most of them."""
    return _trained(problem, Adam(), 0.3)
