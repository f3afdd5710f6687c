"""A step inside of a step that closes over what the outer one is differentiated with regard to.

The inner step's gradients depend on it. Run below a transform, or by plain autograd, they would be constants: the outer
gradient would lack that part without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ltx
from tests.kinds import Params, Ranks
from tests.train_on import go_on, on_ranks
from tests.twins.cases import backward, func_grad
from tests.twins.training import by_train_step as moves

RATE, STEPS = 0.1, 2
Step = Callable[..., Tensor]


def by_grad(grad: Callable[[Step], Step]) -> Callable[..., Tensor]:
    def train(fit: Step, w: Tensor, *batch: Tensor) -> Tensor:
        for _ in range(STEPS):
            w = w - RATE * grad(fit)(w, *batch)
        return w

    return train


def by_train_step(donate: bool) -> Callable[..., Tensor]:
    def train(fit: Any, w: Tensor, *batch: Tensor) -> Tensor:
        train = ltx.train_step(fit, ltx.optim.from_torch(torch.optim.SGD, lr=RATE), donate=donate)
        return go_on(train, train.init(w), [batch] * STEPS).params

    return train


INNER = {
    "torch.func.grad": by_grad(torch.func.grad),
    "ltx.grad": by_grad(ltx.grad),
    "grad_and_value": by_grad(lambda fit: lambda *args: ltx.grad_and_value(fit)(*args)[0]),
    "accumulate": by_grad(lambda fit: ltx.grad(ltx.accumulate(fit, 1))),
    "train_step": by_train_step(True),
    "train_step, donate=False": by_train_step(False),
}


def features(net: nn.Module, params: Params, x: Tensor) -> Tensor:
    return ltx.functional_call(net, {"weight": params["weight"]}, (x,))


def outer(captured: str, train: Callable[..., Tensor], around: Callable[[Step], Any], net: nn.Module) -> Step:
    """The loss after a few steps of a regularised fit; `captured`: by which way the fit comes to outer parameters."""

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        decay, made = params["decay"], params["decay"].exp()
        features_of_all = features(net, params, x)
        fits = {
            "a parameter": lambda w, x, y: ((x @ w - y) ** 2).mean() + decay * (w * w).sum(),
            "a value": lambda w, x, y: ((x @ w - y) ** 2).mean() + made * (w * w).sum(),
            "features of the batch": lambda w, x, y: ((features_of_all @ w - y) ** 2).mean(),
            "a module": lambda w, x, y: ((net(x) @ w - y) ** 2).mean(),
        }
        with ltx.using(net, {"weight": params["weight"]}):
            w = train(around(fits[captured]), torch.zeros(4, dtype=x.dtype), x, y)
        return ((features(net, params, x) @ w - y) ** 2).mean() + decay * decay

    return loss


OUTER = {
    "backward()": backward,
    "torch.func.grad": func_grad,
    "ltx.grad": lambda step, *args: ltx.grad(step)(*args),
    "train_step": moves,
}


def problem(seed: int, ranks: int) -> tuple[Params, Tensor, Tensor]:
    torch.manual_seed(seed)
    params = {"decay": torch.rand(()).double(), "weight": torch.randn(4, 4).double()}
    return params, torch.randn(ranks, 3, 4).double(), torch.randn(ranks, 3).double()


def gradients(captured: str, inner: str, seed: int, simulated: bool = False) -> dict[str, Params]:
    """The gradients by each outer way, on this rank of two; simulated: by ``ltx.vmap``, of all ranks."""
    params, x, y = problem(seed, 2 if simulated else ltx.world().size)
    step = ltx.data_parallel(
        outer(captured, INNER[inner], ltx.data_parallel, nn.Linear(4, 4, bias=False, dtype=torch.float64))
    )
    if simulated:
        return {
            name: ltx.vmap(lambda *batch, name=name: OUTER[name](step, params, *batch))(x, y)
            for name in ("torch.func.grad", "ltx.grad")
        }
    rank = ltx.world().rank
    return {name: way(step, params, x[rank], y[rank]) for name, way in OUTER.items()}


def expected(captured: str, seed: int, ranks: int) -> Params:
    """By one process on the whole batch, without ltx's steps."""
    params, x, y = problem(seed, ranks)
    alone = outer(captured, by_grad(torch.func.grad), lambda fit: fit, nn.Linear(4, 4, bias=False, dtype=torch.float64))
    return backward(alone, params, x.flatten(0, 1), y.flatten())


CAPTURED = ("a parameter", "a value", "features of the batch", "a module")


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("captured", CAPTURED)
@pytest.mark.parametrize("size", [1, 2])
def test_on_processes(size: int, captured: str, inner: str, ranks: Ranks, seed: int) -> None:
    wanted = expected(captured, seed, size)
    for found in ranks(size).run(gradients, captured, inner, seed):
        for name, grads in found.items():
            torch.testing.assert_close(grads, wanted, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("inner", [name for name in INNER if name != "accumulate"])
@pytest.mark.parametrize("captured", CAPTURED)
def test_simulated(captured: str, inner: str, seed: int) -> None:
    wanted = {name: torch.stack([x, x]) for name, x in expected(captured, seed, 2).items()}
    for name, grads in gradients(captured, inner, seed, simulated=True).items():
        torch.testing.assert_close(grads, wanted, msg=lambda text, name=name: f"{name}: {text}")


class Implicit(torch.autograd.Function):
    """As implicit differentiation does it: its backward pass averages a cotangent and differentiates another step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, curved: Callable[[], Tensor]) -> Tensor:
        ctx.curved = curved
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return ltx.pmean(ltx.pmean(cotangent) * ctx.curved()), None


def with_leaf(step: Any, w: Tensor, x: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    with torch.enable_grad():  # it is off in a backward pass
        step(leaf, x).backward()
    assert leaf.grad is not None
    return leaf.grad


CURVED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "jvp of grad": lambda fit, w, x: torch.func.jvp(lambda w: torch.func.grad(fit)(w, x), (w,), (w,))[1],
    "torch.func.grad": lambda fit, w, x: torch.func.grad(fit)(w, x),
    "ltx.grad": lambda fit, w, x: ltx.grad(fit)(w, x),
    "backward()": with_leaf,
}


@pytest.mark.parametrize("way", OUTER)
@pytest.mark.parametrize("curved", CURVED)
@on_ranks(2)
def test_a_step_in_a_backward_pass(curved: str, way: str) -> None:
    """By loss.backward() the outer pass, which goes on, was taken for one that had been left, which ended the world."""
    x, w = torch.tensor([1.0, 2.0]) + ltx.axis_index(), torch.tensor(0.5)
    fit = ltx.data_parallel(lambda w, x: ((w - x) ** 2).mean())
    outer = ltx.data_parallel(lambda p, x: (Implicit.apply(p["w"], lambda: CURVED[curved](fit, w, x)) * x).mean())

    got, factor = OUTER[way](outer, {"w": w}, x)["w"], CURVED[curved](fit, w, x)
    torch.testing.assert_close(got, 2 * factor)


@on_ranks(2)
def test_a_value_in_an_attribute_that_is_differentiated_later() -> None:
    """The step has run before, with a constant there."""

    class Model:
        def __init__(self) -> None:
            self.step, self.a = ltx.data_parallel(self.loss), torch.tensor(2.0)

        def loss(self, w: Tensor, x: Tensor) -> Tensor:
            return (self.a * (w - x) ** 2).mean()

        def joint(self, w: Tensor, a: Tensor, x: Tensor) -> Any:
            self.a = a
            return self.step(w, x)

    model, w, x = Model(), torch.tensor(0.5), torch.tensor([1.0, 2.0])
    torch.func.grad(model.step)(w, x)
    by_w_and_a = torch.func.grad(model.joint, argnums=(0, 1))(w, torch.tensor(2.0), x)
    torch.testing.assert_close(by_w_and_a, (torch.tensor(-4.0), torch.tensor(1.25)))


@pytest.mark.parametrize("grad", [torch.func.grad, ltx.grad])
@on_ranks(2)
def test_after_a_collective_of_the_inner_step(grad: Any) -> None:
    """It has sent something when it comes to what it closes over; ranks together begin it anew."""
    x = torch.randn(4, generator=torch.Generator().manual_seed(int(ltx.axis_index())))

    def loss(w: Tensor, x: Tensor, a: Tensor) -> Tensor:
        return (a * (w - ltx.pmean(x.mean()) - x) ** 2).mean()

    def closing(h: Tensor, x: Tensor) -> Tensor:
        made = h.exp()
        inner = ltx.data_parallel(lambda w, x: loss(w, x, made))
        return (grad(inner)(torch.tensor(0.5), x) * x).sum()

    def given(h: Tensor, x: Tensor) -> Tensor:
        return (grad(ltx.data_parallel(loss))(torch.tensor(0.5), x, h.exp()) * x).sum()

    h = torch.tensor(0.3)

    by_closure, by_argument = ltx.grad(ltx.data_parallel(closing))(h, x), ltx.grad(ltx.data_parallel(given))(h, x)
    assert by_closure != 0
    torch.testing.assert_close(by_closure, by_argument)


@pytest.mark.parametrize("grad", [torch.func.grad, ltx.grad])
@on_ranks(2)
def test_an_inner_step_that_is_kept(grad: Any) -> None:
    """It reads an attribute that each outer step sets anew, where the last one's lies until then."""

    class Holder:
        a = torch.ones(3)

    held, x = Holder(), torch.tensor([1.0, 2.0, 3.0]) + ltx.axis_index()
    inner = ltx.data_parallel(lambda w, x: (held.a * (w - x) ** 2).mean())

    def outer(h: Tensor, x: Tensor) -> Tensor:
        held.a = h.exp()
        return (grad(inner)(torch.zeros(3), x) * x).sum()

    step = ltx.data_parallel(outer)
    grad(inner)(torch.zeros(3), x)
    (found,) = {float(ltx.grad(step)(torch.zeros(3), x).sum()) for _ in range(25)}
    assert found != 0
