"""A table of what may change between two calls of ``ltx.grad`` or ``torch.func.grad``, which keep nothing but answers.

A step keeps what its last call has asked. Beside it goes the same step made anew, which has asked nothing: after each
change both must come to the same bits, or to the same error.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ltx
from tests.internal.training.test_between_steps import loss
from tests.kinds import Params, Ranks
from tests.train_on import inner, on_ranks

GRADS: dict[str, Callable[..., Any]] = {"ltx.grad": ltx.grad, "torch.func.grad": torch.func.grad}


class Later(ltx.DDPStrategy):
    """Another hook at step 1, which `cycle` doesn't say."""

    def hook(self, step: int) -> Any:
        return ltx.hooks.BF16() if step else super().hook(step)


@dataclass
class Row:
    """What changes after three calls: the parameters, the batch, the step, the transform, or what is around."""

    params: Callable[[Params], Any] = lambda params: params
    batch: Callable[[Tensor], Any] = lambda x: x
    step: Callable[[Any], Any] = lambda step: step
    grad: Callable[[Any], Any] = lambda grad: grad
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    strategy: Any = None


def of(**leaves: Tensor) -> Callable[[Params], Params]:
    return lambda params: {**params, **leaves}


def later(step: Any, grad: Any) -> Any:
    """The gradients at the communication state of one step more."""

    def at(params: Params, x: Tensor) -> Any:
        state = step.init(params).advanced()
        if grad is ltx.grad:
            return grad(step)(params, x, sync_state=state)[0]
        return grad(step)(ltx.Synced(params, state), x).params

    return at


ROWS = {
    "nothing": Row(),
    "shapes": Row(params=of(w=torch.ones(5, 9), v=torch.ones(9))),
    "as many elements in another shape": Row(params=lambda p: {**p, "b": p["b"].view(1)}),
    "a dtype": Row(params=lambda p: {**p, "b": p["b"].double()}),
    "dtypes": Row(params=partial(ltx.tree.map, Tensor.double)),
    "the structure": Row(params=lambda p: [p["w"], p["v"], p["b"]]),
    "one leaf more": Row(params=of(unused=torch.ones(2))),
    "a leaf that isn't dense": Row(params=of(b=torch.ones(1).to_sparse())),
    "an integer among the leaves": Row(params=of(b=torch.ones((), dtype=torch.int64))),
    "a leaf that requires grad": Row(params=lambda p: {**p, "b": p["b"].clone().requires_grad_()}),
    "a leaf that is a Parameter": Row(params=lambda p: {**p, "b": torch.nn.Parameter(p["b"].clone())}),
    "a batch of another length": Row(batch=lambda x: x[:2]),
    "a weighted loss": Row(batch=lambda x: x[:3]),
    "a captured parameter": Row(batch=lambda x: torch.cat([x, x[:1]])),
    "a batch that requires grad": Row(batch=lambda x: x.clone().requires_grad_()),
    "a batch of another dtype": Row(batch=Tensor.double),
    "a copy": Row(step=copy.deepcopy),
    "another strategy": Row(step=lambda step: replace(step, strategy=ltx.DDPStrategy(comm_hook="fp16"))),
    "gradients stay local": Row(step=ltx.block_backward_sync),
    "means as outputs": Row(step=lambda step: replace(step, outputs="mean")),
    "another transform": Row(grad=lambda grad: torch.func.grad if grad is ltx.grad else ltx.grad),
    "a jacobian": Row(grad=lambda _: torch.func.jacrev),
    "derivatives of derivatives": Row(grad=lambda _: torch.func.hessian),
    "each row": Row(grad=lambda grad: lambda step: torch.func.vmap(grad(step), (None, 0)), batch=lambda x: x[:, None]),
    "simulated ranks": Row(grad=lambda grad: lambda step: ltx.vmap(grad(step), (None, 0)), batch=lambda x: x[:, None]),
    "the step of a hook": Row(strategy=Later(), grad=lambda grad: partial(later, grad=grad)),
    "debug checks": Row(around=ltx.debug_checks),
    "without gradients": Row(around=torch.no_grad),
    "inference mode": Row(around=torch.inference_mode),
    "autocast": Row(around=lambda: torch.autocast("cpu", torch.bfloat16)),
}


def outcome(name: str, grad: str, anew: bool) -> Any:
    """The bits of the gradients of a call after the change, or what was raised."""
    row, transform = ROWS[name], GRADS[grad]
    step = ltx.data_parallel(loss, row.strategy)
    draw = torch.Generator().manual_seed(3)
    params = {"w": torch.randn(5, 7, generator=draw), "v": torch.randn(7, generator=draw), "b": torch.ones(())}
    x = torch.randn(4, 5, generator=draw.manual_seed(int(ltx.axis_index())))
    for _ in range(3):
        transform(step)(params, x)
    with row.around():
        step = row.step(replace(step) if anew else step)
        try:
            found = row.grad(transform)(step)(row.params(params), row.batch(x))
            return [leaf.detach().clone() for leaf in ltx.tree.flatten(found)[0]]
        except Exception as error:
            return type(error).__name__, str(error)


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("name", ROWS)
def test_a_call_after_a_change(name: str, grad: str, ranks: Ranks) -> None:
    for kept, asked in zip(*(ranks(2).run(outcome, name, grad, anew) for anew in (False, True)), strict=True):
        assert type(kept) is type(asked), (kept, asked)
        if isinstance(asked, tuple):
            assert kept == asked
        else:
            torch.testing.assert_close(kept, asked, rtol=0, atol=0)


@on_ranks(2)
def test_another_axis_of_the_name() -> None:
    step = ltx.data_parallel(inner, axis="here")
    for _ in range(2):
        with ltx.axis_from_group(dist.new_group([0, 1]), "here"):
            for _ in range(2):
                assert ltx.grad(step)(torch.ones(2), torch.arange(2.0) + ltx.axis_index()).tolist() == [0.5, 1.5]


@pytest.mark.parametrize("grad", GRADS)
@on_ranks(2)
def test_a_steady_call_asks_nothing_anew(grad: str) -> None:
    module, counts = importlib.import_module("ltx.core.transforms.marking"), []
    step, w = ltx.data_parallel(inner), torch.ones(2)
    for _ in range(3):
        with mock.patch.object(module, "make_plan", wraps=module.make_plan) as asked:
            GRADS[grad](step)(w, torch.ones(2))
        counts.append(asked.call_count)
    assert counts == [1, 0, 0]
