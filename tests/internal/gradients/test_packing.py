"""Packing by foreach kernels, which accelerators use, is packing leaf by leaf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ltx import hooks
from ltx.core.gradients import comm_hook
from ltx.core.gradients.reduction import Bucket, LeafState

HOOKS = [hooks.AllReduce(), hooks.FP16(), hooks.error_feedback(hooks.ByteGrad()), hooks.PowerSGD()]
SHAPES = [(), (3,), (4, 5), (0,), (2, 1, 3), (100, 100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_it_comes_to_the_same(hook: hooks.CommHook, dtype: torch.dtype, seed: int) -> None:
    grads = [torch.randn(shape).to(dtype) for shape in SHAPES]
    grads[2] = grads[2].T.contiguous().T  # as of a linear layer
    bucket = Bucket.of(0, grads)
    states: list[LeafState] = [{k: torch.randn_like(x) for k, x in hook.init(g).items()} for g in grads]
    expected = comm_hook.pack(grads, bucket, hook, 3, states)
    flat = torch.empty_like(expected)
    terms = [hook.extra_terms(state, 3) for state in states]
    comm_hook._pack_by_foreach(grads, flat, bucket, hook.scale(3), terms)
    torch.testing.assert_close(flat, expected)


def test_accelerators_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(comm_hook, "_pack_by_foreach", lambda *arguments: used.append(arguments))
    leaf: Tensor = torch.ones(2, device="meta")
    bucket = Bucket.of(0, [leaf])
    comm_hook.pack([leaf], bucket, hooks.AllReduce(), 2, [{}])
    assert len(used) == 1
