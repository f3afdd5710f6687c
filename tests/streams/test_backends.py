"""What a group's backends are, and worlds whose group has none for tensors on the host."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import ltx
from ltx import extend
from ltx.core import comm
from ltx.core.comm import backends, operations
from ltx.core.comm.backends import Backends, backends_of, default_backend
from ltx.core.comm.registry import GroupAxis
from ltx.core.ranks.axis import axes_in_scope, set_world_axes
from ltx.core.training.settings import check_devices
from ltx.core.world.world import world_of
from ltx.errors import PeerLostError, StepError
from ltx.runtime.launchers import placement_from_env
from tests.contract.runtime.environments import TORCHRUN
from tests.kinds import OnNewAxis, Ranks
from tests.train_on import raised_by


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("gloo", Backends()),
        ("cpu:gloo,cuda:nccl", Backends("gloo", "nccl", "cuda")),
        ("nccl", Backends("gloo", "nccl", "cuda")),
        ("cuda:gloo", Backends()),
        ("mpi", Backends("mpi")),
        ("cpu:gloo,xpu:xccl,cuda:nccl", Backends("gloo", "nccl", "cuda")),
        ("cpu:blocks,cuda:orders", Backends("blocks", "orders", "cuda")),
        ("cpu:orders", Backends("gloo", "orders", "cpu")),
    ],
)
def test_backends_of_a_group(config: str, expected: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: str(dist.BackendConfig(dist.Backend(config))))
    monkeypatch.setattr(backends, "accelerator", lambda: "cuda")
    monkeypatch.setattr(backends, "HOST_BLOCKING", {*extend.comm.HOST_BLOCKING, "blocks"})
    found: Any = backends_of(SimpleNamespace())  # type: ignore[arg-type]
    assert found == expected


def test_nccl_s_watchdog_leaves_it_to_ltx(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}  # the user's own stays
    monkeypatch.setattr(os, "environ", environment)
    backends.set_up_watchdog()
    assert environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    assert [name for name in environment if f'"{name}"' not in header.read_text()] == []


def test_default_backends() -> None:
    assert default_backend(torch.device("cpu")) == "gloo"
    assert default_backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert default_backend(torch.device("xpu")) == "cpu:gloo,xpu:xccl"


def test_a_group_without_a_backend_for_the_host(ranks: Ranks) -> None:
    """An adopted ``cuda:gloo`` or NCCL group: what goes over the host has gloo groups of ltx's own."""

    def run() -> Any:
        before = axes_in_scope()
        group = dist.new_group(backend="cuda:gloo")
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(1), group=group)
        axis = comm.open_axis("data", group, make=partial(GroupAxis, owns_group=True))
        set_world_axes((axis,))
        try:
            ltx.barrier("here")
            step = ltx.data_parallel(lambda w, x: (w * x).sum())
            grads = torch.func.grad(step)(torch.ones(2), torch.ones(2) * ltx.axis_index())
            return ltx.psum(torch.ones(2)), ltx.broadcast_object("x", 1), grads
        finally:
            set_world_axes(before)
            axis.close()

    for total, told, grads in ranks(2).run(run):
        assert (total.tolist(), told, grads.tolist()) == ([2.0, 2.0], "x", [0.5, 0.5])


def test_a_bound_world_isn_t_split(ranks: Ranks) -> None:
    """torch splits a world that is bound to a device, for which ranks are needed that aren't in the group."""

    def run() -> Any:
        world: Any = dist.group.WORLD
        bound, world.bound_device_id = world.bound_device_id, torch.device("cuda", 0)
        try:
            if dist.get_rank() == 1:
                return None
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(c10d, "_get_split_source", pytest.fail)
                axis = ltx.axis_from_group([0, 2])
            with axis:
                return ltx.psum(torch.ones(1), axis).item(), str(world.bound_device_id)
        finally:
            world.bound_device_id = bound

    assert list(ranks(3).run(run)) == [(2.0, "cuda:0"), None, (2.0, "cuda:0")]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Unsupported dtype"), RuntimeError("illegal access")],
)
def test_what_isn_t_the_network_is_raised_as_it_is(error: RuntimeError, on_new_axis: OnNewAxis) -> None:
    def run() -> str:
        def broken(*_: Any, **__: Any) -> Any:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operations.dist, "all_reduce", broken)
            patch.setenv("LTX_SHARED_MEMORY", "0")
            axis_comm: Any = axes_in_scope()[0].comm
            raised = raised_by(axis_comm.background.issue, "psum", torch.ones(2), "a sum")
            axis_comm.background.failed = None  # which it is for want of memory; here all ranks have issued nothing
        return raised.partition(":")[0]

    assert list(on_new_axis(run)) == [type(error).__name__] * 2
    assert not isinstance(error, PeerLostError)


def test_a_state_is_where_its_rank_computes() -> None:
    axis: Any = SimpleNamespace(rank=1, ranks=SimpleNamespace(device=torch.device("cuda", 1), overlaps=True))
    with pytest.raises(StepError, match=r"rank 1 computes on cuda:1, and params leaf 'w' is on cpu\. .*ltx.to_device"):
        check_devices(axis, {"w": torch.ones(1)}, "params")
    check_devices(axis, None, "buffers")


@pytest.mark.parametrize(("shown", "index"), [("3", 0), ("0,1", 1), (None, 1)])
def test_a_rank_that_sees_one_device_takes_it(shown: str | None, index: int) -> None:
    environ = TORCHRUN if shown is None else {**TORCHRUN, "CUDA_VISIBLE_DEVICES": shown}
    count = 1 if shown == "3" else 2
    assert world_of(placement_from_env(environ), cuda_devices=count).device == torch.device("cuda", index)
