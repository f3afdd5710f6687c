"""Synchronous data parallelism: one gradient for all."""

from __future__ import annotations

from tests.contract.strategies.problem import Params, Problem, Sgd, mean_of


def mean_gradients(problem: Problem) -> list[list[Params]]:
    """w <- w - lr v(mean_r grad f_r(w))"""
    optimizer, params, history = Sgd(), problem.start, []
    for step in range(problem.steps):
        params = optimizer.step(params, mean_of(problem.grads([params] * problem.ranks, step)))
        history.append([params] * problem.ranks)
    return history


def alone_after(problem: Problem, steps: int) -> list[list[Params]]:
    """The same for so many steps; then each rank goes on by itself: w_r <- w_r - lr v(grad f_r(w_r))"""
    n = problem.ranks
    optimizers, params, history = [Sgd() for _ in range(n)], [problem.start] * n, []
    for step in range(problem.steps):
        grads = problem.grads(params, step)
        grads = [mean_of(grads)] * n if step < steps else grads
        params = [o.step(p, g) for o, p, g in zip(optimizers, params, grads, strict=True)]
        history.append(params)
    return history
