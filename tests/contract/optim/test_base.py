from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import ltx
from ltx.errors import OptimError
from ltx.optim import Optimizer, apply_updates, from_functions
from tests.contract.optim.cases import same_bits


class Trace(NamedTuple):
    momentum: Any


def trace_init(params: Any) -> Trace:
    return Trace(optree.tree_map(torch.zeros_like, params))


def trace_update(grads: Any, state: Trace, params: Any) -> tuple[Any, Trace]:
    momentum = optree.tree_map(lambda g, m: g + 0.9 * m, grads, state.momentum)
    return optree.tree_map(lambda m: -0.1 * m, momentum), Trace(momentum)


def test_pair_of_functions_is_an_optimizer(seed: int) -> None:
    optimizer = from_functions(trace_init, trace_update, elementwise=True)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.elementwise
    assert not from_functions(trace_init, trace_update).elementwise
    params = {"w": torch.randn(3)}
    expected, theirs = params["w"].clone().requires_grad_(), None
    theirs = torch.optim.SGD([expected], lr=0.1, momentum=0.9)
    state = optimizer.init(params)
    for donate in (False, True, False):
        grads = {"w": torch.randn(3)}
        new_params, state = optimizer.apply(grads, state, params, donate=donate)
        assert (new_params is params) == donate
        params = new_params
        expected.grad = grads["w"]
        theirs.step()
    torch.testing.assert_close(params["w"], expected.detach())


def test_pair_is_a_value() -> None:
    optimizer = from_functions(trace_init, trace_update)
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer == from_functions(trace_init, trace_update)
    assert hash(optimizer) == hash(from_functions(trace_init, trace_update))
    assert repr(optimizer) == "from_functions(trace_init, trace_update)"


def test_apply_updates() -> None:
    params = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(())}
    updates = {"a": torch.ones(2), "b": None}
    new = apply_updates(params, updates)
    assert same_bits(new, {"a": torch.full((2,), 2.0, dtype=torch.bfloat16), "b": torch.ones(())})
    assert new["b"] is not params["b"]
    assert params["a"].tolist() == [1.0, 1.0]
    assert apply_updates(params, updates, donate=True) is params
    assert params["a"].tolist() == [2.0, 2.0]
    with pytest.raises(OptimError, match=re.escape("updates must have the tree structure of params: ")):
        apply_updates(params, {"a": None})


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    ("of", "update"),
    [(torch.float8_e4m3fn, torch.bool), (torch.float32, torch.float8_e5m2), (torch.float32, torch.complex64)],
)
def test_updates_that_cant_be_added(of: torch.dtype, update: torch.dtype, donate: bool) -> None:
    params, updates = {"w": torch.ones(2).to(of)}, {"w": torch.ones(2).to(update)}
    with pytest.raises(OptimError, match=r"the update of .*w.* is .*, which can't be added to"):
        apply_updates(params, updates, donate=donate)


def test_apply_updates_is_differentiable() -> None:
    grad = torch.func.grad(lambda u: apply_updates({"w": torch.ones(2)}, {"w": u})["w"].pow(2).sum())(torch.ones(2))
    assert grad.tolist() == [4.0, 4.0]


def test_protocol_is_abstract() -> None:
    class Half(Optimizer):
        def init(self, params: Any) -> Tensor:
            return torch.zeros(())

    with pytest.raises(TypeError, match="update"):
        Half()  # type: ignore[abstract]


class Transformation(NamedTuple):
    """As torchopt.base.GradientTransformation."""

    init: Any
    update: Any


def _torchopts_sgd(lr: float) -> Transformation:
    def update(updates: Any, state: Any, *, params: Any = None, inplace: bool = True) -> Any:
        assert params is not None
        if inplace:
            return {name: g.mul_(-lr) for name, g in updates.items()}, state
        return {name: g.mul(-lr) for name, g in updates.items()}, state

    return Transformation(lambda params: (), update)


def test_torchopts_signature(ranks: Callable[[int], ltx.Pool]) -> None:
    optimizer = from_functions(*_torchopts_sgd(0.5))
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    updated, _ = optimizer.apply(grads, optimizer.init(params), params)
    assert updated["w"].tolist() == [0.5, 0.5]
    assert grads["w"].tolist() == [1.0, 1.0]

    def run() -> Any:
        train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum()), from_functions(*_torchopts_sgd(0.5)))
        state, _ = train(train.init(params), torch.ones(2) * (1 + ltx.axis_index()))
        return state.params["w"]

    assert ranks(2).run(run).replicated().tolist() == [0.25, 0.25]
