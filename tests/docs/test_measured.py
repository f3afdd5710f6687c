"""What the how-tos compute on two ranks, against the papers' formulas by plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import ltx
from tests.kinds import Params, Ranks
from tests.test_readme import DOCS, blocks_of, run_in_order
from tests.train_on import on_ranks

PAGE = "write-a-hook.md"
N, SAMPLES, DECAY = 2, 16, 0.9


def grads_of(w: Tensor, x: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    return torch.autograd.grad((x @ w - 1).square().mean(), w)[0]


def ran(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found = run_in_order(PAGE, blocks_of(DOCS / "how-to" / PAGE), folder)
    with ltx.init():
        own, mean = found["measured"](found["state"])
        scale = found["noise_scale"](own, mean, samples=SAMPLES)
        measured = {"w": found["state"].params["w"], "scale": scale, "gain": found["gain"](own, mean)}
    return {"w": found["params"]["w"], "xs": found["xs"]}, measured


def by_the_papers(w: Tensor, xs: Tensor) -> dict[str, Tensor]:
    """AdaScale's appendix B.3, with moving averages of variance and square; McCandlish et al., appendix A.1."""
    variance = square = small = large = torch.tensor(0.0)
    gain, done = torch.tensor(1.0), 0.0
    for x in xs:
        grads = [grads_of(w, part) for part in x.chunk(N)]
        mean = torch.stack(grads).mean(0)
        w = w - 0.01 * gain * 0.9**done * mean
        var = sum(g.square().sum() for g in grads) / (N - 1) - N / (N - 1) * mean.square().sum()
        variance = DECAY * variance + (1 - DECAY) * var
        square = DECAY * square + (1 - DECAY) * (mean.square().sum() - var / N)
        small = DECAY * small + (1 - DECAY) * torch.stack([g.square().sum() for g in grads]).mean()
        large = DECAY * large + (1 - DECAY) * mean.square().sum()
        gain = (variance + square) / (variance / N + square)
        done = done + gain.item()
    b, big = SAMPLES, N * SAMPLES
    of_noise = (small - large) / (1 / b - 1 / big)
    return {"w": w, "gain": gain, "scale": of_noise / ((big * large - b * small) / (big - b))}


def test_two_ranks_measure_what_the_papers_say(ranks: Callable[[int], ltx.Pool], tmp_path: Path) -> None:
    for given, measured in ranks(N).run(ran, str(tmp_path)):
        expected = by_the_papers(**given)
        assert 1 < expected["gain"] < N
        torch.testing.assert_close(measured, {name: expected[name] for name in measured}, rtol=1e-3, atol=1e-5)


def test_simulated_ranks_and_one_alone(tmp_path: Path) -> None:
    found: dict[str, Any] = dict(run_in_order(PAGE, blocks_of(DOCS / "how-to" / PAGE), str(tmp_path)))
    own, mean = found["measured"](found["state"])
    assert (own, found["gain"](own, mean)) == (mean, 1)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        train = found["train"]
        state, _ = train(train.init(found["params"]), x)
        return found["measured"](state)  # type: ignore[no-any-return]

    x = found["xs"][0]
    grads = [grads_of(found["params"]["w"], part) for part in x.chunk(4)]
    own, mean = ltx.vmap(run)(x.unflatten(0, (4, 8)))
    torch.testing.assert_close(own, (torch.stack([g.square().sum() for g in grads]).mean() * 0.1).expand(4))
    torch.testing.assert_close(mean, (torch.stack(grads).mean(0).square().sum() * 0.1).expand(4))


# The loader of the page on checkpoints: workers of two ranks draw different numbers, and the same ones again.
LOADERS = DOCS / "how-to" / "checkpoint.md"


def test_workers_of_ranks_draw_their_own(ranks: Ranks, tmp_path: Path) -> None:
    def run() -> Any:
        blocks = [each for each in blocks_of(LOADERS) if "DataLoader" in each.code or each.code.startswith("import")]
        found = run_in_order(str(LOADERS), blocks, str(tmp_path))
        return found["seen"] % 1, found["gathered"] % 1

    (first, gathered), (second, _) = ranks(2).run(run)
    assert gathered[0].equal(first)
    assert gathered[1].equal(second)
    assert not {*first.tolist()} & {*second.tolist()}


POISSON = DOCS / "examples" / "dp_sgd.md"
NAMES = ("x", "y", "params", "batches", "noises", "LENGTH", "RATE", "CLIP", "NOISE")


def ran_by_poisson(folder: str) -> dict[str, Any]:
    """The page's variables on this rank, and many draws of its sampler, with few samples."""
    found = run_in_order(str(POISSON), blocks_of(POISSON), folder)
    with ltx.init():
        many = [chosen[:-1].tolist() for chosen, _ in found["poisson"](7, 0.3, 2000, 1)]
    return {name: found[name] for name in NAMES} | {"end": found["state"].params, "many": many}


def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.tanh(params["0.weight"] @ x + params["0.bias"])
    return cross_entropy(params["2.weight"] @ hidden + params["2.bias"], y)


def test_two_ranks_end_where_one_process_does(ranks: Callable[[int], ltx.Pool], tmp_path: Path) -> None:
    by_rank = list(ranks(2).run(ran_by_poisson, str(tmp_path)))
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
    first, second = (its["many"] for its in ranks(2).run(ran_by_poisson, str(tmp_path)))
    joined = torch.zeros(2000, 7)
    for step, chosen in enumerate(zip(first, second, strict=True)):
        assert {*chosen[0]} <= {0, 2, 4, 6}
        assert {*chosen[1]} <= {1, 3, 5}
        joined[step, [*chosen[0], *chosen[1]]] = 1.0
    torch.testing.assert_close(joined.mean(0), torch.full((7,), 0.3), rtol=0.0, atol=0.06)  # 6 deviations
    assert (torch.corrcoef(joined.T) - torch.eye(7)).abs().max() < 0.14


@on_ranks(2)
def test_a_rank_without_samples_of_its_own_has_a_batch(tmp_path: Path) -> None:
    """torch.func.vmap takes none of no samples for most layers."""
    poisson = run_in_order(str(POISSON), blocks_of(POISSON)[:1], str(tmp_path))["poisson"]
    with ltx.init():
        assert all(len(chosen) and weights[-1] == 0.0 for chosen, weights in poisson(1, 0.5, 20, 0))


OPTIMIZERS = "write-an-optimizer.md"


def loss_at(params: Params, x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"] + params["b"]) - 0.5).square().mean()


def slopes(params: Params, x: Tensor) -> tuple[Params, Tensor]:
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = loss_at(leaves, x)
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
        z = Sgd(lr=0.5)(z, slopes({k: 0.1 * z[k] + 0.9 * x[k] for k in x}, batch)[0])
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
    found = run_in_order(OPTIMIZERS, blocks_of(DOCS / "how-to" / OPTIMIZERS), folder)
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
