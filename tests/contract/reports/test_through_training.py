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
from tests.contract.reports.test_differentiating import slope
from tests.kinds import Params
from tests.train_on import go_on, loop_of_torch, refuses
from tests.twins.cases import autograd_grad, backward, func_grad

# torch's own: what its forward mode imports.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

STEPS = 3
SGD = from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)


def loss(params: Any, x: Tensor, decay: Tensor) -> Tensor:
    return (x @ params["w"]).sin().square().mean() + decay * params["w"].square().sum()


def outside(params: Params, ended: Tensor) -> Tensor:
    return (ended - 1).square().sum() + params["w"].pow(3).sum() + 2 * params["decay"]


def drawn(seed: int) -> tuple[Params, Params, Tensor]:
    """Parameters and the decay, a direction, and the batches of two ranks; wherever this is called the same."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    decay = torch.tensor(0.3, dtype=torch.float64)
    return {"w": draw(3), "decay": decay}, {"w": draw(3), "decay": torch.ones_like(decay)}, draw(2, 4, 3)


def by_torch(params: Params, xs: Tensor) -> float:
    w = params["w"].clone().requires_grad_()
    loop_of_torch(torch.optim.SGD([w], lr=0.1, momentum=0.9), loss, [({"w": w}, xs, params["decay"])] * STEPS)
    return outside(params, w).item()


def trained(make: Callable[[], Any], params: Params, x: Tensor) -> Tensor:
    train = make()
    return outside(params, go_on(train, train.init({"w": params["w"]}), [(x, params["decay"])] * STEPS).params["w"])


def made(step: Any = loss, strategy: Any = None, **options: Any) -> Any:
    return ltx.train_step(ltx.data_parallel(step, *([] if strategy is None else [strategy])), SGD, **options)


def along(gradient: Callable[..., Params]) -> Callable[..., Tensor]:
    """The derivative along a direction, by a way to gradients."""

    def way(f: Any, params: Params, direction: Params) -> Tensor:
        grads = gradient(f, params)
        return torch.stack([(grads[name] * x).sum() for name, x in direction.items()]).sum()

    return way


def dual(f: Any, params: Params, direction: Params) -> Tensor:
    with forward_ad.dual_level():
        ended = f({name: forward_ad.make_dual(p, direction[name]) for name, p in params.items()})
        return forward_ad.unpack_dual(ended).tangent.detach()


def computed(f: Any, params: Params) -> Params:
    """Of parameters that aren't leaves, whose step donates."""
    return backward(lambda leaves: f({name: x * 1 for name, x in leaves.items()}), params)


WAYS: dict[str, Callable[..., Tensor]] = {
    "dual numbers": dual,
    "func.jvp": lambda f, params, direction: torch.func.jvp(f, (params,), (direction,))[1],
    "func.grad": along(func_grad),
    "ltx.grad": along(lambda f, params: ltx.grad(f)(params)),
    "autograd": along(autograd_grad),
    "backward": along(computed),
}


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
    params, direction, xs = drawn(seed)
    rank, size = ltx.world().rank, ltx.world().size
    right = slope(lambda params: by_torch(params, xs[:size].flatten(0, 1)), params, direction)
    whole = ltx.data_parallel(lambda params: trained(STEPS_MADE[name], params, xs[rank]))
    got = WAYS[way](whole, params, direction).item()
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
    params, direction, xs = drawn(seed)

    def both(params: Params) -> Tensor:
        return ltx.vmap(lambda x: ltx.pmean(trained(STEPS_MADE[name], params, x)), out_dims=None)(xs)

    def value(params: Params) -> float:
        # What ranks do alone isn't what one process does, but differentiable.
        return both(params).item() if name in ALONE else by_torch(params, xs.flatten(0, 1))

    right = slope(value, params, direction)
    assert WAYS[way](both, params, direction).item() == pytest.approx(right, rel=1e-6, abs=1e-6)


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
    params, direction, xs = drawn(seed)
    make, said = REFUSED[name]
    refuses(UnsupportedError, said, WAYS[way], lambda params: trained(make, params, xs[0]), params, direction)


def test_metrics_buffers_and_aux_are_differentiated(seed: int) -> None:
    params, direction, xs = drawn(seed)

    def step(params: Any, buffers: Any, x: Tensor, decay: Tensor) -> Any:
        return loss(params, x, decay), {"sum": buffers["sum"] + params["w"]}, params["w"].square()

    def ended(params: Params) -> Tensor:
        train, w = made(step, donate=False, has_aux=True), params["w"]
        state, metrics = train(train.init({"w": w}, {"sum": 2 * w}), xs[0], params["decay"])
        return metrics.loss + state.buffers["sum"].sum() + metrics.aux.sum()

    def by_hand(params: Params) -> Tensor:
        return loss(params, xs[0], params["decay"]) + 3 * params["w"].sum() + params["w"].square().sum()

    right = WAYS["func.grad"](by_hand, params, direction)
    for way in WAYS.values():
        torch.testing.assert_close(way(ended, params, direction), right)


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
