"""The fused CPU kernels ignore strides; ours must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ltx.optim import from_torch
from tests.contract.optim.cases import FUSED_CASES, Case

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 6, 3, 2),
    "transposed": lambda: torch.randn(6, 4, 3, 2).transpose(0, 1),
    "channels_last": lambda: torch.randn(4, 6, 3, 2).to(memory_format=torch.channels_last),
    "strided": lambda: torch.randn(8, 6, 3, 2)[::2],
    "expanded": lambda: torch.randn(1, 6, 1, 1).expand(4, 6, 3, 2),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("param_layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("case", FUSED_CASES, ids=repr)
def test_any_layout(case: Case, param_layout: str, grad_layout: str, donate: bool, seed: int) -> None:
    params = {"a": LAYOUTS[param_layout](), "b": torch.randn(5)}
    straight = {key: param.clone(memory_format=torch.contiguous_format) for key, param in params.items()}
    optimizer = from_torch(case.cls, **case.kwargs)
    state, straight_state = optimizer.init(params), optimizer.init(straight)
    for _ in range(3):
        grads = {"a": LAYOUTS[grad_layout](), "b": torch.randn(5)}
        params, state = optimizer.apply(grads, state, params, donate=donate)
        flat_grads = {key: grad.contiguous() for key, grad in grads.items()}
        straight, straight_state = optimizer.apply(flat_grads, straight_state, straight, donate=True)
    # Where vector lanes fall depends on the layout, and so does the last bit.
    torch.testing.assert_close(params, straight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.per_param, straight_state.per_param, rtol=1e-5, atol=1e-6)
