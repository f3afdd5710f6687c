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
