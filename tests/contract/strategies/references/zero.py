"""ZeRO: what synchronous data parallelism does, whoever holds the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.contract.strategies.problem import Adam, Array, Params, Problem, Sgd, on_each
from tests.contract.strategies.references.bagua import eight_bits


class ClippedAdam(Adam):
    """Gradients are clipped to a norm which is below that of most of them."""

    def step(self, params: Params, grads: Params) -> Params:
        factor = min(1.0, 0.3 / (sum((g**2).sum() for g in grads.values()) ** 0.5 + 1e-6))
        return super().step(params, on_each(lambda g: factor * g, grads))


def _on_rows(code: Callable[[Array], Array], params: Params, ranks: int) -> Params:
    """Row r has the r-th part of every parameter, padded with zeros, and is coded by itself."""
    padded = {name: np.pad(x.reshape(-1), (0, -x.size % ranks)).reshape(ranks, -1) for name, x in params.items()}
    rows = np.concatenate([padded[name] for name in sorted(padded)], 1)
    coded, found, start = np.stack([code(row) for row in rows]), {}, 0
    for name in sorted(padded):
        end = start + padded[name].shape[1]
        found[name] = coded[:, start:end].reshape(-1)[: params[name].size].reshape(params[name].shape)
        start = end
    return found


def _coded(problem: Problem, optimizer: Sgd | Adam, code: Callable[[Array], Array], keep: bool) -> list[list[Params]]:
    n, params, history = problem.ranks, problem.start, []
    zero = on_each(np.zeros_like, params)
    left, unsent = [zero] * n, zero
    for step in range(problem.steps):
        shares = [
            on_each(lambda g, e: g / n + e, g, e) for g, e in zip(problem.grads([params] * n, step), left, strict=True)
        ]
        sent = [_on_rows(code, share, n) for share in shares]
        if keep:
            left = [on_each(np.subtract, share, part) for share, part in zip(shares, sent, strict=True)]
        wanted = on_each(np.add, optimizer.step(params, on_each(lambda *parts: sum(parts), *sent)), unsent)
        params = on_each(np.add, params, _on_rows(code, on_each(np.subtract, wanted, params), n))
        unsent = on_each(np.subtract, wanted, params)
        history.append([params] * n)
    return history


def eight_bit_parts(problem: Problem) -> list[list[Params]]:
    return _coded(problem, Sgd(), eight_bits, keep=False)


def _greatest_half(x: Array) -> Array:
    return np.where(np.abs(x) >= np.sort(np.abs(x))[-max(1, round(0.5 * x.size))], x, 0.0)


def greatest_half_of_parts(problem: Problem) -> list[list[Params]]:
    return _coded(problem, Sgd(), _greatest_half, keep=True)
