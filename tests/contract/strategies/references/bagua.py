"""Bagua's algorithms: 8-bit means of gradients, gossip about weights, compressed gossip on a ring, QAdam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tests.contract.strategies.problem import Array, Params, Problem, Sgd, mean_of, on_each

Reference = Callable[[Problem], list[list[Params]]]


def eight_bits(x: Array) -> Array:
    """x as its receivers see it, by Bagua's MinMaxUInt8: codes of 0 to 255 of multiples of 1 / s, of which 0 is one.

    Where 0 lies outside of the range no number is 0; there the grid begins at the least number.
    """
    if not x.size:
        return x
    span = x.max() - x.min()
    if not x.min() <= 0 <= x.max() or span == 0:
        step = span / 255 or 1.0
        return np.asarray(x.min() + np.clip(np.rint((x - x.min()) / step), 0, 255) * step)
    s = 255 / (span + (1e-7 if span >= 2.55e-4 else 0))
    upper = np.rint(x.max() * s)
    lower = upper - 255
    return np.asarray((np.clip(np.minimum(np.rint(x * s), upper) - lower, 0, 255) + lower) / s)


def flat(params: Params, order: Sequence[str] = ("b", "s", "w")) -> Array:
    """All parameters, as they lie in one bucket."""
    return np.concatenate([params[name].reshape(-1) for name in order])


def unflat(vector: Array, like: Params, order: Sequence[str] = ("b", "s", "w")) -> Params:
    parts, start = {}, 0
    for name in order:
        parts[name] = vector[start : start + like[name].size].reshape(like[name].shape)
        start += like[name].size
    return parts


#: From each rank's share of a mean, flat, to the mean.
Sum = Callable[[list[Array]], Array]


class EightBits:
    """Bagua's bytegrad: each rank adds up its part of everyone's 8-bit messages, and sends the sum in 8 bits.

    With `feedback`, what rounding loses of a rank's message, and of the sum that it sends, is in its next message.
    """

    def __init__(self, feedback: bool = False):
        self.feedback = feedback
        self.errors: list[Array] | float = 0.0

    def __call__(self, shares: list[Array]) -> Array:
        n, numel = len(shares), len(shares[0])
        given = np.stack(shares) + np.asarray(self.errors)
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


def sum_by_node(shares: list[Array], node: int) -> Array:
    m, size = min(node, len(shares)), len(shares[0])
    sums = [np.asarray(sum(shares[first : first + m])) for first in range(0, len(shares), m)]
    cut = [np.split(np.pad(vector, (0, -size % m)), m) for vector in sums]
    return np.concatenate([EightBits()(list(parts)) for parts in zip(*cut, strict=True)])[:size]


def eight_bit_gradients(average: bool = True, lr: float = 0.1, node: int = 1) -> Reference:
    """Bagua's pipeline: everyone's part r goes to rank r in 8 bits, is added up there, and comes back in 8 bits.

    With nodes of m ranks, each m-th of a node's sum goes through it with those of the other nodes. All gradients are in
    one bucket, w last.
    """

    def train(problem: Problem) -> list[list[Params]]:
        n, optimizer, params, history = problem.ranks, Sgd(lr), problem.start, []
        for step in range(problem.steps):
            shares = [g / (n if average else 1) for g in map(flat, problem.grads([params] * n, step))]
            params = optimizer.step(params, unflat(sum_by_node(shares, node), params))
            history.append([params] * n)
        return history

    return train


def peer_of(rank: int, n: int, k: int) -> int:
    """Bagua's shift_one: the lower half goes round the upper one."""
    if rank < n // 2:
        return (k + rank) % (n // 2) + n // 2
    return (rank - n // 2 - k) % (n // 2)


def mean_of_nodes(x: list[Params], size: int) -> list[Params]:
    """One for each node of `size` ranks, of which a world of one is one."""
    return [mean_of(x[first : first + size]) for first in range(0, len(x), size)]


def decentralized(shift_one: bool = False, interval: int = 1, node: int = 1) -> Reference:
    """x_{t+1} = y_t - lr v(grad f_r(x_t)), y_t the mean of all nodes' x_t or of two"""

    def mixed(x: list[Params], k: int) -> list[Params]:
        x = mean_of_nodes(x, node)
        n = len(x)
        if not shift_one or n == 1:
            y = [mean_of(x)] * n
        else:
            y = [mean_of([x[rank], x[peer_of(rank, n, k)]]) for rank in range(n)]
        return [one for one in y for _ in range(node)]  # more than there are ranks in a world of one

    def train(problem: Problem) -> list[list[Params]]:
        optimizers, x, history = [Sgd() for _ in range(problem.ranks)], [problem.start] * problem.ranks, []
        for step in range(problem.steps):
            grads = problem.grads(x, step)
            y = x if step % interval else mixed(x, step // interval)
            x = [sgd.step(p, g) for sgd, p, g in zip(optimizers, y, grads, strict=False)]
            history.append(x)
        return history

    return train


def low_precision(interval: int = 1, one_bucket: bool = True, node: int = 1) -> Reference:
    """z = x + L/3 + R/3 - 5/3 W, d = Q(z); every copy of a W moves by its d; x = W

    x is the mean of a node; a node of m ranks cuts z in m parts with a grid each.
    """

    def q(z: Params, m: int) -> Params:
        if not one_bucket:
            return on_each(eight_bits, z)
        vector = flat(z)
        parts = np.split(np.pad(vector, (0, -len(vector) % m)), m)
        return unflat(np.concatenate([eight_bits(part) for part in parts])[: len(vector)], z)

    def train(problem: Problem) -> list[list[Params]]:
        m = min(node, problem.ranks)
        n, history = problem.ranks // m, []
        optimizers, x = [Sgd() for _ in range(n * m)], [problem.start] * n * m
        own, left, right = [problem.start] * n, [problem.start] * n, [problem.start] * n
        for step in range(problem.steps):
            x = [sgd.step(p, g) for sgd, p, g in zip(optimizers, x, problem.grads(x, step), strict=True)]
            if step % interval == 0:
                means = mean_of_nodes(x, m)
                z = [
                    on_each(lambda x, a, b, w: x + a / 3 + b / 3 - 5 / 3 * w, means[r], left[r], right[r], own[r])
                    for r in range(n)
                ]
                d = [q(tree, m) for tree in z]
                own = [on_each(np.add, own[r], d[r]) for r in range(n)]
                left = [on_each(np.add, left[r], d[(r - 1) % n]) for r in range(n)]
                right = [on_each(np.add, right[r], d[(r + 1) % n]) for r in range(n)]
                x = [w for w in own for _ in range(m)]
            history.append(x)
        return history

    return train


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

    def __call__(self, shares: list[Array]) -> Array:
        n, numel = len(shares), len(shares[0])
        given = np.stack(shares) + self.errors
        part = -(-numel // (n * self.block)) * self.block
        where = [slice(min(r * part, numel), min((r + 1) * part, numel)) for r in range(n)]
        sent = np.stack([np.concatenate([signs(v[at], self.block) for at in where]) for v in given])
        sums = sent.sum(0)
        mean = np.concatenate([signs(sums[at], self.block) for at in where])
        self.errors = given - sent
        for rank, at in enumerate(where):
            self.errors[rank, at] += sums[at] - mean[at]
        return mean


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
        add = partial(sum_by_node, node=node) if one_bit is None else OneBit(one_bit)
        m = v = on_each(np.zeros_like, x)
        for s in range(1, problem.steps + 1):
            grads = problem.grads([x] * problem.ranks, s - 1)
            if s <= warmup_steps and not (bagua_exact and s == warmup_steps):
                g = on_each(lambda g, x: g + weight_decay * x, mean_of(grads), x)
                m = on_each(lambda m, g: b1 * m + (1 - b1) * g, m, g)
                v = on_each(lambda v, g: b2 * v + (1 - b2) * g**2, v, g)
            elif s > warmup_steps:
                momenta = [on_each(lambda m, g: b1 * m + (1 - b1) * g, m, g) for g in grads]
                m = unflat(add([flat(own, ORDER) / problem.ranks for own in momenta]), m, ORDER)
            c1, c2 = 1 - b1**s, np.sqrt(1 - b2**s)
            x = on_each(lambda x, m, v, c1=c1, c2=c2: x - lr / c1 * m / (np.sqrt(v) / c2 + eps), x, m, v)
            history.append([x] * problem.ranks)
        return history

    return reference
