"""Communication hooks on a GPU, held to what they give on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import ltx
from ltx import hooks
from tests.contract.hooks.table import HOOKS
from tests.gpu.device import ADAMW, DEVICE, batch, check, halves_of, model, on_cpu, params_of, plain, without_waiting
from tests.streams.test_steps import loss_of
from tests.train_on import loop_of_torch, reduced, trained

SHAPES = {"weight": (24, 20), "bias": (7,), "scale": (), "kernel": (6, 3, 5), "none": (0, 4)}
STEPS = 3
#: Sums in half precision are rounded at other places on another device.
TOLERANCES = {"powersgd in bf16": 2.0**-5}


def drawn(*ranks: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn((*ranks, *shape), dtype=torch.float64, generator=generator)

    return [{name: normal(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]


def by_hook(hook: hooks.CommHook, grads: list[dict[str, Tensor]]) -> Any:
    """(results by step, the leaves of the last state)"""
    results, state = reduced(ltx.DDPStrategy(comm_hook=hook, bucket_bytes=1 << 10, first_bucket_bytes=1 << 10), grads)
    return results, state.leaves


def held_to(expected: Any, found: Any, name: str) -> None:
    tolerance = TOLERANCES.get(name, 1e-9) if DEVICE == "cuda" else 1e-9
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", HOOKS)
def test_one_rank(name: str, workers: Any) -> None:
    """Over NCCL as over gloo, which takes tensors on the host."""

    def run() -> Any:
        grads = drawn()
        on_device = [{key: x.to(DEVICE) for key, x in given.items()} for given in grads]
        expected = by_hook(HOOKS[name], grads)
        by_hook(HOOKS[name], on_device)
        with without_waiting() if DEVICE == "cuda" else nullcontext():  # on the CPU codecs have other ways
            found = by_hook(HOOKS[name], on_device)
        return on_cpu(found), on_cpu(expected)

    ((found, expected),) = workers.run(run)
    held_to(expected, found, name)


@pytest.mark.parametrize("name", HOOKS)
def test_simulated_ranks(name: str, workers: Any) -> None:
    def run() -> Any:
        def each(*grads: dict[str, Tensor]) -> Any:
            return by_hook(HOOKS[name], list(grads))

        grads = drawn(3)
        on_device = [{key: x.to(DEVICE) for key, x in given.items()} for given in grads]
        return on_cpu(ltx.vmap(each)(*on_device)), ltx.vmap(each)(*grads)

    ((found, expected),) = workers.run(run)
    held_to(expected, found, name)


def test_a_hook_of_torch(workers: Any) -> None:
    def run() -> Any:
        strategy = ltx.DDPStrategy(comm_hook=hooks.from_torch(fp16_compress_hook, dist.group.WORLD))
        step = ltx.data_parallel(loss_of(model()), strategy, axis=dist.group.WORLD)
        found = trained(step, ADAMW, params_of(model()), map(batch, range(STEPS)))
        return on_cpu(found.params), plain(STEPS, halves_of)

    check(workers, run)


@pytest.mark.parametrize("hook", [hooks.FP16(), hooks.ByteGrad(), hooks.PowerSGD(1, start_step=0)])
def test_a_hook_under_ddp(hook: hooks.CommHook, workers: Any) -> None:
    def run() -> Any:
        module, strategy = model(), ltx.DDPStrategy(comm_hook=hook, bucket_bytes=1 << 24, first_bucket_bytes=1 << 24)
        ddp = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=25)
        ddp.register_comm_hook(dist.group.WORLD, hooks.to_torch(hook, ddp))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        sgd, batches = ltx.optim.from_torch(torch.optim.SGD, lr=0.1), [batch(step) for step in range(STEPS)]
        loop_of_torch(optimizer, lambda x, y: nn.functional.cross_entropy(ddp(x), y), batches)
        found = trained(loss_of(model()), sgd, params_of(model()), batches, strategy)
        return on_cpu(params_of(module)), on_cpu(found.params)

    ((found, expected),) = workers.run(run)
    assert all(bool(x.isfinite().all()) for x in found.values())
    if not isinstance(hook, hooks.ByteGrad):  # DDP's buckets hold parameters in another order, and so other grids
        torch.testing.assert_close(found, expected)
