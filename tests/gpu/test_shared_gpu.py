"""Two processes on one GPU: over gloo they train there, by way of the host; over NCCL where it takes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ltx
from tests.contract.conformance.test_properties import each_fixed
from tests.gpu.device import ADAMW, DEVICE, batch, loss_of, model, needs_cuda, on_cpu, params_of, plain
from tests.gpu.processes import on_two
from tests.train_on import loop_of_torch

#: name -> (what a rank does with its x of shape (2, 3), that of all ranks' x, stacked)
COLLECTIVES = {
    name: each for name, each in each_fixed(2, dim=0).items() if name not in ("pmean", "pvary", "weighted_mean")
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def drawn(dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 9, (2, 2, 3), generator=torch.Generator().manual_seed(3)).to(dtype)


def collectives() -> dict[str, tuple[str, Tensor]]:
    rank, found = ltx.world().rank, {}
    for name, (collective, _) in COLLECTIVES.items():
        for dtype in DTYPES:
            result = collective(drawn(dtype)[rank].to(DEVICE))
            found[f"{name} of {dtype}"] = result.device.type, result.cpu()
    return found


def test_collectives(tmp_path: Path) -> None:
    """They go through the host, and come back to where they were given."""
    for rank, found in enumerate(on_two(collectives, tmp_path)):
        assert isinstance(found, dict), found
        for name, (_, reference) in COLLECTIVES.items():
            for dtype in DTYPES:
                where, result = found[f"{name} of {dtype}"]
                assert where == DEVICE
                expected = reference(drawn(dtype))[rank].to(dtype)
                torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=f"{name} of {dtype} on rank {rank}")


def trained(overlap: Any, objects: bool) -> dict[str, Tensor]:
    rank = ltx.world().rank
    step = ltx.data_parallel(loss_of(model()), ltx.DDPStrategy(bucket_bytes=1 << 14))
    train = ltx.train_step(step, ADAMW, overlap=overlap)
    state = train.init(params_of(model()))
    for number in range(4):
        x, y = batch(number)
        state, _ = train(state, x[rank::2], y[rank::2])
        if objects:
            assert [each["x"].device.type for each in ltx.all_gather_object({"x": x[:1] + rank})] == [DEVICE] * 2
            assert ltx.broadcast_object({"x": x[:1] + rank}, 1)["x"].tolist() == (x[:1] + 1).tolist()
    return on_cpu(train.finish(state).params)


def as_alone(found: Any, workers: Any) -> None:
    """Two ranks have come to the same, and to what one process comes to on the whole batch."""
    (expected,) = workers.run(plain, 4)
    first, second = found
    assert isinstance(first, dict), first
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, expected)


@pytest.mark.parametrize("overlap", ["backward", "update"])
def test_a_step_on_half_the_batch_each(overlap: str, workers: Any, tmp_path: Path) -> None:
    as_alone(on_two(trained, tmp_path, overlap, overlap == "backward"), workers)


def under_ddp() -> dict[str, Tensor]:
    module = model()
    ddp = nn.parallel.DistributedDataParallel(module)
    ddp.register_comm_hook(None, ltx.hooks.to_torch(ltx.hooks.AllReduce(), ddp))
    optimizer, rank = torch.optim.AdamW(module.parameters(), lr=1e-2), ltx.world().rank
    batches = [[part[rank::2] for part in batch(number)] for number in range(4)]
    loop_of_torch(optimizer, lambda x, y: nn.functional.cross_entropy(ddp(x), y), map(tuple, batches))
    return on_cpu(params_of(module))


def test_a_hook_under_ddp(workers: Any, tmp_path: Path) -> None:
    as_alone(on_two(under_ddp, tmp_path), workers)


@needs_cuda
@pytest.mark.parametrize("told", [False, True])
def test_ranks_of_nccl_on_one_gpu(told: bool, workers: Any, tmp_path: Path) -> None:
    """NCCL 2.30 takes them where it is told to; else both are refused by name."""
    asked = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"} if told else {}
    # Each rank is shown one GPU alone, so that it takes the GPU for its own.
    shown = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    found = on_two(trained, tmp_path, "backward", False, backend=None, **shown, **asked)
    if told and torch.cuda.nccl.version() >= (2, 30):  # the library is asked, and no device
        as_alone(found, workers)
        return
    refused = "are both on one device, and cpu:gloo,cuda:nccl takes one rank a device."
    for rank, text in zip(range(2), found, strict=True):
        assert text.partition(" Start")[0] == f"WorldError: rank {rank}: ranks 0 and 1 {refused}"
