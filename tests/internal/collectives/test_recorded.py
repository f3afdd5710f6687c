"""ltx's Function at a level of torch.func.grad: what torch's own rule gives, for each kind of Function and nesting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, vjp

from ltx.core.base import private
from ltx.core.collectives.linear import Function


class Cubes(torch.autograd.Function):
    """Has a static argument, a saved tensor, and a vmap rule that torch makes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
        return factor * x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * x**2 * cotangent, None


class Several(torch.autograd.Function):
    """Gives an input back, an output without a gradient, and one that depends on two inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(given: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        return given, (x > y).float(), x * y.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, _: Any, last: torch.Tensor) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        return first, last * y.sin(), last * x * y.cos()


def ours(of: Any) -> Any:
    return type(of.__name__, (Function,), {name: vars(of)[name] for name in vars(of) if not name.startswith("__")})


def through(cubes: Any, several: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of a vector to a number, which reaches all rules of both Functions."""

    def f(x: torch.Tensor) -> torch.Tensor:
        same, above, product = several.apply(x.tan(), x.cos(), x.detach() + 0.5)
        _, _, again = several.apply(x * 1, x, x * 2)
        return (cubes.apply(x, 0.5) * same + above * product + again**2).sum()

    return f


def around(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    outside = x.clone().requires_grad_()
    return torch.autograd.grad(grad(lambda a: f(a * outside))(x).sum(), outside)[0]


WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, x: grad(f)(x),
    "grad of grad": lambda f, x: grad(lambda a: grad(lambda b: f(a * b))(x).sum())(x),
    "jacrev of grad": lambda f, x: jacrev(grad(f))(x),
    "plain autograd around grad": around,
    "vmap of grad": lambda f, x: torch.vmap(grad(f))(torch.stack([x, 2 * x])),
    "grad of vmap": lambda f, x: grad(lambda a: torch.vmap(f)(torch.stack([a, 2 * a])).sum())(x),
    "vjp, run twice": lambda f, x: [vjp(f, x)[1](torch.tensor(c)) for c in (1.0, -2.0)],
    "jacrev": lambda f, x: jacrev(lambda a: f(a) * a)(x),
    "no_grad inside": lambda f, x: grad(lambda a: f(a) + torch.no_grad()(f)(a))(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_as_torchs_own(way: str) -> None:
    x = torch.randn(4)
    expected, found = (WAYS[way](f, x) for f in (through(Cubes, Several), through(ours(Cubes), ours(Several))))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_value_of_a_level_that_has_ended_is_a_constant() -> None:
    kept: list[torch.Tensor] = []
    grad(lambda a: (kept.append(a), a.sum())[1])(torch.ones(3))
    assert private.is_wrapped(kept[0])
    torch.testing.assert_close(
        grad(lambda a: ours(Several).apply(a * 1, a, kept[0])[2].sum())(torch.ones(3)), torch.ones(3).sin()
    )


def test_torchs_way_is_taken_where_a_mode_looks_at_functions() -> None:
    seen: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def f(x: torch.Tensor) -> torch.Tensor:
        with Mode():
            result: torch.Tensor = ours(Cubes).apply(x, 1.0)
        return result.sum()

    torch.testing.assert_close(grad(f)(torch.ones(2)), torch.full((2,), 3.0))
    assert any("custom_function_call" in str(func) for func in seen)
