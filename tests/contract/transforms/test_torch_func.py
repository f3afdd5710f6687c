"""Transforms around a data-parallel step that conformance can't say. All but forward mode are linear in the step.

So what every rank gets is the mean over ranks of what the transform makes of the plain step on each rank's batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp

import ltx
from tests.kinds import Ranks
from tests.twins.cases import CASES, Batch, Params, assert_close, assert_same_bits, backward, params_of, plain_step

F = Callable[..., Any]


@dataclass(frozen=True)
class Transform:
    """``apply(step, params, x, y)``.

    Attributes:
        vectors: of a step that gives one loss a sample.
        plain: by plain autograd, which can't run inside of vmap.
        local: what each rank gets is its own.
    """

    apply: Callable[..., Any]
    vectors: bool = False
    plain: bool = False
    local: bool = False


def leaves(p: Params) -> tuple[Params, list[Tensor]]:
    given = {name: w.detach().requires_grad_() for name, w in p.items()}
    return given, list(given.values())


def produced(f: F, p: Params, *batch: Tensor) -> Tensor:
    return grad(lambda z: f({name: w * z.sum() + z[0] for name, w in p.items()}, *batch))(batch[0].new_tensor([0.5, 2]))


def produced_backward(f: F, p: Params, *batch: Tensor) -> Tensor:
    z = batch[0].new_tensor([0.5, 2]).requires_grad_()
    f({name: w * z.sum() + z[0] for name, w in p.items()}, *batch).backward()
    return z.grad


def retained(f: F, p: Params, *batch: Tensor) -> list[tuple[Tensor, ...]]:
    given, flat = leaves(p)
    loss = f(given, *batch)
    return [torch.autograd.grad(scale * loss, flat, retain_graph=True) for scale in (1.0, -3.0)]


def in_inference_mode(transform: F) -> F:
    def apply(f: F, p: Params, *batch: Tensor) -> Any:
        with torch.inference_mode():
            return transform(f)(p, *batch)

    return apply


TRANSFORMS = {
    "grad in inference mode": Transform(in_inference_mode(grad)),
    "jacrev of a vector in inference mode": Transform(in_inference_mode(jacrev), vectors=True),
    "jacrev of a vector": Transform(lambda f, p, *b: jacrev(f)(p, *b), vectors=True),
    "jacrev in chunks": Transform(lambda f, p, *b: jacrev(f, chunk_size=1)(p, *b), vectors=True),
    "hvp, forward over reverse, of one leaf": Transform(
        lambda f, p, *b: jvp(lambda w: grad(f)(p | {"3.bias": w}, *b), (p["3.bias"],), (torch.ones_like(p["3.bias"]),))
    ),
    "jvp of one leaf": Transform(
        lambda f, p, *b: jvp(lambda w: f(p | {"3.bias": w}, *b), (p["3.bias"],), (torch.ones_like(p["3.bias"]),)),
        local=True,
    ),
    "two steps in one loss": Transform(lambda f, p, x, y: grad(lambda p: f(p, x, y) * f(p, -x, y))(p)),
    "two steps in one loss, backward": Transform(
        lambda f, p, x, y: backward(lambda p: f(p, x, y) * f(p, -x, y), p), plain=True
    ),
    "produced parameters": Transform(produced),
    "produced parameters, backward": Transform(produced_backward, plain=True),
    "retain_graph twice": Transform(retained, plain=True),
}


def of_samples(step: F) -> F:
    return lambda params, x, y: torch.stack([step(params, x[i : i + 1], y[i : i + 1]) for i in range(len(x))])


def build(name: str, seed: int) -> tuple[F, F, Params, list[Batch]]:
    """(the plain step, the data-parallel one, parameters, batches of two ranks), in float64."""
    transform = TRANSFORMS[name]
    module, batches = CASES["mlp"].build(seed, 2)
    step = plain_step(module.double())
    step = of_samples(step) if transform.vectors else step
    strategy = ltx.DDPStrategy(bucket_bytes=128, first_bucket_bytes=16)
    wrapped = ltx.data_parallel(step, strategy)
    return step, wrapped, params_of(module), [(x.double(), y.double()) for x, y in batches]


def on_a_rank(name: str, seed: int) -> Any:
    _, step, params, batches = build(name, seed)
    return TRANSFORMS[name].apply(step, params, *batches[ltx.world().rank])


def expected(name: str, seed: int) -> list[Any]:
    """What each rank should get."""
    step, _, params, batches = build(name, seed)
    alone = [TRANSFORMS[name].apply(step, params, *batch) for batch in batches]
    return alone if TRANSFORMS[name].local else [ltx.tree.map(lambda *xs: sum(xs) / 2, *alone)] * 2


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_real_ranks(name: str, ranks: Ranks, seed: int) -> None:
    results = ranks(2).run(on_a_rank, name, seed)
    for got, wanted in zip(results, expected(name, seed), strict=True):
        assert_close(got, wanted, 1e-12)
    if not TRANSFORMS[name].local:
        results.replicated()


@pytest.mark.full(but=2)
@pytest.mark.parametrize("name", [name for name, transform in TRANSFORMS.items() if not transform.plain])
def test_simulated_ranks(name: str, seed: int) -> None:
    _, step, params, batches = build(name, seed)
    stacked = [torch.stack(parts) for parts in zip(*batches, strict=True)]
    results = ltx.vmap(lambda *batch: TRANSFORMS[name].apply(step, params, *batch))(*stacked)
    for rank, wanted in enumerate(expected(name, seed)):
        assert_close(ltx.tree.map(lambda g, rank=rank: g[rank], results), wanted, 1e-12)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_world_of_one(name: str, seed: int) -> None:
    plain, step, params, (batch, _) = build(name, seed)
    assert_same_bits(*(TRANSFORMS[name].apply(f, params, *batch) for f in (plain, step)))
