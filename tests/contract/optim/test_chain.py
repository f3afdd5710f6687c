from __future__ import annotations

import pickle
import re
from dataclasses import replace
from typing import Any

import cloudpickle
import optree
import pytest
import torch
from torch.optim import SGD, AdamW

import ltx
from ltx.errors import OptimError
from ltx.optim import (
    ClipState,
    Optimizer,
    TorchState,
    chain,
    clip_by_global_norm,
    clip_by_value,
    from_functions,
    from_torch,
    grad_norm,
    identity,
    masked,
    partition,
)
from tests.contract.optim.cases import Case, clone, random_grads, random_params, same_bits
from tests.train_on import refuses
from tests.twins.training import after_some_updates


def no_state(params: Any) -> tuple[()]:
    return ()


def double(grads: Any, state: Any, params: Any) -> Any:
    return optree.tree_map(lambda g: 2 * g, grads), state


doubled = from_functions(no_state, double, elementwise=True)
clip, adamw = clip_by_global_norm(1.0), from_torch(AdamW, lr=1e-3)


def test_laws() -> None:
    assert chain() == identity()
    assert chain(adamw) is adamw
    assert chain(identity(), clip, identity()) is clip
    assert chain(chain(clip, doubled), adamw) == chain(clip, chain(doubled, adamw)) == chain(clip, doubled, adamw)
    assert chain(clip, doubled) != chain(doubled, clip)
    assert len({chain(clip, adamw), chain(clip, adamw), chain(adamw)}) == 2


def test_identity_passes_gradients_on() -> None:
    grads = {"w": torch.ones(2)}
    assert identity().update(grads, identity().init(grads), grads) == (grads, ())
    assert repr(identity()) == "identity()"
    assert pickle.loads(pickle.dumps(identity())) == identity()


def test_is_a_value() -> None:
    made = chain(clip, doubled, adamw)
    assert pickle.loads(pickle.dumps(made)) == made
    assert cloudpickle.loads(cloudpickle.dumps(made)) == made
    assert repr(made) == (
        "chain(clip_by_global_norm(1.0), from_functions(no_state, double, elementwise=True), "
        "from_torch(torch.optim.AdamW, lr=0.001))"
    )


@pytest.mark.parametrize("donate", [True, False])
def test_is_its_members_in_turn(donate: bool, seed: int) -> None:
    params = random_params(Case(AdamW))
    expected, made = clone(params), chain(clip_by_global_norm(1.0), doubled, adamw)
    state, own = made.init(params), adamw.init(params)
    for _ in range(3):
        grads = random_grads(Case(AdamW), params)
        before = clone((grads, params, state))
        clipped, clip_state = clip.update(grads, ClipState(torch.tensor(0.0)), params)
        expected, own = adamw.apply(double(clipped, (), params)[0], own, expected)
        new_params, new_state = made.apply(grads, state, params, donate=donate)
        assert same_bits(grads, before[0])
        assert (new_params is params) == donate
        if not donate:
            assert same_bits((params, state), before[1:])
        assert new_state[2].count == own.count
        assert same_bits((new_params, new_state[2], new_state[0]), (expected, own, clip_state))
        assert same_bits(grad_norm(new_state), clip_state.norm)
        params, state = new_params, new_state


def test_update_of_a_chain_is_the_last_members(seed: int) -> None:
    params = {"w": torch.randn(4)}
    made = chain(doubled, from_torch(SGD, lr=0.5))
    updates, state = made.update({"w": torch.ones(4)}, made.init(params), params)
    torch.testing.assert_close(updates["w"], -torch.ones(4))
    assert state[1].count == 1


def test_elementwise_if_all_are() -> None:
    assert chain(doubled, adamw).elementwise
    assert chain().elementwise
    assert not chain(clip, adamw).elementwise
    assert not chain(doubled, from_torch(torch.optim.Adafactor)).elementwise
    assert not chain(doubled, adamw).leafwise
    assert not chain(clip, adamw).leafwise
    assert chain(clip_by_value(1.0), masked(clip_by_value(0.1), "*"), adamw).leafwise


@pytest.mark.parametrize(
    ("transforms", "text"),
    [
        (
            (adamw, clip),
            "from_torch(torch.optim.AdamW, lr=0.001) must come last in a chain, before it only transformations of "
            "gradients: it updates the parameters, so clip_by_global_norm(1.0) after it would not get gradients.",
        ),
        ((chain(clip, adamw), doubled), "must come last in a chain"),
        ((clip, AdamW), "argument 1 is <class 'torch.optim.adamw.AdamW'>. Wrap the class: from_torch(AdamW, ...)."),
        ((SGD([torch.ones(1)]),), "Wrap the class: from_torch(SGD, ...)."),
        ((3,), "chain expected optimizers, but argument 0 is 3."),
    ],
)
def test_refused(transforms: tuple[Any, ...], text: str) -> None:
    refuses(OptimError, re.escape(text), chain, *transforms)


@pytest.mark.parametrize("state", [(), (1,), None])
def test_state_of_another_chain(state: Any) -> None:
    params = {"w": torch.ones(1)}
    with pytest.raises(OptimError, match=re.escape("expected a state of 2 parts, one a member, got")):
        chain(clip, adamw).apply(params, state, params)


def test_leaf_by_leaf_is_refused_by_name() -> None:
    made: Optimizer = chain(clip, adamw)
    text = re.escape(f"{clip} can't be applied leaf by leaf: an update of one leaf may depend on the others.")
    state = made.init({})
    for call in (lambda: made.update_leaves([], [], [], state), lambda: made.leaf_states(state, {})):
        refuses(OptimError, text, call)


# Chains all members of which work leaf by leaf.
LEAFWISE = {
    "clipped": chain(clip_by_value(0.02), adamw),
    "masked": chain(masked(clip_by_value(0.02), "*bias"), adamw),
    "in groups": chain(
        clip_by_value(0.05),
        partition({"0": chain(clip_by_value(0.03), from_torch(SGD, lr=0.1)), "1": adamw}, {"*bias": "0", "*": "1"}),
    ),
    "masked by a pattern": chain(masked(clip_by_value(0.03), "0.*"), adamw),
}
NET = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


@pytest.mark.parametrize("name", LEAFWISE)
def test_leaf_by_leaf_is_as_together(name: str, seed: int) -> None:
    made, params = LEAFWISE[name], {key: torch.randn_like(p) for key, p in NET.named_parameters()}
    together, mine, state, own = params, clone(params), *[after_some_updates(made.init(params)) for _ in range(2)]
    for _ in range(3):
        grads = {key: torch.randn_like(p) for key, p in params.items()}
        together, state = made.apply(grads, state, together)
        before, leaves, states = clone(grads), optree.tree_leaves(mine), made.leaf_states(own, mine)
        for some in ([3, 1], [0, 2]):  # as buckets come
            given = [optree.tree_leaves(grads)[i] for i in some]
            made.update_leaves(given, [states[i] for i in some], [leaves[i] for i in some], own)
        own = ltx.tree.map(
            lambda x: replace(x, count=x.count + 1) if isinstance(x, TorchState) else x,
            own,
            is_leaf=lambda x: isinstance(x, TorchState),
        )
        assert same_bits(grads, before)
        assert same_bits((mine, own), (together, state))
