from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Muon, SparseAdam

from ltx.errors import LtxError, OptimError
from ltx.optim import from_torch


@pytest.mark.parametrize(
    ("cls", "kwargs", "text"),
    [
        (torch.optim.LBFGS, {}, "from_torch(LBFGS): LBFGS evaluates the loss several times a step through a closure"),
        (AdamW, {"params": []}, "from_torch(AdamW): parameters aren't given here but to init(params) and apply(...)."),
        (
            SGD,
            {"beta": 1, "weight_decai": 2},
            "from_torch(SGD): no argument beta, weight_decai; allowed are lr, momentum, dampening, weight_decay, "
            "nesterov, maximize, foreach, differentiable, fused.",
        ),
        (
            Adam,
            {"betas": (2.0, 0.9)},
            "from_torch(Adam): Adam refused its arguments: Invalid beta parameter at index 0",
        ),
        (Adam, {"lr": -1.0}, "from_torch(Adam): Adam refused its arguments: Invalid learning rate: -1.0"),
        (SGD, {"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        (Adam, {"fused": True, "foreach": True}, "`fused` and `foreach` cannot be `True` together."),
        (
            Adam,
            {"lr": torch.tensor(0.5)},
            "from_torch(Adam): lr must be a number or a function of the step, got tensor(0.5000). A schedule may "
            "return a tensor: lr=lambda count: tensor.",
        ),
        (Adam, {"lr": "0.1"}, "lr must be a number or a function of the step, got '0.1'."),
        (Adam, {"betas": (torch.tensor(0.5), 0.9)}, "from_torch(Adam): betas holds a tensor; optimizers compare by"),
        (Adam, {"eps": {}}, "from_torch(Adam): eps must be hashable, got {}."),
        (
            torch.nn.Linear,
            {},
            "from_torch expected a class of torch.optim, got <class 'torch.nn.modules.linear.Linear'>",
        ),
        (SGD([torch.ones(1)]), {}, "Pass the class, SGD."),
    ],
)
def test_refused_when_made(cls: Any, kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(OptimError, match=re.escape(text)):
        from_torch(cls, **kwargs)


@pytest.mark.parametrize(
    ("cls", "kwargs", "leaf", "text"),
    [
        (
            Muon,
            {},
            torch.ones(3),
            "from_torch(Muon): leaf 'layers.1' is float32[3]: Muon takes 2-D parameters only; give the others to an "
            "optimizer of their own, such as AdamW.",
        ),
        (Muon, {}, torch.ones(3, 3, dtype=torch.complex64), "leaf 'layers.1' is complex64[3, 3]: Muon takes real"),
        (AdamW, {}, torch.ones(3).int(), "leaf 'layers.1' is int32[3]: parameters must be floating or complex."),
        (
            AdamW,
            {},
            torch.ones(3).to_sparse(),
            "leaf 'layers.1' is float32[3] (sparse in 1 dim): parameters must be dense.",
        ),
        (
            AdamW,
            {"fused": True},
            torch.ones(3, dtype=torch.complex64),
            "leaf 'layers.1' is complex64[3]: torch has no fused kernel that works for it on cpu; leave fused out.",
        ),
        (SGD, {"fused": True}, torch.ones(3).half(), "leaf 'layers.1' is float16[3]: torch has no fused kernel that"),
        (AdamW, {}, 3, "params must be a tree of tensors, but leaf 'layers.1' is of type int."),
    ],
)
def test_refused_parameters(cls: Any, kwargs: dict[str, Any], leaf: Any, text: str) -> None:
    with pytest.raises(LtxError, match=re.escape(text)):
        from_torch(cls, **kwargs).init({"layers": [torch.ones(2, 2), leaf]})


def test_sparse_adam_wants_sparse_gradients() -> None:
    params = {"table": torch.ones(2, 2)}
    optimizer = from_torch(SparseAdam)
    text = "from_torch(SparseAdam): the gradient of leaf 'table' is dense, but SparseAdam takes sparse gradients only"
    with pytest.raises(OptimError, match=re.escape(text)):
        optimizer.apply(params, optimizer.init(params), params)


def test_capturable_is_passed_on() -> None:
    optimizer = from_torch(Adam, capturable=True, fused=False)
    params = {"w": torch.ones(2)}
    with pytest.raises(AssertionError, match="capturable=True"):  # torch's own word on CPU tensors
        optimizer.apply(params, optimizer.init(params), params)


def test_schedulers_of_torch_are_refused_as_rates() -> None:
    schedulers = torch.optim.lr_scheduler
    instance = schedulers.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 1)
    for lr, named in ((schedulers.CosineAnnealingLR, "CosineAnnealingLR"), (instance, "a StepLR")):
        with pytest.raises(OptimError, match=rf"from_torch\(AdamW\): lr is {named}.* Give a function of the number"):
            from_torch(AdamW, lr=lr)  # type: ignore[arg-type]


@pytest.mark.parametrize("grad", [None, torch.ones(1)], ids=["none", "tensor"])
def test_parameters_must_be_tensors(grad: Any) -> None:
    optimizer = from_torch(torch.optim.SGD)
    with pytest.raises(OptimError, match=r"params: leaf .* must be a tensor, got 2\."):
        optimizer.apply({"w": grad}, optimizer.init({"w": torch.ones(1)}), {"w": 2})
