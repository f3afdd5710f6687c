"""Ranks that compute on one accelerator are refused on all of them, where the backend takes one rank a device."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ltx import World
from ltx.core.comm.store_exchange import StoreExchange
from ltx.core.world import groups
from ltx.errors import WorldError

NCCL = "cpu:gloo,cuda:nccl"


def world(rank: int, size: int = 3, backend: str = NCCL) -> World:
    return World(rank, size, rank, 0, 1, torch.device("cuda", 0), backend, "torchrun", size)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """Where ranks 1 and 2 have said that they have one device."""
    store = dist.HashStore()
    host = groups.socket.gethostname()
    for rank, uuid in enumerate("abb"):
        store.set(f"device/{rank}", json.dumps(f"{host} {uuid}"))
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    return store


def refuse(rank: int, meeting: dist.HashStore, monkeypatch: pytest.MonkeyPatch, backend: str = NCCL) -> None:
    device = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(uuid="abb"[rank]))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    exchange = StoreExchange(cast(Any, meeting), rank, 3, 5.0, list)
    groups._refuse_shared_devices(exchange, world(rank, backend=backend))


@pytest.mark.parametrize("rank", range(3))
def test_all_ranks_raise(rank: int, meeting: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorldError, match=rf"rank {rank}: ranks 1 and 2 are both on one device, .*CUDA_VISIBLE_DEVICES"):
        refuse(rank, meeting, monkeypatch)


def test_over_gloo_they_may(meeting: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(1, meeting, monkeypatch, "gloo")


@pytest.mark.parametrize(("version", "refused"), [((2, 28, 9), True), ((2, 30, 3), False)])
def test_nccl_that_is_told_to(
    version: tuple[int, ...], refused: bool, meeting: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    if refused:
        with pytest.raises(WorldError, match="both on one device"):
            refuse(1, meeting, monkeypatch)
    else:
        refuse(1, meeting, monkeypatch)
