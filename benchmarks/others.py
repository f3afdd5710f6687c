"""The step of :mod:`benchmarks.step_time` in other libraries: Lightning Fabric and Hugging Face's accelerate."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.models import cross_entropy
from benchmarks.ranks import Variant


def fabric_step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Variant:
    """Fabric's DDP strategy, as its documentation has it, in the process group that is up."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = DDPStrategy(gradient_as_bucket_view=True)
        fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
        fabric.launch()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    return _step(model, optimizer, fabric.backward, inputs, targets)


def accelerate_step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Variant:
    """accelerate's loop, as its documentation has it, in the process group that is up."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    return _step(model, optimizer, accelerator.backward, inputs, targets)


def _step(
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[torch.Tensor], None],
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> Variant:
    def step() -> None:
        optimizer.zero_grad()
        backward(cross_entropy(model(inputs), targets))
        optimizer.step()

    return step
