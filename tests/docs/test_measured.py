"""The hook of the how-to that measures: noise scale and gain, against the papers' formulas by plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import ltx
from tests.kinds import Ranks
from tests.test_readme import DOCS, blocks_of, run_in_order

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
    expected = torch.stack([g.square().sum() for g in grads]).mean() * 0.1
    torch.testing.assert_close(own, expected.expand(4))
    torch.testing.assert_close(mean, (torch.stack(grads).mean(0).square().sum() * 0.1).expand(4))


# The loader of the page on checkpoints: workers of two ranks draw different numbers, and the same ones again.
LOADERS = DOCS / "how-to" / "checkpoint.md"


def test_workers_of_ranks_draw_their_own(ranks: Ranks, tmp_path: Path) -> None:
    def run() -> Any:
        blocks = [
            block for block in blocks_of(LOADERS) if "DataLoader" in block.code or block.code.startswith("import")
        ]
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
    apart = torch.corrcoef(joined.T) - torch.eye(7)
    assert apart.abs().max() < 0.14


def test_a_rank_without_samples_of_its_own_has_a_batch(ranks: Callable[[int], ltx.Pool], tmp_path: Path) -> None:
    """torch.func.vmap takes none of no samples for most layers."""

    def lengths() -> list[tuple[int, float]]:
        poisson = run_in_order(str(POISSON), blocks_of(POISSON)[:1], str(tmp_path))["poisson"]
        with ltx.init():
            return [(len(chosen), float(weights[-1])) for chosen, weights in poisson(1, 0.5, 20, 0)]

    for found in ranks(2).run(lengths):
        assert all(length and last == 0.0 for length, last in found)
