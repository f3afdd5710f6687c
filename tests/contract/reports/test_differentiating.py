"""Derivatives of optimizers' updates, whoever asks for them: autograd, torch.func, ltx or a training step around them.

The right values are finite differences of torch's own optimizers, in double precision, on all ranks' data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon

import ltx
from ltx import optim
from ltx.errors import CallFailedError, OptimError
from ltx.optim import from_torch
from tests import train_on
from tests.contract.optim.cases import DENSE_CASES, Case
from tests.contract.optim.test_opaque import Lion
from tests.kinds import Params
from tests.train_on import refuses
from tests.twins import cases
from tests.twins.training import by_train_step

# torch's own: what its forward mode imports, and its vmap of lerp_.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]

CASES = [case for case in DENSE_CASES if case.cls not in (Adafactor, Muon)]
SOME = [case for case in CASES if repr(case) in ("SGD", "Adam", "SGD-momentum=0.9-lr=0.1")]
STEPS, TASKS = 2, 3


def loss(params: Params, x: Tensor) -> Tensor:
    """Its gradients keep away from 0, where Adam's update turns round."""
    return (x @ params["w"] + params["b"]).sin().square().mean() + sum(
        (0.1 * p**3 + 3 * p).sum() for p in params.values()
    )


def adapted(optimizer: Any, params: Params, x: Tensor, donate: bool = False) -> Params:
    """After some steps of training, whose gradients are differentiable."""
    state = optimizer.init(params)
    for _ in range(STEPS):
        params, state = optimizer.apply(torch.func.grad(loss)(params, x), state, params, donate=donate)
    return params


def meta_loss(optimizer: Any, params: Params, xs: Tensor, donate: bool = False) -> Tensor:
    return torch.stack([loss(adapted(optimizer, params, x, donate), x + 1) for x in xs]).mean()


def over_tasks(optimizer: Any, params: Params, xs: Tensor) -> Tensor:
    return torch.vmap(lambda x: loss(adapted(optimizer, params, x), x + 1))(xs).mean()


def torchs(case: Case, params: Params, xs: Tensor, rate: float | None = None) -> float:
    total = 0.0
    for x in xs:
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        optimizer = case.cls(leaves.values(), **case.kwargs | ({} if rate is None else {"lr": rate}))
        train_on.loop_of_torch(optimizer, loss, [(leaves, x)] * STEPS)
        total += loss(leaves, x + 1).item() / len(xs)
    return total


def drawn(seed: int) -> tuple[Params, Params, Tensor]:
    """Parameters, a direction, and the tasks of two ranks; wherever this is called the same."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    params, direction = ({"w": draw(3, 2), "b": draw(2)} for _ in range(2))
    return params, direction, draw(2, TASKS, 4, 3)


def slope(f: Callable[[Params], float], params: Params, direction: Params) -> float:
    def at(step: float) -> float:
        return f({name: p + step * direction[name] for name, p in params.items()})

    return (at(1e-6) - at(-1e-6)) / 2e-6


WAYS: dict[str, Callable[[Any, Params, Tensor], Params]] = {
    **cases.WAYS,
    "func.vjp": lambda f, params, xs: torch.func.vjp(lambda p: f(p, xs), params)[1](torch.ones((), dtype=xs.dtype))[0],
    "ltx.grad": lambda f, params, xs: ltx.grad(f)(params, xs),
    "train_step": by_train_step,
}


def along(way: str, f: Any, params: Params, direction: Params, xs: Tensor) -> float:
    grads = WAYS[way](ltx.data_parallel(f), params, xs)
    return sum((grads[name] * direction[name]).sum().item() for name in params)


def wrong(case: Case, way: str, loop: str, seed: int) -> str:
    """What is wrong with the derivative of a loop on this rank's part of the data."""
    params, direction, xs = drawn(seed)
    rank, size = ltx.world().rank, ltx.world().size
    expected = slope(lambda p: torchs(case, p, xs[:size].flatten(0, 1)), params, direction)
    got = along(way, partial(LOOPS[loop], from_torch(case.cls, **case.kwargs)), params, direction, xs[rank])
    return "" if abs(got - expected) <= 1e-6 * (1 + abs(expected)) else f"{got} for {expected}"


LOOPS = {"loop": meta_loss, "donated": partial(meta_loss, donate=True), "vmap": over_tasks}


@pytest.mark.covering(1)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_optimizer_by_every_way(case: Case, way: str, loop: str, seed: int) -> None:
    assert wrong(case, way, loop, seed) == ""


def all_wrong(way: str, seed: int) -> list[tuple[str, str, str]]:
    rows = [(repr(case), loop, wrong(case, way, loop, seed)) for case in SOME for loop in LOOPS]
    return [row for row in rows if row[-1]]


@pytest.mark.full(but=3)
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", WAYS)
def test_on_real_ranks(way: str, size: int, seed: int, ranks: Any) -> None:
    assert list(ranks(size).run(all_wrong, way, seed)) == [[]] * size


@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_nobody_sees_is_refused(way: str, seed: int) -> None:
    params, _, xs = drawn(seed)
    text = r"from_torch\(Lion\) runs the class' own step\(\).* torch\.no_grad\(\)"
    for optimizer in (from_torch(Lion), optim.partition({"own": from_torch(Lion)}, {"*": "own"})):
        refuses(OptimError, text, WAYS[way], ltx.data_parallel(partial(meta_loss, optimizer)), params, xs[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [Adafactor, Muon])
def test_classes_that_torch_cannot_differentiate_are_refused(cls: Any, way: str) -> None:
    params, x = {"w": torch.ones(2, 2)}, torch.ones(1, 3, 2)
    step = ltx.data_parallel(lambda p, xs: square(adapted_by(from_torch(cls), p, xs[0])))
    refuses(OptimError, f"{cls.__name__}'s update can't be differentiated", WAYS[way], step, params, x)


def square(params: Params) -> Tensor:
    return torch.stack([p.square().sum() for p in params.values()]).sum()


def adapted_by(optimizer: Any, params: Params, x: Tensor) -> Params:
    """After two steps along the gradients of (x p)²."""
    state = optimizer.init(params)
    for _ in range(2):
        grads = torch.func.grad(lambda p: square({name: x.sum(0) * own for name, own in p.items()}))(params)
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates, donate=True)
    return params


MADE_OF_OTHERS: dict[str, Callable[[], Any]] = {
    "chain": lambda: optim.chain(optim.clip_by_global_norm(0.5), from_torch(Adam, lr=0.1)),
    "clipped by value": lambda: optim.chain(optim.clip_by_value(0.5), from_torch(SGD, lr=0.1)),
    "partition": lambda: optim.partition(
        {"w": from_torch(AdamW, lr=0.1), "b": optim.chain(optim.clip_by_global_norm(0.5), from_torch(SGD, lr=0.1))},
        {"w": "w", "*": "b"},
    ),
    "scheduled": lambda: from_torch(SGD, lr=optim.warmup_cosine(0.1, 1, 3)),
    "functions": lambda: optim.from_functions(
        lambda params: (), lambda grads, state, params: ({name: -0.1 * g for name, g in grads.items()}, state)
    ),
    "qadam": lambda: optim.qadam(0.1, warmup_steps=1),
}


def trained_alone(optimizer: Any, params: Params, xs: Tensor) -> Tensor:
    state = optimizer.init(params)
    for x in xs:
        params, state = optimizer.apply(torch.func.grad(loss)(params, x), state, params, donate=True)
    return loss(params, xs[0] + 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made", MADE_OF_OTHERS)
def test_optimizers_made_of_others(made: str, way: str, seed: int) -> None:
    optimizer, (params, direction, xs) = MADE_OF_OTHERS[made](), drawn(seed)

    def value(params: Params) -> float:
        with torch.no_grad():
            return trained_alone(optimizer, {name: p.clone() for name, p in params.items()}, xs[0]).item()

    got = along(way, partial(trained_alone, optimizer), params, direction, xs[0])
    assert got == pytest.approx(slope(value, params, direction), rel=1e-5, abs=1e-6)


PROPORTIONAL = [case for case in DENSE_CASES if case.cls.__name__ not in ("ASGD", "Rprop", "Adafactor", "Muon")]


@pytest.mark.parametrize("case", PROPORTIONAL, ids=repr)
def test_the_learning_rate_is_differentiated(case: Case, seed: int) -> None:
    params, _, xs = drawn(seed)
    at = 0.05
    kwargs = {name: x for name, x in case.kwargs.items() if name != "lr"}

    def meta(rate: Tensor) -> Tensor:
        return meta_loss(from_torch(case.cls, lr=lambda count: rate, **kwargs), params, xs[0])

    def value(rate: float) -> float:
        return torchs(Case(case.cls, kwargs), params, xs[0], rate)

    rate = torch.tensor(at, dtype=torch.float64)
    expected = (value(at + 1e-6) - value(at - 1e-6)) / 2e-6
    found = [
        torch.autograd.grad(meta(learned := rate.clone().requires_grad_()), learned)[0],
        torch.func.grad(meta)(rate),
        torch.func.jvp(meta, (rate,), (torch.ones_like(rate),))[1],
        ltx.grad(ltx.data_parallel(meta))(rate),
    ]
    if case.cls is not Adagrad:  # which reads a number off its state
        found.append(torch.vmap(torch.func.grad(meta))(rate.expand(2))[1])
    assert [x.item() for x in found] == pytest.approx([expected] * len(found), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["ASGD", "Rprop", "Adafactor"])
def test_a_rate_without_a_derivative_is_refused(name: str) -> None:
    rate, params = torch.tensor(0.1, requires_grad=True), {"w": torch.ones(2, 2)}
    optimizer = from_torch(getattr(torch.optim, name), lr=lambda count: rate)
    with pytest.raises(OptimError, match=f"an update of {name} isn't proportional to its rate. Detach it"):
        optimizer.apply(params, optimizer.init(params), params)


def by_training(overlap: Any, donate: bool) -> float:
    """The derivative by the learning rate of w after two steps along the gradient 1 + rank."""
    rate = torch.tensor(0.5, requires_grad=True)
    step = ltx.data_parallel(lambda p, x: (p["w"] * x).sum())
    sgd, batches = from_torch(SGD, lr=lambda count: rate), [torch.tensor(1.0 + ltx.world().rank)] * 2
    after = train_on.trained(step, sgd, {"w": torch.ones(())}, batches, overlap=overlap, donate=donate)
    return torch.autograd.grad(after.params["w"], rate)[0].item()


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.full)])
def test_the_learning_rate_of_a_train_step(size: int, donate: bool, ranks: Any) -> None:
    assert list(ranks(size).run(by_training, "backward", donate)) == [-2 * (1 + (size - 1) / 2)] * size
    if size == 2:
        text = "the learning rate of step 0 requires grad, and this update is in place"
        refuses(CallFailedError, text, ranks(size).run, by_training, "update", donate)


def test_first_order_and_forward_mode(seed: int) -> None:
    """Gradients without a derivative leave that of the parameters; tangents outside of torch.func are seen too."""
    params, direction, xs = drawn(seed)
    sgd = from_torch(SGD, lr=0.1)

    def first_order(params: Params, x: Tensor, donate: bool = False) -> Tensor:
        grads = {name: g.detach() for name, g in torch.func.grad(loss)(params, x).items()}
        return square(sgd.apply(grads, sgd.init(params), params, donate=donate)[0])

    after = {name: p - 0.1 * torch.func.grad(loss)(params, xs[0, 0])[name] for name, p in params.items()}
    expected = sum((2 * after[name] * direction[name]).sum().item() for name in params)
    for way in WAYS:
        for donate in (False, True):
            got = along(way, partial(first_order, donate=donate), params, direction, xs[0, 0])
            assert got == pytest.approx(expected)
    with torch.autograd.forward_ad.dual_level():
        dual = {name: torch.autograd.forward_ad.make_dual(p, direction[name]) for name, p in params.items()}
        adam = from_torch(Adam)
        moved = torch.autograd.forward_ad.unpack_dual(square(adam.apply(dual, adam.init(dual), dual)[0])).tangent

    def value(params: Params) -> float:
        return square(adam.apply(params, adam.init(params), params)[0]).item()

    assert moved.item() == pytest.approx(slope(value, params, direction), rel=1e-5)
