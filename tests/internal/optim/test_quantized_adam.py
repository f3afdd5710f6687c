"""qadam's two phases on explicit momenta; the strategy that makes them is tested with the strategies."""

from __future__ import annotations

import re
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from ltx.core.gradients import buffers
from ltx.core.optim.base import advanced
from ltx.errors import OptimError
from ltx.optim import qadam
from tests.contract.optim.cases import Case, clone, random_grads, random_params, same_bits
from tests.train_on import refuses

CASE = Case(torch.optim.Adam)
OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.7, 0.9), "eps": 1e-4, "weight_decay": 0.1}
WARMUP, STEPS = 3, 7


def by_hand(params: Any, given: list[Any], bagua_exact: bool) -> list[Any]:
    """Bagua's equations in float64, leaf by leaf."""
    (b1, b2), lr, eps, decay = OPTIONS["betas"], OPTIONS["lr"], OPTIONS["eps"], OPTIONS["weight_decay"]

    def one(x: Tensor, gs: list[Tensor]) -> Tensor:
        x, m, v = x.double(), torch.zeros_like(x).double(), torch.zeros_like(x).double()
        for s, g in enumerate((g.double() for g in gs), 1):
            if s < WARMUP + (not bagua_exact):
                g = g + decay * x
                m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            elif s > WARMUP:
                m = g
            x = x - lr / (1 - b1**s) * m / (v.sqrt() / (1 - b2**s) ** 0.5 + eps)
        return x

    return optree.tree_map(lambda x, *gs: one(x, list(gs)), params, *given)


@pytest.mark.parametrize("bagua_exact", [False, True])
@pytest.mark.parametrize("how", ["donate", "pure", "leaves", "updates"])
@pytest.mark.parametrize("accelerator", [False, True])
def test_both_phases(how: str, bagua_exact: bool, accelerator: bool, monkeypatch: Any, seed: int) -> None:
    if accelerator:
        monkeypatch.setattr(buffers, "IN_PIECES", frozenset())
    start = random_params(CASE)
    given = [random_grads(CASE, start) for _ in range(STEPS)]
    optimizer = qadam(warmup_steps=WARMUP, bagua_exact=bagua_exact, **OPTIONS)
    params, state = clone(start), optimizer.init(start)
    for grads in given:
        kept = clone((grads, state, params))
        if how == "leaves":
            leaves, states = optree.tree_leaves(params), optimizer.leaf_states(state, params)
            for i in reversed(range(len(leaves))):
                optimizer.update_leaves([optree.tree_leaves(grads)[i]], [states[i]], [leaves[i]], state)
            state = advanced(state)
        elif how == "updates":
            updates, state = optimizer.update(grads, state, params)
            params = optree.tree_map(torch.add, params, updates)
        else:
            before = grads, state, params
            params, state = optimizer.apply(grads, state, params, donate=how == "donate")
            assert same_bits(before[0], kept[0])
            assert how == "donate" or same_bits(before, kept)
    assert state.count == STEPS
    expected = optree.tree_leaves(by_hand(start, given, bagua_exact))
    torch.testing.assert_close(optree.tree_leaves(params), [x.float() for x in expected])


def test_each_example_of_a_vmap_gets_what_it_would_get_alone(seed: int) -> None:
    optimizer = qadam(warmup_steps=1, **OPTIONS)
    params, grads = torch.randn(3, 4), torch.randn(2, 3, 4)

    def two(p: Tensor, g: Tensor) -> Tensor:
        p, state = optimizer.apply(g[0], optimizer.init(p), p)
        return optimizer.apply(g[1], state, p)[0]

    together = torch.vmap(two, in_dims=(0, 1))(params, grads)
    assert all(torch.equal(row, two(params[i], grads[:, i])) for i, row in enumerate(together))


def test_a_schedule_and_parameters_without_a_gradient() -> None:
    optimizer = qadam(lambda count: 0.1 * (count < 2), warmup_steps=1)
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state, moved = optimizer.init(params), []
    for _ in range(3):
        before = params
        params, state = optimizer.apply({"a": torch.ones(2), "b": None}, state, params)
        assert torch.equal(params["b"], torch.ones(2))
        moved.append(not torch.equal(before["a"], params["a"]))
    assert moved == [True, True, False]


AT_LEAST = "warmup_steps must be a whole number of at least"


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"warmup_steps": 0}, f"qadam: {AT_LEAST} 1, got 0."),
        ({"warmup_steps": True}, f"qadam: {AT_LEAST} 1, got True."),
        ({"bagua_exact": True}, f"qadam with bagua_exact: {AT_LEAST} 2, got 1."),
        ({"betas": (1.5, 0.9)}, "Adam refused its arguments: Invalid beta parameter at index 0"),
        ({"lr": "fast"}, "lr must be a number or a function of the step, got 'fast'."),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], text: str) -> None:
    refuses(OptimError, re.escape(text), qadam, **{"warmup_steps": 1, **kwargs})


def test_complex_parameters_are_refused() -> None:
    params = {"w": torch.ones(1), "z": torch.ones(2, dtype=torch.complex64)}
    text = re.escape("qadam: leaf 'z' is complex64[2]: momenta travel in 8 bits, for")
    refuses(OptimError, text, qadam(warmup_steps=1).init, params)
