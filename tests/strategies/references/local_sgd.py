"""Local SGD and its kin: ranks train alone, and what they have come to is averaged now and then."""

from __future__ import annotations

from tests.strategies.problem import Params, Problem, Sgd, mean_of


def post_local(problem: Problem, period: int, warmup: int) -> list[list[Params]]:
    """Lin et al., 2020: mean gradients before `warmup`; then local ones, and means at warmup, warmup + period, ..."""
    n = problem.ranks
    optimizers, params, history = [Sgd() for _ in range(n)], [problem.start] * n, []
    for step in range(problem.steps):
        grads = problem.grads(params, step)
        if step < warmup:
            grads = [mean_of(grads)] * n
        params = [o.step(p, g) for o, p, g in zip(optimizers, params, grads, strict=True)]
        if step in range(warmup, problem.steps, period):
            params = [mean_of(params)] * n
        history.append(params)
    return history
