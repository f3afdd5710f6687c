"""The optimizers of the how-to, on two ranks, against their papers' formulas by plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltx
from tests.test_readme import DOCS, blocks_of, run_in_order

PAGE = "write-an-optimizer.md"
Params = dict[str, Tensor]


def loss_of(params: Params, x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"] + params["b"]) - 0.5).square().mean()


def slopes(params: Params, x: Tensor) -> tuple[Params, Tensor]:
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = loss_of(leaves, x)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)), loss.detach()


class Sgd:
    """x <- x - 0.1 m, with m <- 0.5 m + g."""

    def __init__(self, lr: float = 0.1, momentum: float = 0.5):
        self.lr, self.momentum, self.kept = lr, momentum, dict[str, Tensor]()

    def __call__(self, params: Params, grads: Params) -> Params:
        self.kept = {name: self.momentum * self.kept.get(name, 0 * g) + g for name, g in grads.items()}
        return {name: p - self.lr * self.kept[name] for name, p in params.items()}


def after(change: Callable[[Params, Params], Params]) -> Callable[[Params, Tensor], Params]:
    def run(params: Params, batches: Tensor) -> Params:
        sgd = Sgd()
        for x in batches:
            params = sgd(params, change(slopes(params, x)[0], params))
        return params

    return run


def debiased() -> Callable[[Params, Params], Params]:
    seen = list[Params]()

    def change(grads: Params, params: Params) -> Params:
        seen.append(grads)
        weights = [0.8**age for age in reversed(range(len(seen)))]
        return {k: sum(w * g[k] for w, g in zip(weights, seen, strict=True)) / sum(weights) for k in grads}  # type: ignore[misc]

    return change


def by_rms(g: Tensor) -> Tensor:
    rms = float(g.pow(2).mean() ** 0.5)
    return g if rms <= 0.01 else g * 0.01 / rms


def adaptively(g: Tensor, p: Tensor) -> Tensor:
    if g.dim() == 1:
        return g * min(1.0, 0.02 * max(float(p.norm()), 1e-3) / float(g.norm()))
    return torch.stack([adaptively(row, of) for row, of in zip(g, p, strict=True)])


def summed(grads: Params) -> Params:
    norm = sum(float(g.abs().sum()) for g in grads.values())
    return {k: g * min(1.0, 0.1 / (norm + 1e-6)) for k, g in grads.items()}


def ahead(params: Params, batches: Tensor) -> Params:
    sgd, slow = Sgd(), params
    for n, x in enumerate(batches):
        params = sgd(params, slopes(params, x)[0])
        if (n + 1) % 5 == 0:
            params = slow = {k: slow[k] + 0.5 * (params[k] - slow[k]) for k in params}
    return params


def mean(params: Params, batches: Tensor) -> Params:
    sgd, seen = Sgd(), list[Params]()
    for x in batches:
        params = sgd(params, slopes(params, x)[0])
        seen.append(params)
    weights = torch.tensor([0.8**age for age in reversed(range(len(seen)))])
    return {k: torch.tensordot(weights / weights.sum(), torch.stack([p[k] for p in seen]), 1) for k in params}


def free(params: Params, batches: Tensor) -> Iterator[Params]:
    x, z = params, params  # the mean, and what plain SGD moves
    for n, batch in enumerate(batches):
        y = {k: 0.1 * z[k] + 0.9 * x[k] for k in x}
        z = Sgd(lr=0.5)(z, slopes(y, batch)[0])
        x = {k: x[k] * n / (n + 1) + z[k] / (n + 1) for k in x}
    yield {k: 0.1 * z[k] + 0.9 * x[k] for k in x}
    yield x


def several(params: Params, batches: Tensor) -> Params:
    sgd, kept, updates, left_out = Sgd(), list[Params](), 0, 0
    for x in batches:
        grads = slopes(params, x)[0]
        if float(grads["w"].norm()) > 0.25:
            left_out += 1
            continue
        kept.append(grads)
        if len(kept) == (2 if updates < 2 else 3):
            params = sgd(params, {k: torch.stack([g[k] for g in kept]).mean(0) for k in params})
            kept, updates = [], updates + 1
    assert 0 < left_out < len(batches) - 4
    assert updates > 2
    return params


TWINS: dict[str, Callable[[Params, Tensor], Params]] = {
    "decayed": after(lambda grads, params: grads | {"w": grads["w"] + 0.1 * params["w"]}),
    "smooth": lambda params, batches: after(debiased())(params, batches),
    "sharded": lambda params, batches: after(debiased())(params, batches),
    "by_sum": after(lambda grads, params: summed(grads)),
    "each_rms": after(lambda grads, params: {k: by_rms(g) for k, g in grads.items()}),
    "adaptive": after(lambda grads, params: {k: adaptively(g, params[k]) for k, g in grads.items()}),
    "ahead": ahead,
    "mean": mean,
    "free": lambda params, batches: next(free(params, batches)),
    "best": lambda params, batches: list(free(params, batches))[1],
    "several": several,
}


def ends(folder: str) -> dict[str, Any]:
    found = run_in_order(PAGE, blocks_of(DOCS / "how-to" / PAGE), folder)
    return {name: getattr(found[name], "params", found[name]) for name in (*TWINS, "first", "batches")}


@pytest.mark.full
def test_they_end_where_the_formulas_do(ranks: Callable[[int], ltx.Pool], tmp_path: Path) -> None:
    for found in ranks(2).run(ends, str(tmp_path)):
        plain = Sgd()
        without = found["first"]
        for x in found["batches"]:
            without = plain(without, slopes(without, x)[0])
        for name, twin in TWINS.items():
            expected = twin(found["first"], found["batches"])
            assert not torch.allclose(expected["w"], without["w"], atol=1e-3), name
            torch.testing.assert_close(
                dict(found[name]), expected, rtol=2e-4, atol=2e-5, msg=lambda t, n=name: f"{n}: {t}"
            )
