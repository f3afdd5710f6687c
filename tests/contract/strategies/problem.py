"""The problem that every strategy trains on, written twice: in torch for ltx, in NumPy for the references.

    loss(p; x, y) = mean over samples of |s tanh(W x + b) - y|^2

Everything is float64, so that a reference in NumPy is met to rounding, 8-bit codes included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import ltx

Array = NDArray[np.float64]
#: One rank's parameters.
Params = dict[str, Array]

STEPS, SAMPLES, INPUTS, OUTPUTS = 9, 5, 4, 3


@dataclass(frozen=True)
class Problem:
    """Where training starts, and what each rank is given: x[step, rank], y[step, rank]."""

    start: Params
    x: Array
    y: Array

    @property
    def steps(self) -> int:
        return len(self.x)

    @property
    def ranks(self) -> int:
        return self.x.shape[1]

    def batches(self, first: int = 0, end: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """On a rank: its batches of steps `first` to `end`."""
        rank = int(ltx.axis_index())
        return [(torch.tensor(self.x[i, rank]), torch.tensor(self.y[i, rank])) for i in range(self.steps)[first:end]]

    def grad(self, params: Params, step: int, rank: int) -> Params:
        return grad_of(params, self.x[step, rank], self.y[step, rank])

    def grads(self, params: list[Params], step: int) -> list[Params]:
        return [self.grad(p, step, rank) for rank, p in enumerate(params)]


def make_problem(seed: int, ranks: int, steps: int = STEPS) -> Problem:
    rng = np.random.default_rng(seed)
    start = {"w": rng.normal(size=(OUTPUTS, INPUTS)), "b": rng.normal(size=OUTPUTS), "s": np.array(1.5)}
    shape = (steps, ranks, SAMPLES)
    return Problem(start, rng.normal(size=(*shape, INPUTS)), rng.normal(size=(*shape, OUTPUTS)))


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    predicted = params["s"] * torch.tanh(x @ params["w"].T + params["b"])
    return (predicted - y).square().sum(-1).mean()


def grad_of(p: Params, x: Array, y: Array) -> Params:
    """The gradient of :func:`loss`, by hand."""
    a = np.tanh(x @ p["w"].T + p["b"])
    error = 2 * (p["s"] * a - y) / len(x)
    dz = error * p["s"] * (1 - a**2)
    return {"w": dz.T @ x, "b": dz.sum(0), "s": np.array((error * a).sum())}


def on_each(f: Callable[..., Array], *trees: Params) -> Params:
    return {name: np.asarray(f(*(tree[name] for tree in trees))) for name in trees[0]}


def mean_of(trees: list[Params]) -> Params:
    return on_each(lambda *arrays: sum(arrays) / len(arrays), *trees)


@dataclass
class Sgd:
    """Momentum as torch counts it: v <- mu v + g, w <- w - lr v."""

    lr: float = 0.1
    momentum: float = 0.9
    velocity: Params | None = None

    def step(self, params: Params, grads: Params) -> Params:
        mu = self.momentum
        self.velocity = grads if self.velocity is None else on_each(lambda v, g: mu * v + g, self.velocity, grads)
        return on_each(lambda p, v: p - self.lr * v, params, self.velocity)


@dataclass
class Adam:
    """Kingma and Ba, 2015, algorithm 1."""

    lr: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    count: int = 0
    m: Params | None = None
    v: Params | None = None

    def step(self, params: Params, grads: Params) -> Params:
        self.count += 1
        zeros = on_each(np.zeros_like, params)
        b1, b2 = self.beta1, self.beta2
        self.m = on_each(lambda m, g: b1 * m + (1 - b1) * g, self.m or zeros, grads)
        self.v = on_each(lambda v, g: b2 * v + (1 - b2) * g**2, self.v or zeros, grads)
        c1, c2 = 1 - b1**self.count, 1 - b2**self.count
        return on_each(lambda p, m, v: p - self.lr * (m / c1) / (np.sqrt(v / c2) + self.eps), params, self.m, self.v)
