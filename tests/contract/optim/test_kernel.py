from __future__ import annotations

from typing import Any

import torch

from ltx.optim import from_torch


class Lion(torch.optim.Optimizer):
    """An optimizer of one's own, built as torch's are."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    def _init_group(self, group: Any, params: list[Any], grads: list[Any], momenta: list[Any]) -> None:
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                params.append(p)
                grads.append(p.grad)
                momenta.append(state["momentum"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lists: list[list[Any]] = [[], [], []]
            self._init_group(group, *lists)
            for p, g, m in zip(*lists, strict=True):
                p.sub_(m.lerp(g, 0.1).sign(), alpha=group["lr"])
                m.lerp_(g, 1 - group["beta"])


def test_classes_of_ones_own(seed: int) -> None:
    param = torch.randn(5, requires_grad=True)
    theirs = Lion([param], beta=0.5)
    optimizer = from_torch(Lion, beta=0.5)
    params = param.detach().clone()
    state = optimizer.init(params)
    for _ in range(3):
        param.grad = torch.randn(5)
        params, state = optimizer.apply(param.grad.clone(), state, params, donate=True)
        theirs.step()
    assert torch.equal(params, param)
    assert repr(optimizer) == "from_torch(Lion, beta=0.5)"


def test_the_class_itself_is_left_alone() -> None:
    step = torch.optim.Adam.step
    from_torch(torch.optim.Adam)
    assert torch.optim.Adam.step is step
