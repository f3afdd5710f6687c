"""Means of parameters now and then (local SGD) and in the background, and outer steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tests.contract.strategies.problem import Array, Params, Problem, Sgd, mean_of, on_each
from tests.contract.strategies.references.bagua import Sum, flat, unflat


def post_local(problem: Problem, period: int, warmup: int) -> list[list[Params]]:
    """Lin et al., 2020: mean gradients before `warmup`; then local ones, and means at warmup, warmup + period, ..."""
    return hierarchical(problem, {period: problem.ranks}, warmup, node=1, first=warmup)


def hierarchical(
    problem: Problem, levels: dict[int, int], warmup: int, node: int, first: int = 0
) -> list[list[Params]]:
    """Mean gradients before `warmup`, then those of each node; parameters as the longest period that divides the step,
    counted from `first`, says, in groups of so many ranks. A world of one has nobody to share with.
    """
    n = problem.ranks
    optimizers, params, history = [Sgd() for _ in range(n)], [problem.start] * n, []
    for step in range(problem.steps):
        grads = groupwise(problem.grads(params, step), n if step < warmup else min(n, node))
        params = [o.step(p, g) for o, p, g in zip(optimizers, params, grads, strict=True)]
        dividing = [period for period in levels if (step - first) % period == 0]
        if step >= warmup and dividing:
            params = groupwise(params, min(n, levels[max(dividing)]))
        history.append(params)
    return history


def groupwise(trees: list[Params], size: int) -> list[Params]:
    """Each rank's mean over its group of `size` contiguous ones."""
    return [mean_of(trees[rank - rank % size :][:size]) for rank in range(len(trees))]


def rounds(warmup_steps: int, period: int, delay: int, node: int = 1) -> Callable[[Problem], list[list[Params]]]:
    def reference(problem: Problem) -> list[list[Params]]:
        optimizers = [Sgd() for _ in range(problem.ranks)]
        params, history = [problem.start] * problem.ranks, []
        began: dict[int, list[Params]] = {}
        for step in range(problem.steps):
            together = problem.ranks if step < warmup_steps else min(node, problem.ranks)
            grads = groupwise(problem.grads(params, step), together)
            params = [sgd.step(p, g) for sgd, p, g in zip(optimizers, params, grads, strict=True)]
            if snapshots := began.get(step - delay):
                mean = mean_of(snapshots)
                params = [
                    on_each(lambda x, y, s: x + y - s, p, mean, s) for p, s in zip(params, snapshots, strict=True)
                ]
            if step >= warmup_steps and (step - warmup_steps) % period == 0:
                began[step] = params
            history.append(params)
        return history

    return reference


def diloco(
    problem: Problem,
    period: int,
    lr: float,
    momentum: float,
    average: Callable[[], Sum] = lambda: lambda shares: np.asarray(sum(shares)),
    fragments: Sequence[tuple[str, ...]] = (("b", "s", "w"),),
    nesterov: bool = True,
    alpha: float = 0.0,
    delay: int = 0,
) -> list[list[Params]]:
    """`fragments`: the names of each; the numbers of a fragment are averaged together, in that order.
    `alpha`: of its own parameters a rank keeps this part. `delay`: it sends so many steps before the outer step."""
    n, k = problem.ranks, len(fragments)
    optimizers, params, history = [Sgd() for _ in range(n)], [dict(problem.start) for _ in range(n)], []
    anchor = [flat(problem.start, names) for names in fragments]
    velocity, averages = [np.zeros_like(a) for a in anchor], [average() for _ in fragments]
    arrives: list[Array] = [a * np.nan for a in anchor]
    for step in range(problem.steps):
        params = [o.step(p, g) for o, p, g in zip(optimizers, params, problem.grads(params, step), strict=True)]
        for j, names in enumerate(fragments):
            if (step + 1 + delay + j * period // k) % period == 0:
                arrives[j] = averages[j]([(anchor[j] - flat(p, names)) / n for p in params])
            if (step + 1 + j * period // k) % period == 0:
                d = arrives[j]
                velocity[j] = momentum * velocity[j] + d
                anchor[j] = anchor[j] - lr * (d + momentum * velocity[j] if nesterov else velocity[j])
                new = unflat(anchor[j], problem.start, names)
                params = [{**p, **{name: (1 - alpha) * a + alpha * p[name] for name, a in new.items()}} for p in params]
        history.append(params)
    return history
