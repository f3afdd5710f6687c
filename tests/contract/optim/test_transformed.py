"""Updates under torch.func's transforms."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from ltx.optim import from_torch
from tests.contract.optim.cases import DENSE_CASES, Case, clone, random_grads, random_params, same_bits

# torch's own: what its forward mode imports, and its vmap of lerp_.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


def stack(*trees: Any) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def example(tree: Any, index: int) -> Any:
    return optree.tree_map(lambda leaf: leaf[index], tree)


@pytest.mark.parametrize("case", DENSE_CASES, ids=repr)
def test_vmap_is_separate_runs_to_the_bit(case: Case, seed: int) -> None:
    optimizer = from_torch(case.cls, **case.kwargs)
    params = [random_params(case) for _ in range(3)]
    states = [optimizer.init(own) for own in params]
    batched = (stack(*params), stack(*states))
    for _ in range(3):
        grads = [random_grads(case, own) for own in params]
        before = clone(batched)
        result = torch.vmap(lambda g, s, p: optimizer.apply(g, s, p, donate=True))(stack(*grads), *batched[::-1])
        assert same_bits(batched, before)  # donation is off under transforms
        batched = result
        runs = [optimizer.apply(g, s, p) for g, s, p in zip(grads, states, params, strict=True)]
        params, states = [run[0] for run in runs], [run[1] for run in runs]
        for i in range(3):
            assert same_bits(example(batched[0], i), params[i])
            assert same_bits(example(batched[1], i), states[i])


def test_init_under_vmap(seed: int) -> None:
    optimizer = from_torch(Adam)
    params = {"w": torch.randn(3, 4)}

    def two_steps(params: Any) -> Any:
        state = optimizer.init(params)
        for _ in range(2):
            params, state = optimizer.apply(optree.tree_map(torch.sin, params), state, params)
        return params, state

    batched = torch.vmap(two_steps)(params)
    for i in range(3):
        assert same_bits(example(batched, i), two_steps(example(params, i)))


def test_vmap_over_a_part_of_the_arguments(seed: int) -> None:
    optimizer = from_torch(SGD, lr=0.5, momentum=0.9)
    params, grads = {"w": torch.randn(4)}, {"w": torch.randn(3, 4)}
    state = optimizer.init(params)
    batched, _ = torch.vmap(lambda g: optimizer.apply(g, state, params))(grads)
    for i in range(3):
        assert same_bits(batched["w"][i], optimizer.apply(example(grads, i), state, params)[0]["w"])


def test_vmap_of_vmap(seed: int) -> None:
    optimizer = from_torch(AdamW, lr=0.1)
    params, grads = {"w": torch.randn(2, 3, 4)}, {"w": torch.randn(3, 2, 4)}
    state = optimizer.init({"w": torch.zeros(4)})
    inner = torch.vmap(lambda g, p: optimizer.apply(g, state, p)[0])
    batched = torch.vmap(inner, in_dims=({"w": 1}, {"w": 0}))(grads, params)
    for i in range(2):
        for j in range(3):
            alone, _ = optimizer.apply({"w": grads["w"][j, i]}, state, {"w": params["w"][i, j]})
            assert same_bits(batched["w"][i, j], alone["w"])


def test_constants_inside_a_transform(seed: int) -> None:
    """An update that no transform differentiates or batches, though one is running."""
    optimizer = from_torch(AdamW)
    params = {"w": torch.randn(4, requires_grad=True)}
    state = optimizer.init(params)
    expected, _ = optimizer.apply(params, state, params)
    seen = {}

    def constant(x: Tensor) -> Tensor:
        seen["params"], _ = optimizer.apply({"w": torch.zeros(4) + params["w"].detach()}, state, params)
        return x * seen["params"]["w"].sum()

    torch.testing.assert_close(torch.func.grad(constant)(torch.tensor(1.0)), expected["w"].sum())
    torch.testing.assert_close(torch.vmap(constant)(torch.ones(2)), expected["w"].sum().expand(2))


def test_batched_constants_inside_grad(seed: int) -> None:
    """The batch isn't the innermost transform: the gradient is taken of something else."""
    optimizer = from_torch(AdamW)
    params, grads = {"w": torch.randn(3, 4)}, {"w": torch.randn(3, 4)}
    state = optimizer.init(example(params, 0))

    def slope(grads: Any, params: Any) -> Tensor:
        return torch.func.grad(lambda x: x * optimizer.apply(grads, state, params)[0]["w"].sum())(torch.tensor(1.0))

    slopes = torch.vmap(slope)(grads, params)
    for i in range(3):
        expected, _ = optimizer.apply(example(grads, i), state, example(params, i))
        torch.testing.assert_close(slopes[i], expected["w"].sum())
