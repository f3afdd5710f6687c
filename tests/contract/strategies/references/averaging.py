"""Means of gradients (DDP), of parameters now and then (local SGD) and in the background, and outer steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tests.contract.strategies.problem import Array, Params, Problem, Sgd, mean_of, on_each
from tests.contract.strategies.references.bagua import eight_bits


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


def rounds(warmup_steps: int, period: int, delay: int, node: int = 1) -> Callable[[Problem], list[list[Params]]]:
    def reference(problem: Problem) -> list[list[Params]]:
        optimizers = [Sgd() for _ in range(problem.ranks)]
        params, history = [problem.start] * problem.ranks, []
        began: dict[int, list[Params]] = {}
        for step in range(problem.steps):
            grads = problem.grads(params, step)
            together = problem.ranks if step < warmup_steps else min(node, problem.ranks)
            means = [mean_of(grads[first : first + together]) for first in range(0, problem.ranks, together)]
            grads = [mean for mean in means for _ in range(together)]
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


#: From each rank's outer gradient, flat, to the one that all use.
Average = Callable[[list[Array]], Array]


class EightBits:
    """Bagua's bytegrad: each rank adds up its part of everyone's 8-bit messages, and sends the sum in 8 bits.

    With `feedback`, what rounding loses of a rank's message, and of the sum that it sends, is in its next message.
    """

    def __init__(self, feedback: bool = False):
        self.feedback = feedback
        self.errors: list[Array] | float = 0.0

    def __call__(self, grads: list[Array]) -> Array:
        n, numel = len(grads), len(grads[0])
        given = np.stack(grads) / n + np.asarray(self.errors)
        rows = np.pad(given, ((0, 0), (0, -numel % n)), "edge").reshape(n, n, -1)  # from rank, part, number
        sent = np.stack([[eight_bits(part) for part in rank] for rank in rows])
        sums = sent.sum(0)
        total = np.stack([eight_bits(part) for part in sums])
        if self.feedback:
            own = sent.copy()
            for rank in range(n):
                own[rank, rank] += total[rank] - sums[rank]
            self.errors = given - own.reshape(n, -1)[:, :numel]
        return total.reshape(-1)[:numel]


def diloco(
    problem: Problem,
    period: int,
    lr: float,
    momentum: float,
    average: Callable[[], Average] = lambda: lambda grads: np.asarray(sum(grads) / len(grads)),
    fragments: Sequence[tuple[str, ...]] = (("b", "s", "w"),),
    nesterov: bool = True,
    alpha: float = 0.0,
    delay: int = 0,
) -> list[list[Params]]:
    """`fragments`: the names of each; the numbers of a fragment are averaged together, in that order.
    `alpha`: of its own parameters a rank keeps this part. `delay`: it sends so many steps before the outer step."""
    n, k = problem.ranks, len(fragments)
    optimizers, params, history = [Sgd() for _ in range(n)], [dict(problem.start) for _ in range(n)], []
    anchor = [np.concatenate([problem.start[name].ravel() for name in names]) for names in fragments]
    velocity, averages = [np.zeros_like(a) for a in anchor], [average() for _ in fragments]
    arrives: list[Array] = [a * np.nan for a in anchor]
    for step in range(problem.steps):
        params = [o.step(p, g) for o, p, g in zip(optimizers, params, problem.grads(params, step), strict=True)]
        for j, names in enumerate(fragments):
            if (step + 1 + delay + j * period // k) % period == 0:
                moved = [anchor[j] - np.concatenate([p[name].ravel() for name in names]) for p in params]
                arrives[j] = averages[j](moved)
            if (step + 1 + j * period // k) % period == 0:
                d = arrives[j]
                velocity[j] = momentum * velocity[j] + d
                anchor[j] = anchor[j] - lr * (d + momentum * velocity[j] if nesterov else velocity[j])
                ends = np.cumsum([problem.start[name].size for name in names])[:-1]
                parts = zip(names, np.split(anchor[j], ends), strict=True)
                new = {name: part.reshape(problem.start[name].shape) for name, part in parts}
                params = [{**p, **{name: (1 - alpha) * a + alpha * p[name] for name, a in new.items()}} for p in params]
        history.append(params)
    return history


def mean_gradients(problem: Problem) -> list[list[Params]]:
    """w <- w - lr v(mean_r grad f_r(w))"""
    optimizer, params, history = Sgd(), problem.start, []
    for step in range(problem.steps):
        params = optimizer.step(params, mean_of(problem.grads([params] * problem.ranks, step)))
        history.append([params] * problem.ranks)
    return history
