"""A GPT in half precision, at a size that keeps a GPU busy: it learns, and as torch's own loop does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import ltx
from benchmarks.gpt import GPT
from tests.gpu.device import DEVICE
from tests.train_on import trained

BIG = DEVICE == "cuda"  # 152 M parameters, 16,384 tokens a step
VOCABULARY, CONTEXT, SAMPLES = (64, 512, 32) if BIG else (64, 16, 16)
SIZES = {"width": 1024, "layers": 12, "heads": 16} if BIG else {"width": 32, "layers": 2, "heads": 2}
STEPS, LR = 20, 3e-4 if BIG else 1e-2
SCALE = 2.0**12


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(VOCABULARY, CONTEXT, **SIZES).to(DEVICE)


def tokens(step: int) -> Tensor:
    """Sequences in which each token has one that follows it."""
    following = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    found = [torch.randint(VOCABULARY, (SAMPLES,), generator=torch.Generator().manual_seed(step))]
    for _ in range(CONTEXT):
        found.append(following[found[-1]])
    return torch.stack(found, 1).to(DEVICE)


def loss_of(module: GPT) -> Any:
    def loss(params: Any, x: Tensor) -> Tensor:
        return cross_entropy(functional_call(module, params, (x[:, :-1],)).flatten(0, 1).float(), x[:, 1:].flatten())

    return loss


def by_ltx(dtype: torch.dtype) -> list[float]:
    module = model()
    hook = "bf16" if dtype is torch.bfloat16 else "fp16"
    scale = ltx.DynamicLossScale(init=SCALE, growth_interval=10_000) if dtype is torch.float16 else None
    step = ltx.data_parallel(loss_of(module), ltx.DDPStrategy(comm_hook=hook))
    step = ltx.mixed_precision(step, ltx.Precision(compute=dtype, loss_scale=scale))
    adamw = ltx.optim.from_torch(torch.optim.AdamW, lr=LR)
    return trained(step, adamw, module, map(tokens, range(STEPS))).losses.tolist()


def by_torch(dtype: torch.dtype) -> list[float]:
    """The same with torch alone: half-precision copies of the parameters, and a scaled loss."""
    module = model()
    loss, params = loss_of(module), dict(module.named_parameters())
    optimizer, losses = torch.optim.AdamW(params.values(), lr=LR, fused=True), []
    scale = SCALE if dtype is torch.float16 else 1.0
    for number in range(STEPS):
        value = loss({name: p.to(dtype) for name, p in params.items()}, tokens(number))
        optimizer.zero_grad()
        (value * scale).backward()
        for p in params.values():
            p.grad.mul_(1 / scale)
        optimizer.step()
        losses.append(value.detach())
    return [float(loss) for loss in losses]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training(dtype: torch.dtype, workers: Any) -> None:
    ((losses, expected),) = workers.run(lambda: (by_ltx(dtype), by_torch(dtype)))
    # Gradients are rounded once more on their way. That moves the first losses by little; later ones go their own ways.
    torch.testing.assert_close(losses[:10], expected[:10], rtol=0.01, atol=0)
    assert min(losses) < 0.9 * losses[0], (losses, expected)
