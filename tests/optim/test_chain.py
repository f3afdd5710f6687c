from __future__ import annotations

import pickle
import re
from typing import Any

import cloudpickle
import optree
import pytest
import torch
from torch.optim import SGD, AdamW

from ltx.errors import OptimError
from ltx.optim import ClipState, Optimizer, chain, clip_by_global_norm, from_functions, from_torch, grad_norm, identity

from .cases import Case, clone, random_grads, random_params, same_bits


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
    with pytest.raises(OptimError, match=re.escape(text)):
        chain(*transforms)


@pytest.mark.parametrize("state", [(), (1,), None])
def test_state_of_another_chain(state: Any) -> None:
    params = {"w": torch.ones(1)}
    with pytest.raises(OptimError, match=re.escape("expected a state of 2 parts, one a member, got")):
        chain(clip, adamw).apply(params, state, params)


def test_leaf_by_leaf_is_refused_by_name() -> None:
    made: Optimizer = chain(clip, adamw)
    text = re.escape(f"{made} can't be applied leaf by leaf: an update of one leaf may depend on the others.")
    for call in (
        lambda: made.apply_leaves([], [], [], 0),
        lambda: made.leaf_states((), {}),
        lambda: made.advance(()),
    ):
        with pytest.raises(OptimError, match=text):
            call()
