"""Optimizers told on the device to change nothing, beside the same update whose result is chosen afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

import ltx
from ltx import tree
from ltx.core.optim.base import apply_leaves, unless
from ltx.core.training.guard import not_finite
from ltx.errors import OptimError
from ltx.extend import Update
from ltx.optim import Optimizer, TorchState, chain, clip_by_global_norm, clip_by_value, from_torch, masked, partition
from tests.contract.optim.cases import clone, same_bits
from tests.contract.optim.test_base import trace_init, trace_update
from tests.contract.optim.test_opaque import Anchored
from tests.contract.training.test_guard import INF, NAN
from tests.train_on import refuses

adamw, sgd = from_torch(AdamW, lr=0.1), from_torch(SGD, lr=lambda count: 0.1 / (1 + count), momentum=0.9)
functions = ltx.optim.from_functions(trace_init, trace_update, elementwise=True)
LABELS = {"*bias": "biases", "*": "others"}


@dataclass(frozen=True)
class Heavy(Optimizer):
    """A transformation of another author that works leaf by leaf, with tensors of its own that it writes into."""

    leafwise = True
    moves_params = False

    decay: float = 0.5

    def init(self, params: Any) -> TorchState:
        return TorchState(tree.map(lambda p: {"sum": torch.zeros_like(p)}, params))

    def update(self, grads: Any, state: TorchState, params: Any, *, donate: bool = False) -> Any:
        leaves, spec = tree.flatten(params)
        states = self.leaf_states(state if donate else clone(state), params)
        found = self.update_leaves(spec.flatten_up_to(grads), states, leaves, state)
        return spec.unflatten(found), TorchState(spec.unflatten(states), state.count + 1)

    def leaf_states(self, state: TorchState, params: Any) -> Any:
        return tree.flatten(params)[1].flatten_up_to(state.per_param)

    def update_leaves(self, grads: Any, states: Any, params: Any, state: TorchState) -> list[Tensor]:
        return [own["sum"].mul_(self.decay).add_(g).clone() for g, own in zip(grads, states, strict=True)]


grouped = partition({"biases": sgd, "others": adamw}, LABELS)
MADE: dict[str, Optimizer] = {
    "sgd": sgd,
    "adamw": adamw,
    "functions": functions,
    "clipped": chain(clip_by_global_norm(1.0), adamw),
    "measured, by functions": chain(ltx.optim.measure_global_norm(), functions),
    "by value": chain(clip_by_value(0.5), adamw),
    "with a state": chain(Heavy(), sgd),
    "groups": grouped,
    "groups, one of functions": partition({"biases": functions, "others": adamw}, LABELS),
    "masked": chain(masked(clip_by_value(0.5), "*bias"), partition({"0": ltx.optim.identity()}, {"*": "0"}), adamw),
    "masked, with a state": chain(masked(Heavy(), "*bias"), adamw),
    "a chain of groups": chain(clip_by_global_norm(1.0), grouped),
    "chains in groups": partition({"biases": sgd, "others": chain(Heavy(), clip_by_global_norm(1.0), adamw)}, LABELS),
    "leafwise chains, grouped": partition({"biases": sgd, "others": chain(Heavy(), clip_by_value(0.5), adamw)}, LABELS),
}
LEAFWISE = [name for name, made in MADE.items() if made.leafwise]
#: What isn't told: the update is done beside the state. Of some a part is told, which is done in the state.
PARTLY_TOLD = {"groups", "nested"}
UNTOLD: dict[str, Optimizer] = {
    "not fused": from_torch(AdamW, lr=0.1, foreach=True),
    "dampened": from_torch(SGD, momentum=0.9, dampening=0.5),
    "opaque": from_torch(Anchored, lr=0.1),
    "chain": chain(clip_by_global_norm(1.0), from_torch(Anchored, lr=0.1)),
    "groups": partition({"biases": from_torch(Anchored, lr=0.1), "others": adamw}, LABELS),
    "nested": chain(ltx.optim.measure_global_norm(), partition({"0": from_torch(Adam, fused=False)}, {"*": "0"})),
}


def trees(made: Optimizer) -> tuple[Any, Any, Any]:
    """Parameters (with a zero of either sign), a state after two updates, and gradients."""
    params: Any = {"bias": torch.randn(3), "weight": torch.randn(4, 3)}
    state = made.init(params)
    for _ in range(2):
        params, state = made.apply(tree.map(torch.randn_like, params), state, params)
    for x in tree.flatten((params, state))[0]:
        if x.dim():
            x.view(-1)[0] = -0.0
    return params, state, tree.map(torch.randn_like, params)


def told(made: Optimizer, skip: bool, params: Any) -> Optimizer:
    return unless(made, torch.tensor(skip), tree.flatten(params)[0])


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_as_chosen_afterwards(name: str, skip: bool, donate: bool, seed: int) -> None:
    made = MADE[name]
    params, state, grads = trees(made)
    if skip:
        grads["weight"][1, 1] = torch.nan
    slowly = Update(made, params, grads, state, finite=torch.tensor(not skip)).apply()
    before = clone((params, state))
    after = told(made, skip, params).apply(grads, state, params, donate=donate)
    assert same_bits(after, slowly)
    if skip:
        assert all(map(same_bits, tree.flatten(after)[0], tree.flatten(before)[0]))
    if skip or not donate:
        assert same_bits((params, state), before)
    if donate and "functions" not in name:
        assert after[0] is params


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", LEAFWISE)
def test_leaf_by_leaf(name: str, skip: bool, seed: int) -> None:
    made = MADE[name]
    params, state, grads = trees(made)
    slowly = clone((params, state)) if skip else made.apply(grads, state, params)
    if skip:
        grads["bias"][1] = torch.nan
    conditional, (leaves, spec) = told(made, skip, params), tree.flatten(params)
    states = made.leaf_states(state, params)
    for place, grad in enumerate(spec.flatten_up_to(grads)):
        apply_leaves(conditional, [grad], [states[place]], [leaves[place]], state)
    assert all(map(same_bits, tree.flatten((params, state))[0], tree.flatten(slowly)[0]))


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_told_is_run_beside_the_state(name: str, finite: bool, seed: int) -> None:
    made = UNTOLD[name]
    params, state, grads = trees(made)
    before, expected = clone((params, state)), made.apply(grads, state, params)
    after = Update(made, params, grads, state, donate=True, finite=torch.tensor(finite)).apply()
    assert same_bits((params, state), before) or name in PARTLY_TOLD, "another state may need them"
    assert all(map(same_bits, tree.flatten(after)[0], tree.flatten(expected if finite else before)[0]))


def test_it_offers_what_the_optimizer_does() -> None:
    conditional = unless(chain(Heavy(), functions), torch.tensor(True), [torch.zeros(1)])
    assert (conditional.elementwise, conditional.leafwise, conditional.moves_params) == (False, False, None)
    refuses(OptimError, "must come last", chain, sgd, conditional)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("place", [None, 0, 5_000, -1])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_not_finite(dtype: torch.dtype, place: int | None, value: float) -> None:
    """The largest numbers add up to infinity, and are finite."""
    largest = torch.finfo(dtype).max
    grads = [torch.full((10_001,), largest, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones((), dtype=dtype)]
    if place is not None:
        grads[0][place] = value
    assert bool(not_finite(grads)) == (place is not None)
    assert bool(not_finite([grads[0][:10_000].reshape(100, 100).T, *grads[1:]])) == (place in (0, 5_000))


def test_infinities_that_cancel() -> None:
    assert not_finite([torch.tensor([INF, -INF, 1.0])])
    assert not not_finite([])
