"""The device that the tests run on, and what they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ltx
from tests.streams.backend import log
from tests.streams.test_steps import OF_LAST_STEP, ON_HOST, loss_of

DEVICE = os.environ.get("LTX_TEST_DEVICE", "cuda")
needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="needs CUDA")

#: Several buckets of a small model. At world size 1 exact sums are left out, and with them the whole schedule.
SMALL = {"bucket_bytes": 1 << 14, "first_bucket_bytes": 1 << 12}
HALVES = ltx.DDPStrategy(comm_hook="fp16", **SMALL)
ADAMW = ltx.optim.from_torch(torch.optim.AdamW, lr=1e-2)
FUSED_ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)

Loss = Callable[..., Any]


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within it whatever has the host wait for the device raises, as far as torch notices it.

    On the CPU numbers that the host reads do, but for those that it has to (see :mod:`tests.streams.test_steps`).
    """
    if DEVICE != "cuda":
        log().clear()
        yield
        assert [line for line in log().reads if ON_HOST not in line and OF_LAST_STEP not in line] == []
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    return nn.Sequential(*layers).to(DEVICE)


def batch(step: int, samples: int = 16) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x, y = torch.randn(samples, 32, generator=drawn), torch.randint(8, (samples,), generator=drawn)
    return x.to(DEVICE), y.to(DEVICE)


def params_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def on_cpu(value: Any) -> Any:
    return ltx.tree.map(lambda x: x.detach().cpu().clone() if isinstance(x, Tensor) else x, value)


def as_fp16_gives(grads: Iterable[Tensor]) -> list[Tensor]:
    return [g.half().to(g.dtype) for g in grads]


def grads_of(loss: Loss, params: dict[str, Tensor], step: int) -> list[Tensor]:
    """Those of a step's batch, by torch alone."""
    return list(torch.autograd.grad(loss(params, *batch(step)), list(params.values())))


def halves_of(loss: Loss, params: dict[str, Tensor], step: int) -> list[Tensor]:
    return as_fp16_gives(grads_of(loss, params, step))


def check(workers: Any, run: Callable[[], tuple[Any, Any]], **close: float) -> None:
    """The two values that `run` gives on a worker are equal, up to what `close` says to torch.testing.assert_close."""
    ((found, expected),) = workers.run(run)
    torch.testing.assert_close(found, expected, **close)


def plain(
    steps: int,
    by: Callable[[Loss, dict[str, Tensor], int], list[Tensor] | None] = grads_of,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = FUSED_ADAMW,
) -> dict[str, Tensor]:
    """Parameters after `steps` steps of torch alone, with the gradients that `by` gives; one with None is left out."""
    module = model()
    loss, params = loss_of(module), {name: nn.Parameter(p) for name, p in params_of(module).items()}
    update = optimizer(list(params.values()))
    for step in range(steps):
        if (grads := by(loss, params, step)) is not None:
            for param, grad in zip(params.values(), grads, strict=True):
                param.grad = grad
            update.step()
    return on_cpu(params)
