"""DP-SGD with Poisson samples, as its page has it: two ranks against one process with the samples of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import ltx
from tests.test_readme import DOCS, blocks_of, run_in_order

PAGE = DOCS / "examples" / "dp_sgd.md"
NAMES = ("x", "y", "params", "batches", "noises", "LENGTH", "RATE", "CLIP", "NOISE")


def ran(folder: str) -> dict[str, Any]:
    """The page's variables on this rank, and many draws of its sampler, with few samples."""
    found = run_in_order(str(PAGE), blocks_of(PAGE), folder)
    with ltx.init():
        many = [chosen[:-1].tolist() for chosen, _ in found["poisson"](7, 0.3, 2000, 1)]
    return {name: found[name] for name in NAMES} | {"end": found["state"].params, "many": many}


def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.tanh(params["0.weight"] @ x + params["0.bias"])
    return cross_entropy(params["2.weight"] @ hidden + params["2.bias"], y)


def test_two_ranks_end_where_one_process_does(ranks: Callable[[int], ltx.Pool], tmp_path: Path) -> None:
    by_rank = list(ranks(2).run(ran, str(tmp_path)))
    given = by_rank[0]
    params = {name: p.clone().requires_grad_() for name, p in given["params"].items()}
    sizes = []
    for step in range(len(given["batches"])):
        samples = [i for its in by_rank for i in its["batches"][step][0][:-1].tolist()]
        sums = {name: sum(its["noises"][step][name] for its in by_rank) for name in params}
        for i in samples:
            grads = torch.autograd.grad(loss_of(params, given["x"][i], given["y"][i]), list(params.values()))
            norm = sum(float(g.square().sum()) for g in grads) ** 0.5
            for name, g in zip(params, grads, strict=True):
                sums[name] = sums[name] + g * min(1.0, given["CLIP"] / norm)
        with torch.no_grad():
            for name, p in params.items():
                p -= 0.5 * sums[name] / (given["RATE"] * given["LENGTH"])
        sizes.append([len(its["batches"][step][0]) - 1 for its in by_rank])
    assert any(0 in both for both in sizes), "a rank without samples was to be among them"
    for its in by_rank:
        torch.testing.assert_close(its["end"], {k: p.detach() for k, p in params.items()}, rtol=1e-4, atol=1e-5)
    steps = zip(*(its["noises"] for its in by_rank), strict=True)
    noise = torch.cat([sum(own[name] for own in step).flatten() for step in steps for name in params])
    torch.testing.assert_close(noise.std(), torch.tensor(given["NOISE"] * given["CLIP"]), rtol=0.1, atol=0.0)


def test_samples_are_drawn_by_themselves(ranks: Callable[[int], ltx.Pool], tmp_path: Path) -> None:
    first, second = (its["many"] for its in ranks(2).run(ran, str(tmp_path)))
    joined = torch.zeros(2000, 7)
    for step, chosen in enumerate(zip(first, second, strict=True)):
        assert {*chosen[0]} <= {0, 2, 4, 6}
        assert {*chosen[1]} <= {1, 3, 5}
        joined[step, [*chosen[0], *chosen[1]]] = 1.0
    torch.testing.assert_close(joined.mean(0), torch.full((7,), 0.3), rtol=0.0, atol=0.06)  # 6 deviations
    apart = torch.corrcoef(joined.T) - torch.eye(7)
    assert apart.abs().max() < 0.14


def test_a_rank_without_samples_of_its_own_has_a_batch(ranks: Callable[[int], ltx.Pool], tmp_path: Path) -> None:
    """torch.func.vmap takes none of no samples for most layers."""

    def lengths() -> list[tuple[int, float]]:
        poisson = run_in_order(str(PAGE), blocks_of(PAGE)[:1], str(tmp_path))["poisson"]
        with ltx.init():
            return [(len(chosen), float(weights[-1])) for chosen, weights in poisson(1, 0.5, 20, 0)]

    for found in ranks(2).run(lengths):
        assert all(length and last == 0.0 for length, last in found)
