"""QAdam: Adam on mean gradients, then Adam's step along momenta that are averaged in eight bits, or in one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.contract.strategies.problem import Array, Params, Problem, mean_of, on_each
from tests.contract.strategies.references.bagua import flat, sum_by_node, unflat

#: From each rank's momentum, flat, to the one that all use.
Average = Callable[[list[Array]], Array]
#: The order in which one bucket holds the problem's parameters: that in which a backward pass is expected to end.
ORDER = ("s", "b", "w")


def signs(x: Array, block: int) -> Array:
    """Of each block the signs, and one size, which is the mean of sizes."""
    blocks = [x[start : start + block] for start in range(0, len(x), block)]
    return np.concatenate([np.abs(b).mean() * np.where(np.signbit(b), -1.0, 1.0) for b in blocks] or [x])


class OneBit:
    """1-bit Adam's compressed_allreduce: a rank encodes its momentum and its part of their mean, each with its errors.

    The error of a part is fed back to the momentum of the rank that has it.
    """

    def __init__(self, block: int):
        self.block, self.errors = block, np.zeros(())

    def __call__(self, vectors: list[Array]) -> Array:
        n, numel = len(vectors), len(vectors[0])
        given = np.stack(vectors) / n + self.errors
        part = -(-numel // (n * self.block)) * self.block
        where = [slice(min(r * part, numel), min((r + 1) * part, numel)) for r in range(n)]
        sent = np.stack([np.concatenate([signs(v[at], self.block) for at in where]) for v in given])
        sums = sent.sum(0)
        mean = np.concatenate([signs(sums[at], self.block) for at in where])
        self.errors = given - sent
        for rank, at in enumerate(where):
            self.errors[rank, at] += sums[at] - mean[at]
        return mean


def averaged(trees: list[Params], average: Average) -> Params:
    return unflat(average([flat(tree, ORDER) for tree in trees]), trees[0], ORDER)


def trained_by(
    warmup_steps: int,
    lr: float,
    betas: tuple[float, float],
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bagua_exact: bool = False,
    node: int = 1,
    one_bit: int | None = None,
) -> Callable[[Problem], list[list[Params]]]:
    """`one_bit`: 1-bit Adam, with blocks of so many numbers."""
    b1, b2 = betas

    def reference(problem: Problem) -> list[list[Params]]:
        x, history = problem.start, []
        average = (lambda vs: sum_by_node([v / len(vs) for v in vs], node)) if one_bit is None else OneBit(one_bit)
        m = v = on_each(np.zeros_like, x)
        for s in range(1, problem.steps + 1):
            grads = problem.grads([x] * problem.ranks, s - 1)
            if s <= warmup_steps and not (bagua_exact and s == warmup_steps):
                g = on_each(lambda g, x: g + weight_decay * x, mean_of(grads), x)
                m = on_each(lambda m, g: b1 * m + (1 - b1) * g, m, g)
                v = on_each(lambda v, g: b2 * v + (1 - b2) * g**2, v, g)
            elif s > warmup_steps:
                m = averaged([on_each(lambda m, g: b1 * m + (1 - b1) * g, m, g) for g in grads], average)
            c1, c2 = 1 - b1**s, np.sqrt(1 - b2**s)
            x = on_each(lambda x, m, v, c1=c1, c2=c2: x - lr / c1 * m / (np.sqrt(v) / c2 + eps), x, m, v)
            history.append([x] * problem.ranks)
        return history

    return reference
