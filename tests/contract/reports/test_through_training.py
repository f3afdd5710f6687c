"""Derivatives through train.init and train steps: by parameters, batches and hyperparameters.

The right values are finite differences of the same training by torch, in double precision, on all ranks' data. Part of
what is differentiated lies outside of the training, so that a derivative that is lost in it isn't None but wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import ltx
from ltx.errors import CallFailedError, UnsupportedError
from ltx.optim import from_torch
from tests.train_on import go_on, loop_of_torch

# torch's own: what its forward mode imports.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

STEPS = 3
SGD = from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)


def loss(params: Any, x: Tensor, decay: Tensor) -> Tensor:
    return (x @ params["w"]).sin().square().mean() + decay * params["w"].square().sum()


def outside(params: Any, decay: Tensor, ended: Tensor) -> Tensor:
    return (ended - 1).square().sum() + params["w"].pow(3).sum() + 2 * decay


def drawn(seed: int) -> tuple[Any, Tensor, Tensor, Any]:
    """Parameters, the decay, the batches of two ranks, a direction; wherever this is called the same."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"w": draw(3)}, torch.tensor(0.3, dtype=torch.float64), draw(2, 4, 3), (draw(3), 1.0)


def by_torch(params: Any, decay: Tensor, xs: Tensor) -> float:
    w = params["w"].clone().requires_grad_()
    loop_of_torch(torch.optim.SGD([w], lr=0.1, momentum=0.9), loss, [({"w": w}, xs, decay)] * STEPS)
    return outside(params, decay, w).item()


def trained(make: Callable[[], Any], params: Any, decay: Tensor, x: Tensor) -> Tensor:
    train = make()
    return outside(params, decay, go_on(train, train.init(params), [(x, decay)] * STEPS).params["w"])


def made(step: Any = loss, strategy: Any = None, **options: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(step, *([] if strategy is None else [strategy])), SGD, **options)


def plain(f: Any, params: Any, decay: Tensor) -> tuple[Any, Tensor]:
    w, by = params["w"].clone().requires_grad_(), decay.clone().requires_grad_()
    grads = torch.autograd.grad(f({"w": w}, by), (w, by))
    return {"w": grads[0]}, grads[1]


def computed(f: Any, params: Any, decay: Tensor) -> tuple[Any, Tensor]:
    """Parameters that aren't leaves, whose step donates."""
    w, by = params["w"].clone().requires_grad_(), decay.clone().requires_grad_()
    f({"w": w * 1}, by * 1).backward()
    return {"w": w.grad}, by.grad


def forward(f: Any, params: Any, decay: Tensor) -> tuple[Any, Tensor]:
    """Coordinate by coordinate, the last of them the decay."""
    found = [
        torch.func.jvp(lambda w, by: f({"w": w}, by), (params["w"], decay), (at[:-1], at[-1]))[1]
        for at in torch.eye(4, dtype=decay.dtype)
    ]
    return {"w": torch.stack(found[:-1])}, found[-1]


def dual(f: Any, params: Any, decay: Tensor) -> tuple[Any, Tensor]:
    """The same by plain forward mode."""
    found = []
    with forward_ad.dual_level():
        for at in torch.eye(4, dtype=decay.dtype):
            ended = f({"w": forward_ad.make_dual(params["w"], at[:-1])}, forward_ad.make_dual(decay, at[-1]))
            found.append(forward_ad.unpack_dual(ended).tangent.detach())
    return {"w": torch.stack(found[:-1])}, found[-1]


WAYS: dict[str, Any] = {
    "dual numbers": dual,
    "func.jvp": forward,
    "func.grad": lambda f, *at: torch.func.grad(f, argnums=(0, 1))(*at),
    "ltx.grad": lambda f, *at: ltx.grad(f, argnums=(0, 1))(*at),
    "autograd": plain,
    "backward": computed,
}


def along(way: str, f: Any, params: Any, decay: Tensor, direction: Any) -> float:
    grads, by_decay = WAYS[way](f, params, decay)
    return (grads["w"] * direction[0]).sum().item() + by_decay.item() * direction[1]


def expected(params: Any, decay: Tensor, direction: Any, xs: Tensor) -> float:
    def at(step: float) -> float:
        return by_torch({"w": params["w"] + step * direction[0]}, decay + step * direction[1], xs)

    return (at(1e-6) - at(-1e-6)) / 2e-6


STEPS_MADE: dict[str, Callable[[], Any]] = {
    "donated": made,
    "kept": partial(made, donate=False),
    "guarded": partial(made, donate=False, guard="skip"),
    "by bucket": partial(made, donate=False, overlap="update"),
    "checked": partial(made, donate=False, check_every=1),
    "accumulated": lambda: ltx.train_step(ltx.accumulate(ltx.data_parallel(loss), 2), SGD, donate=False),
    "Horovod": lambda: made(strategy=ltx.HorovodStrategy(), donate=False),
    "LocalSGD": lambda: made(strategy=ltx.LocalSGDStrategy(2), donate=False),
    "ZeRO": lambda: made(strategy=ltx.ZeroStrategy(), donate=False),
}
#: These communicate after the optimizer, which has no derivative on real ranks.
ALONE = ("LocalSGD", "ZeRO")


def wrong(name: str, way: str, seed: int) -> str:
    params, decay, xs, direction = drawn(seed)
    rank, size = ltx.world().rank, ltx.world().size
    right = expected(params, decay, direction, xs[:size].flatten(0, 1))
    whole = ltx.data_parallel(lambda both: trained(STEPS_MADE[name], both[0], both[1], xs[rank]))
    got = along(way, lambda params, decay: whole((params, decay)), params, decay, direction)
    return "" if abs(got - right) <= 1e-6 * (1 + abs(right)) else f"{name} by {way}: {got} for {right}"


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STEPS_MADE)
def test_every_step_by_every_way_alone(name: str, way: str, seed: int) -> None:
    if (name, way) != ("donated", "autograd"):
        assert wrong(name, way, seed) == ""


def all_wrong(way: str, seed: int) -> list[str]:
    left_out = {*ALONE, "donated" if way == "autograd" else "", "checked" if way == "func.jvp" else ""}
    names = [name for name in STEPS_MADE if name not in left_out]
    return [said for name in names if (said := wrong(name, way, seed))]


@pytest.mark.full(but=3)
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", WAYS)
def test_on_real_ranks(way: str, size: int, seed: int, ranks: Any) -> None:
    assert list(ranks(size).run(all_wrong, way, seed)) == [[]] * size


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in STEPS_MADE if name != "checked"])
def test_on_simulated_ranks(name: str, way: str, seed: int) -> None:
    params, decay, xs, direction = drawn(seed)
    right = expected(params, decay, direction, xs.flatten(0, 1))

    def both(params: Any, decay: Tensor) -> Tensor:
        return ltx.vmap(lambda x: ltx.pmean(trained(STEPS_MADE[name], params, decay, x)), out_dims=None)(xs)

    if name in ALONE:  # not what one process does, but differentiable

        def value(step: float) -> float:
            return both({"w": params["w"] + step * direction[0]}, decay + step * direction[1]).item()

        right = (value(1e-6) - value(-1e-6)) / 2e-6
    assert along(way, both, params, decay, direction) == pytest.approx(right, rel=1e-6, abs=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALONE)
def test_what_has_no_derivative_on_real_ranks_is_refused(name: str, way: str, seed: int, ranks: Any) -> None:
    with pytest.raises(CallFailedError, match=r"has no derivative on real ranks.*ltx\.DDPStrategy.*no_grad"):
        ranks(2).run(wrong, name, way, seed)


def given(params: Any, x: Tensor, decay: Tensor) -> Any:
    return torch.func.grad_and_value(loss)(params, x, decay)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "DiLoCo": (lambda: made(strategy=ltx.DiLoCoStrategy(2), donate=False), "DiLoCoStrategy keeps from step to step"),
    "gradients": (
        lambda: ltx.train_step(ltx.data_parallel(given, returns="grads"), SGD, donate=False),
        'a step with returns="grads" gives gradients whose own derivative is unknown',
    ),
    "gradients of parts": (
        lambda: ltx.train_step(ltx.accumulate(ltx.data_parallel(given, returns="grads"), 2), SGD, donate=False),
        'a step with returns="grads" gives gradients whose own derivative is unknown',
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_pass_whole_is_refused(name: str, way: str, seed: int) -> None:
    params, decay, xs, direction = drawn(seed)
    make, said = REFUSED[name]
    with pytest.raises(UnsupportedError, match=said):
        along(way, lambda params, decay: trained(make, params, decay, xs[0]), params, decay, direction)


def test_metrics_buffers_and_aux_are_differentiated(seed: int) -> None:
    params, decay, xs, _ = drawn(seed)

    def step(params: Any, buffers: Any, x: Tensor, decay: Tensor) -> Any:
        return loss(params, x, decay), {"sum": buffers["sum"] + params["w"]}, params["w"].square()

    def ended(params: Any, decay: Tensor) -> Tensor:
        train = made(step, donate=False, has_aux=True)
        state, metrics = train(train.init(params, {"sum": 2 * params["w"]}), xs[0], decay)
        return metrics.loss + state.buffers["sum"].sum() + metrics.aux.sum()

    w, by = params["w"].clone().requires_grad_(), decay.clone().requires_grad_()
    right = torch.autograd.grad(loss({"w": w}, xs[0], by) + 3 * w.sum() + w.square().sum(), (w, by))
    for way in WAYS.values():
        grads, by_decay = way(ended, params, decay)
        torch.testing.assert_close((grads["w"], by_decay), right)


def test_a_module_is_trained_without_a_graph(seed: int) -> None:
    """Its parameters say that they are trained, and what a step with donate=True is given isn't differentiated."""
    model, x = torch.nn.Linear(2, 1), torch.randn(4, 2)
    step = ltx.data_parallel(lambda params, x: ltx.functional_call(model, params, (x,)).square().mean())
    for donate, given in ((True, x.clone().requires_grad_()), (False, x)):
        train = ltx.train_step(step, SGD, donate=donate)
        state, metrics = train(train.init(dict(model.named_parameters())), given)
        assert not any(p.requires_grad for p in [*state.params.values(), metrics.loss])


@pytest.mark.parametrize("donate", [True, False])
def test_a_batch_that_the_loss_itself_differentiates(donate: bool, seed: int) -> None:
    """Physics-informed: the derivative of the model by its inputs is in the loss."""
    x, w = torch.randn(5, dtype=torch.float64), torch.randn((), dtype=torch.float64)

    def residual(params: Any, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((params["w"] * x).sin().sum(), x, create_graph=True)
        return (slope - 1).square().mean()

    train = ltx.train_step(ltx.data_parallel(residual), from_torch(torch.optim.SGD, lr=1.0), donate=donate)
    state, _ = train(train.init({"w": w}), x.clone().requires_grad_())
    leaf = w.clone().requires_grad_()
    (leaf * (leaf * x).cos() - 1).square().mean().backward()
    torch.testing.assert_close(w - state.params["w"].detach(), leaf.grad)
