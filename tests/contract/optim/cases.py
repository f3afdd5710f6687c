"""Every ``torch.optim`` class with hyperparameters that reach its branches, and random trees for it to update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor, optim


@dataclass(frozen=True)
class Case:
    cls: type[torch.optim.Optimizer]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def has_fused(self) -> bool:
        return self.cls in (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)

    def __repr__(self) -> str:
        return "-".join([self.cls.__name__, *(f"{key}={value}" for key, value in self.kwargs.items())])


CASES = [
    Case(optim.Adadelta),
    Case(optim.Adadelta, {"weight_decay": 0.1, "maximize": True}),
    Case(optim.Adafactor),
    Case(optim.Adafactor, {"weight_decay": 0.1, "lr": 0.1}),
    Case(optim.Adagrad),
    Case(optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.3, "weight_decay": 0.1}),
    Case(optim.Adam),
    Case(optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    Case(optim.AdamW, {"lr": 0.1}),
    Case(optim.AdamW, {"amsgrad": True, "betas": (0.5, 0.6)}),
    Case(optim.Adamax),
    Case(optim.ASGD),
    Case(optim.ASGD, {"t0": 2.0, "lambd": 0.1, "lr": 0.1}),
    Case(optim.Muon),
    Case(optim.Muon, {"nesterov": False, "weight_decay": 0.3}),
    Case(optim.NAdam),
    Case(optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    Case(optim.RAdam),
    Case(optim.RAdam, {"betas": (0.5, 0.6), "weight_decay": 0.1}),
    Case(optim.RMSprop),
    Case(optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    Case(optim.Rprop),
    Case(optim.SGD),
    Case(optim.SGD, {"momentum": 0.9, "lr": 0.1}),
    Case(optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Case(optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    Case(optim.SparseAdam),
]
DENSE_CASES = [case for case in CASES if case.cls is not optim.SparseAdam]
FUSED_CASES = [case for case in CASES if case.has_fused]


def random_params(case: Case) -> dict[str, Any]:
    """A nested tree with 0-dim, empty and multi-dimensional leaves, as far as the class takes them."""
    params: dict[str, Any] = {"layers": [torch.randn(5, 7), torch.randn(3, 4)]}
    if case.cls not in (optim.Muon, optim.SparseAdam):
        params |= {"scalar": torch.randn(()), "bias": torch.randn(33), "conv": torch.randn(2, 3, 2, 2)}
    # torch's own Adafactor divides by the number of elements
    if case.cls not in (optim.Muon, optim.SparseAdam, optim.Adafactor):
        params["empty"] = torch.randn(0, 3)
    return params


def random_grads(case: Case, params: Any) -> Any:
    """Gradients for `params`; with some exact zeros of either sign, which tell copies from sums."""

    def one(param: Tensor) -> Tensor:
        grad = torch.randn_like(param)
        grad[torch.rand_like(grad) < 0.1] = -0.0
        grad[torch.rand_like(grad) < 0.1] = 0.0
        if case.cls is optim.SparseAdam:
            grad[torch.rand(len(grad)) < 0.5] = 0.0
            return grad.to_sparse(1)
        return grad

    return optree.tree_map(one, params)


def clone(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def same_bits(left: Any, right: Any) -> bool:
    """Whether two trees are alike down to the sign of zero and the payload of NaN."""
    lefts, left_spec = optree.tree_flatten(left)
    rights, right_spec = optree.tree_flatten(right)
    return left_spec == right_spec and all(map(_same_bits, lefts, rights))


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.is_sparse:
        left, right = left.to_dense(), right.to_dense()
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.detach().flatten().view(torch.uint8), right.detach().flatten().view(torch.uint8))


class TorchRun:
    """The slow twin: torch's own optimizer on its own copies."""

    def __init__(self, case: Case, params: Any, **kwargs: Any) -> None:
        leaves, self.spec = optree.tree_flatten(params)
        self.leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        self.optimizer = case.cls(self.leaves, **case.kwargs, **kwargs)

    def step(self, grads: Any) -> None:
        for leaf, grad in zip(self.leaves, self.spec.flatten_up_to(grads), strict=True):
            leaf.grad = None if grad is None else grad.clone()
        self.optimizer.step()

    @property
    def params(self) -> Any:
        return self.spec.unflatten([leaf.detach() for leaf in self.leaves])

    def state_of(self, index: int) -> dict[str, Any]:
        return dict(self.optimizer.state[self.leaves[index]])
