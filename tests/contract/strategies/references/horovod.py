"""Means of gradients, as Horovod's DistributedOptimizer; the adaptive sum of Maleki et al., MLSys 2021, section 3."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.contract.strategies.problem import Adam, Array, Params, Problem, Sgd, on_each

Reference = Callable[[Problem], list[list[Params]]]


def pair(a: Array, b: Array) -> Array:
    """(1 - <a,b> / 2|a|^2) a + (1 - <a,b> / 2|b|^2) b; a vector of zeros adds nothing and takes nothing away."""
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    dot, square_a, square_b = (a64 * b64).sum(), (a64 * a64).sum(), (b64 * b64).sum()
    least = np.sqrt(np.finfo(np.float64).tiny)
    alpha = 1 - dot / (2 * square_a) if square_a >= least else 1.0
    beta = 1 - dot / (2 * square_b) if square_b >= least else 1.0
    return np.asarray(alpha * a64 + beta * b64).astype(a.dtype)


def adasum(arrays: list[Array]) -> Array:
    """Of 1, 2, 4, ... ranks' arrays: that of the first half's and the second half's."""
    half = len(arrays) // 2
    return arrays[0] if half == 0 else pair(adasum(arrays[:half]), adasum(arrays[half:]))


def fp16(mean_part: Array) -> Array:
    return mean_part.astype(np.float32).astype(np.float16)


def averaged(
    optimizer: type[Sgd | Adam] = Sgd,
    *,
    factor: Callable[[int], float] = lambda n: 1.0,
    lr: Callable[[int], float] | None = None,
    passes: int = 1,
    sent: Callable[[Array], Array] = lambda mean_part: mean_part,
) -> Reference:
    """One update every `passes` steps, with factor(n) times the ranks' mean of the sum of their gradients."""

    def reference(problem: Problem) -> list[list[Params]]:
        n, params, history = problem.ranks, problem.start, []
        inner = optimizer() if lr is None else optimizer(lr=lr(n))
        total = [on_each(np.zeros_like, params)] * n
        for step in range(problem.steps):
            total = [on_each(np.add, t, g) for t, g in zip(total, problem.grads([params] * n, step), strict=True)]
            if (step + 1) % passes == 0:
                mean = on_each(lambda *xs: sum(sent(x / n) for x in xs).astype(np.float64), *total)
                params = inner.step(params, on_each(lambda x: factor(n) * x, mean))
                total = [on_each(np.zeros_like, params)] * n
            history.append([params] * n)
        return history

    return reference


def adasum_of_steps(optimizer: Callable[[], Sgd | Adam] = Sgd, *, passes: int = 1) -> Reference:
    """Each rank's optimizer takes a step of its own; parameters move by the adaptive sum of these."""

    def reference(problem: Problem) -> list[list[Params]]:
        n, params, history = problem.ranks, problem.start, []
        optimizers = [optimizer() for _ in range(n)]
        total = [on_each(np.zeros_like, params)] * n
        for step in range(problem.steps):
            total = [on_each(np.add, t, g) for t, g in zip(total, problem.grads([params] * n, step), strict=True)]
            if (step + 1) % passes == 0:
                after = [inner.step(params, t) for inner, t in zip(optimizers, total, strict=True)]
                deltas = [on_each(np.subtract, new, params) for new in after]
                params = on_each(lambda p, *ds: p + adasum(list(ds)), params, *deltas)
                total = [on_each(np.zeros_like, params)] * n
            history.append([params] * n)
        return history

    return reference
