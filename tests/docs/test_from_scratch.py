"""The page that builds ltx from nothing: its code is as short as it says, and gives the bits that ltx gives."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, jvp, vmap

import ltx
from ltx.core.gradients.marker import can_raise_priority
from tests.kinds import Ranks
from tests.test_readme import DOCS, ROOT, blocks_of, run_in_order
from tests.train_on import go_on, on_ranks

PAGE = DOCS / "concepts" / "from-scratch.md"
BLOCKS = blocks_of(PAGE)
STEPS, LR, MOMENTUM = 5, 0.05, 0.9

torch.manual_seed(7)
MODEL = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
PARAMS = {name: value.detach().clone() for name, value in MODEL.named_parameters()}
X, Y = torch.randn(2, 10, 6), torch.randint(3, (2, 10))


def loss_fn(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(functional_call(MODEL, params, (x,)), y)


def page() -> dict[str, Any]:
    return run_in_order(str(PAGE), BLOCKS, ".")


def of_page(names: dict[str, Any], **buckets: Any) -> SimpleNamespace:
    step = names["data_parallel"](loss_fn, *([names["in_buckets"](**buckets)] if buckets else []))
    optimizer = names["sgd"](LR, MOMENTUM)

    def trained(params: Any, x: Any, y: Any) -> Any:
        train = names["train_step"](step, optimizer)
        state: Any = params, {}, optimizer.init(params)
        for _ in range(STEPS):
            state, loss = train(state, x, y)
        return state[0], loss

    collectives = {
        name: lambda x, name=name: names["linear"](name, x, names["axis_of"]())
        for name in ("psum", "all_gather", "psum_scatter")
    }
    return SimpleNamespace(step=lambda params, x, y: step(params, {}, x, y), trained=trained, **collectives)


def of_ltx() -> SimpleNamespace:
    step = ltx.data_parallel(loss_fn)
    optimizer = ltx.optim.from_torch(torch.optim.SGD, lr=LR, momentum=MOMENTUM, fused=False)  # fused rounds less often
    train = ltx.train_step(step, optimizer)

    def trained(params: Any, x: Any, y: Any) -> Any:
        found = go_on(train, train.init(params), [(x, y)] * STEPS)
        return dict(found.params), found.metrics[-1].loss

    collectives = {"psum": ltx.psum, "all_gather": ltx.all_gather, "psum_scatter": ltx.psum_scatter}
    return SimpleNamespace(step=step, trained=trained, **collectives)


def computed(by: SimpleNamespace, start: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    given = x[:2]  # as many rows as ranks
    for name in ("psum", "all_gather", "psum_scatter"):

        def f(v: torch.Tensor, name: str = name) -> Any:
            return getattr(by, name)(v.sin()).square().sum()

        found[name] = getattr(by, name)(given), grad(f)(given), jvp(f, (given,), (given.cos(),))
        found[f"{name}, twice"] = grad(lambda v, f=f: grad(f)(v).sum())(given), jvp(grad(f), (given,), (given.cos(),))
        found[f"{name}, vmap"] = vmap(grad(f), in_dims=2)(torch.stack([given, 2 * given], 2))
    found["step"] = grad_and_value(by.step)(start, x, y)
    found["step, jvp"] = jvp(lambda params: by.step(params, x, y), (start,), (start,))
    found["step, curvature"] = jvp(lambda params: grad(by.step)(params, x, y), (start,), (start,))
    found["step, third"] = jvp(
        lambda params: jvp(lambda inner: grad(by.step)(inner, x, y), (params,), (start,))[1], (start,), (start,)
    )
    found["step, twice"] = grad(lambda params: grad(by.step)(params, x, y)["0.weight"].square().sum())(start)
    found["step, models"] = vmap(grad(by.step), in_dims=(0, None, None))(
        {name: torch.stack([value, value + 1]) for name, value in start.items()}, x, y
    )
    found["step, samples"] = vmap(grad(by.step), in_dims=(None, 0, 0))(start, x[:, None], y[:, None])
    found["trained"] = by.trained(start, x, y)
    return found


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """By name, how far the page's numbers are from ltx's; empty if all bits are equal."""
    found = {}
    for name, values in mine.items():
        (a, shape), (b, other) = (torch.utils._pytree.tree_flatten(tree) for tree in (values, theirs[name]))
        assert shape == other, name
        if not all(map(torch.equal, a, b)):
            found[name] = max((p - q).abs().max().item() for p, q in zip(a, b, strict=True))
    return found


@pytest.mark.parametrize("buckets", [{}, {"limit": 200}], ids=["one mark", "buckets"])
@on_ranks(2)
def test_on_two_processes_it_gives_the_bits_of_ltx(buckets: dict[str, Any]) -> None:
    names = page()
    with ltx.init() as world, names["processes"]():
        x, y = X[world.rank], Y[world.rank]
        assert not differences(computed(of_page(names, **buckets), PARAMS, x, y), computed(of_ltx(), PARAMS, x, y))


@on_ranks(2)
def test_on_simulated_ranks_it_gives_the_bits_of_ltx() -> None:
    names = page()
    # Each rank has its own parameters, as ltx's marks make them: with one matrix for all another kernel multiplies.
    params = {name: value.expand(2, *value.shape) for name, value in PARAMS.items()}
    mine = names["simulate"](2, lambda *given: computed(of_page(names, limit=200), *given))(params, X, Y)
    assert not differences(mine, ltx.vmap(lambda *given: computed(of_ltx(), *given))(params, X, Y))


def order_of_events() -> list[str]:
    """What a backward pass does, on each rank: buckets that start, and the layer that is differentiated last."""
    names, events = page(), []
    start, custom, alike = names["Pass"].start, names["Custom"], names["alike"]

    def logged(run: Any, number: int, *tensors: Any) -> Any:
        events.append(f"bucket {number}")
        return start(run, number, *tensors)

    def pull(cotangent: torch.Tensor) -> Any:
        events.append("first layer")
        return (cotangent,)

    def f(params: Any, x: torch.Tensor) -> Any:
        (h,) = custom.apply(alike, alike, pull, x @ params["first"])
        return (h @ params["last"]).sum()

    names["Pass"].start = logged
    step = names["data_parallel"](f, names["in_buckets"](limit=1))
    with names["processes"]():
        grad(step)({"first": torch.ones(2, 2), "last": torch.ones(2, 2)}, {}, torch.ones(2, 2))
    return events


@pytest.mark.skipif(not can_raise_priority(), reason="from torch 2.13 on")
def test_a_bucket_starts_before_the_backward_pass_ends(ranks: Ranks) -> None:
    assert list(ranks(2).run(order_of_events)) == [["bucket 0", "first layer", "bucket 1"]] * 2


def test_it_is_as_short_as_it_says() -> None:
    lines = [[*filter(None, block.code.split("\n"))] for block in BLOCKS]
    assert sum(map(len, lines)) <= 300
    assert max(map(len, lines)) <= 40
    assert not any("import ltx" in block.code or "from ltx" in block.code for block in BLOCKS)


def test_its_table_has_every_file_of_the_core() -> None:
    core = ROOT / "ltx" / "core"
    assert sorted(re.findall(r"`(\w+/\w+\.py)`", PAGE.read_text(encoding="utf-8"))) == sorted(
        path.relative_to(core).as_posix() for path in core.rglob("*.py") if path.name != "__init__.py"
    )
