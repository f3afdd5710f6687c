"""The hook of the how-to that measures: noise scale and gain, against the papers' formulas by plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    assert own == mean
    assert found["gain"](own, mean) == 1

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
