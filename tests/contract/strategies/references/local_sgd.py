"""Local SGD and its kin: ranks train alone, and what they have come to is averaged now and then."""

from __future__ import annotations

from tests.contract.strategies.problem import Params, Problem, Sgd, mean_of


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


def hierarchical(problem: Problem, levels: dict[int, int], warmup: int, node: int) -> list[list[Params]]:
    """Mean gradients before `warmup`, then those of each node; parameters as the longest period that divides the step
    says, in groups of so many ranks. A world of one has nobody to share with.
    """
    n = problem.ranks
    optimizers, params, history = [Sgd() for _ in range(n)], [problem.start] * n, []
    for step in range(problem.steps):
        grads = groupwise(problem.grads(params, step), n if step < warmup else min(n, node))
        params = [o.step(p, g) for o, p, g in zip(optimizers, params, grads, strict=True)]
        dividing = [period for period in levels if step % period == 0]
        if step >= warmup and dividing:
            params = groupwise(params, min(n, levels[max(dividing)]))
        history.append(params)
    return history


def groupwise(trees: list[Params], size: int) -> list[Params]:
    """Each rank's mean over its group of `size` contiguous ones."""
    return [mean_of(trees[rank - rank % size :][:size]) for rank in range(len(trees))]
