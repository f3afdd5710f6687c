"""from_torch against torch's own optimizers, plainly and under torch.func's transforms."""

from __future__ import annotations

import copy
import pickle
import random
import re
from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, SparseAdam

from ltx.errors import LtxError, OptimError
from ltx.optim import TorchState, apply_updates, from_torch
from tests.contract.optim.cases import (
    CASES,
    DENSE_CASES,
    FUSED_CASES,
    Case,
    TorchRun,
    clone,
    random_grads,
    random_params,
    same_bits,
)
from tests.train_on import refuses

STEPS = 10


def test_every_class_of_torch_has_a_case() -> None:
    classes = {
        value
        for value in vars(torch.optim).values()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    assert {case.cls for case in CASES} == classes - {torch.optim.LBFGS}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_bit_equal_to_torch(case: Case, donate: bool, seed: int) -> None:
    kwargs = {"fused": False} if case.has_fused else {}
    _compare(case, donate, kwargs, kwargs)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("case", FUSED_CASES, ids=repr)
def test_bit_equal_to_fused_torch_by_default(case: Case, donate: bool, seed: int) -> None:
    _compare(case, donate, {}, {"fused": True})


@pytest.mark.parametrize("case", [case for case in DENSE_CASES if case.cls is not torch.optim.Muon], ids=repr)
def test_bit_equal_to_foreach_torch(case: Case, seed: int) -> None:
    _compare(case, False, {"foreach": True}, {"foreach": True})


@pytest.mark.parametrize("case", FUSED_CASES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bit_equal_in_other_dtypes(case: Case, dtype: torch.dtype, seed: int) -> None:
    params = optree.tree_map(lambda x: x.to(dtype), random_params(case))
    works = case.cls is not SGD or dtype is torch.float64  # torch issue 191763
    _compare(case, True, {}, {"fused": works}, params)


def _compare(case: Case, donate: bool, kwargs: dict, torch_kwargs: dict, params: object = None) -> None:
    params = random_params(case) if params is None else params
    twin = TorchRun(case, params, **torch_kwargs)
    optimizer = from_torch(case.cls, **case.kwargs, **kwargs)
    state = optimizer.init(params)
    structure = optree.tree_structure(state.per_param)
    for step in range(STEPS):
        grads = random_grads(case, params)
        before = clone((grads, state, params))
        new_params, new_state = optimizer.apply(grads, state, params, donate=donate)
        assert same_bits(grads, before[0])
        if donate:
            assert new_params is params
            assert all(a is b for a, b in zip(optree.tree_leaves(state), optree.tree_leaves(new_state), strict=True))
        else:
            assert same_bits((state, params), before[1:])
        params, state = new_params, new_state
        twin.step(grads)
        assert same_bits(params, twin.params), f"step {step}"
        assert state.count == step + 1
        assert optree.tree_structure(state.per_param) == structure
    for index, own in enumerate(optimizer.leaf_states(state, params)):
        theirs = {key: torch.as_tensor(value) for key, value in twin.state_of(index).items() if value is not None}
        if case.cls is SparseAdam:
            theirs["step"] = theirs["step"].float()
        assert same_bits({key: own[key] for key in theirs}, theirs)
        assert own.keys() - theirs.keys() <= {"step"}  # of SGD with dampening


@pytest.mark.parametrize("case", DENSE_CASES, ids=repr)
def test_leaves_without_gradient_are_kept(case: Case, seed: int) -> None:
    random.seed(seed)
    fused = {"fused": False} if case.has_fused else {}
    params = random_params(case)
    twin = TorchRun(case, params, **fused)
    optimizer = from_torch(case.cls, **case.kwargs, **fused)
    state = optimizer.init(params)
    for donate in (False, True) * 3:
        grads = optree.tree_map(lambda g: None if random.random() < 0.5 else g, random_grads(case, params))
        params, state = optimizer.apply(grads, state, params, donate=donate)
        twin.step(grads)
        assert same_bits(params, twin.params)
    alone = optimizer.apply(optree.tree_map(lambda p: None, params), state, params)
    assert same_bits(alone[0], params)
    assert same_bits(alone[1].per_param, state.per_param)


@pytest.mark.parametrize("case", [Case(Adam), Case(SGD, {"momentum": 0.9}), Case(Adagrad)], ids=repr)
def test_complex_parameters_are_updated_beside_fused_ones(case: Case, seed: int) -> None:
    params = {"complex": torch.randn(3, 4, dtype=torch.complex64), "real": torch.randn(5)}
    fused, plain = TorchRun(case, {"real": params["real"]}, fused=True), TorchRun(case, {"complex": params["complex"]})
    optimizer = from_torch(case.cls, **case.kwargs)
    state = optimizer.init(params)
    for _ in range(3):
        grads = {key: torch.randn_like(param) for key, param in params.items()}
        params, state = optimizer.apply(grads, state, params)
        fused.step({"real": grads["real"]})
        plain.step({"complex": grads["complex"]})
    assert torch.equal(params["real"], fused.params["real"])
    assert torch.equal(params["complex"], plain.params["complex"])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("cls", [SGD, Adagrad])
def test_sparse_gradients_where_torch_takes_them(cls: type[torch.optim.Optimizer], seed: int) -> None:
    params = {"w": torch.randn(6, 3)}
    twin = TorchRun(Case(cls), params)
    optimizer = from_torch(cls)
    state = optimizer.init(params)
    for _ in range(3):
        grads = random_grads(Case(SparseAdam), params)
        params, state = optimizer.apply(grads, state, params)
        twin.step(grads)
    assert same_bits(params, twin.params)


@pytest.mark.parametrize("case", DENSE_CASES, ids=repr)
@pytest.mark.parametrize("donate", [True, False])
def test_update_is_the_difference(case: Case, donate: bool, seed: int) -> None:
    params = random_params(case)
    optimizer = from_torch(case.cls, **case.kwargs)
    state, grads = optimizer.init(params), random_grads(case, params)
    new_params, new_state = optimizer.apply(grads, state, params)
    before = clone(params)
    updates, updated_state = optimizer.update(grads, state, params, donate=donate)
    assert same_bits(params, before)
    assert same_bits(updated_state, new_state)
    sums = optree.tree_leaves(apply_updates(params, updates))
    for got, expected in zip(sums, optree.tree_leaves(new_params), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_state_is_new_memory_and_round_trips(case: Case, seed: int) -> None:
    params = random_params(case)
    optimizer = from_torch(case.cls, **case.kwargs)
    _, state = optimizer.apply(random_grads(case, params), optimizer.init(params), params)
    owned = {t.untyped_storage().data_ptr() for t in optree.tree_leaves(params) if t.numel()}
    leaves, spec = optree.tree_flatten(state)
    assert not owned & {t.untyped_storage().data_ptr() for t in leaves if t.numel()}
    for back in (pickle.loads(pickle.dumps(state)), optree.tree_unflatten(spec, leaves), copy.deepcopy(state)):
        assert isinstance(back, TorchState)
        assert back.count == 1
        assert same_bits(back, state)


@pytest.mark.parametrize("kwargs", [{}, {"differentiable": True}])
def test_plain_autograd_sees_the_update_which_turns_donation_off(kwargs: dict[str, bool]) -> None:
    optimizer = from_torch(SGD, lr=0.1, momentum=0.9, **kwargs)
    params = {"w": torch.ones(2, requires_grad=True)}
    new_params, _ = optimizer.apply({"w": params["w"] ** 2}, optimizer.init(params), params, donate=True)
    assert new_params is not params
    new_params["w"].sum().backward()
    assert torch.allclose(params["w"].grad, torch.full((2,), 1 - 0.1 * 2))


def test_parameters_are_leaves_that_are_trained_or_are_differentiated() -> None:
    params = {"w": torch.ones(2, requires_grad=True), "b": torch.ones(1, requires_grad=True)}
    optimizer = from_torch(AdamW)
    state = optimizer.init(params)
    grads = {"w": torch.ones(2), "b": None}
    new_params, _ = optimizer.apply(grads, state, params)  # a first-order derivative of the update
    (new_params["w"].sum() + new_params["b"].sum()).backward()
    assert torch.allclose(params["w"].grad, torch.full((2,), 1 - 1e-3 * 1e-2))  # AdamW's decay
    assert params["b"].grad == 1
    with torch.no_grad():
        assert not optree.tree_leaves(optimizer.update(params, state, params)[0])[0].requires_grad
    new_params, new_state = optimizer.apply(grads, state, params, donate=True)
    assert new_params is params
    assert params["w"].is_leaf
    assert all(tensor.grad_fn is None for tensor in optree.tree_leaves(new_state))


def test_empty_tree() -> None:
    optimizer = from_torch(AdamW)
    state = optimizer.init({})
    assert optimizer.apply({}, state, {}) == ({}, TorchState({}, 1))
    assert optimizer.apply({}, state, {}, donate=True) == ({}, TorchState({}, 1))


def test_elementwise_by_class() -> None:
    not_elementwise = {case.cls.__name__ for case in CASES if not from_torch(case.cls, **case.kwargs).elementwise}
    assert not_elementwise == {"Adafactor", "Muon", "SparseAdam"}

    class Mine(Adam):
        pass

    assert not from_torch(Mine).elementwise


def test_no_value_survives_a_call() -> None:
    optimizer = from_torch(AdamW)
    params = {"w": torch.ones(2)}
    before = pickle.dumps(optimizer.kernel.shell.__dict__)
    optimizer.apply(params, optimizer.init(params), params)
    assert pickle.dumps(optimizer.kernel.shell.__dict__) == before
    assert params["w"].grad is None


def test_arguments_are_compared_and_cannot_be_changed() -> None:
    optimizer = from_torch(AdamW, betas=[0.5, 0.9], eps=1.0)
    assert optimizer == from_torch(AdamW, eps=1.0, betas=(0.5, 0.9)) != from_torch(Adam, eps=1.0, betas=(0.5, 0.9))
    assert optimizer != 1
    assert replace(optimizer, lr=0.5) == from_torch(AdamW, betas=(0.5, 0.9), eps=1.0, lr=0.5)
    with pytest.raises(TypeError, match="item assignment"):
        optimizer.kwargs["eps"] = 1.0
    with pytest.raises(AttributeError):
        optimizer.lr = 1.0


def test_grads_and_state_must_fit() -> None:
    params = {"layers": [torch.ones(2), torch.ones(3)]}
    optimizer = from_torch(AdamW)
    state = optimizer.init(params)
    two = torch.ones(2)
    misfits: list[tuple[list[Any], str]] = [
        ([two, two], "the gradient of leaf 'layers.1' is float32[2], but the parameter is float32[3]: cast or reshape"),
        ([two.double(), None], "the gradient of leaf 'layers.0' is float64[2], but the parameter is float32[2]"),
        ([None, 3.0], "the gradient of leaf 'layers.1' must be a tensor or None, got 3.0."),
        ([None], "grads must have the tree structure of params"),
        (
            [two.to_sparse(), None],
            "(AdamW): the gradient of leaf 'layers.0' is sparse, but AdamW takes dense ones only",
        ),
    ]
    before = clone((params, state))
    for grads, text in misfits:
        refuses(OptimError, re.escape(text), optimizer.apply, {"layers": grads}, state, params, donate=True)
    with pytest.raises(OptimError, match="the optimizer's state must have the tree structure of params"):
        optimizer.apply(params, optimizer.init({}), params)
    with pytest.raises(OptimError, match=re.escape("from_torch(torch.optim.AdamW) expected the state that its init")):
        optimizer.apply(params, (), params)
    for grad in (torch.ones(()), None):
        with pytest.raises(OptimError, match="other parameters, which have containers where these have tensors"):
            optimizer.apply(grad, state, torch.ones(()))
    with pytest.raises(OptimError, match="the gradient of leaf 1 of the list is float32"):
        optimizer.update_leaves([torch.ones(2)] * 2, optimizer.leaf_states(state, params), params["layers"], state)
    assert same_bits((params, state), before)


def test_errors_are_value_errors() -> None:
    assert issubclass(OptimError, ValueError)
    assert issubclass(OptimError, LtxError)


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
