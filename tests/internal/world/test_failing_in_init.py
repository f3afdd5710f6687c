"""A rank that can't make its part of a world, and ranks that share a device."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import ltx
from ltx import World
from ltx.core.comm.store_exchange import StoreExchange
from ltx.core.world import groups
from ltx.core.world import init as world_init
from ltx.errors import WorldError
from ltx.peers import meeting
from tests.forks import free_port
from tests.kinds import Started
from tests.train_on import raised_by, refuses

FAILS: dict[str, tuple[str, dict[str, Any]]] = {
    "its mesh": (r"WorldError: mesh=\{'a': 5\} is for 5 = 5 ranks", {"mesh": {"a": 5}}),
    "as they meet": (r"couldn't set up torch.distributed .* ValueError: no", {}),
    "as axes are opened": ("ValueError: no", {}),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("how", FAILS)
def test_a_rank_that_fails_in_init_is_named(how: str, fails: int, started: Started) -> None:
    """The others waited until the timeout, and then named rank 0, with which the store had gone."""
    port, (why, given) = free_port(), FAILS[how]

    def no(*_: Any) -> Any:
        raise ValueError("no")

    def body(tell: Callable[[Any], None]) -> str:
        rank = ltx.world().rank
        ltx.shutdown()
        if rank == fails and how == "as they meet":
            meeting.Meeting.gather = no  # type: ignore[method-assign]
        if rank == fails and how == "as axes are opened":
            world_init.open_axes = no
        its = given if rank == fails else {}
        return raised_by(ltx.init, rank=rank, size=3, master=f"127.0.0.1:{port}", timeout=60.0, **its)

    world = started(3, body, held_by="rank 0")
    for rank in {0, 1, 2} - {fails}:
        said = world.told(rank)  # the store may end before the rank has asked again
        assert re.search(rf"rank {rank}: .*[rR]ank {fails} (couldn't make its|had left because of) .*{why}", said), said


# Ranks that compute on one accelerator are refused on all of them, where the backend takes one rank a device.
NCCL = "cpu:gloo,cuda:nccl"


def world(rank: int, size: int = 3, backend: str = NCCL) -> World:
    return World(rank, size, rank, 0, 1, torch.device("cuda", 0), backend, "torchrun", size)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """Where ranks 1 and 2 have said that they have one device."""
    store = dist.HashStore()
    host = groups.socket.gethostname()
    for rank, uuid in enumerate("abb"):
        store.set(f"device/{rank}", json.dumps(f"{host} {uuid}"))
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    return store


def refuse(rank: int, met: dist.HashStore, monkeypatch: pytest.MonkeyPatch, backend: str = NCCL) -> None:
    device = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(uuid="abb"[rank]))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    exchange = StoreExchange(cast(Any, met), rank, 3, 5.0, list)
    groups._refuse_shared_devices(exchange, world(rank, backend=backend))


@pytest.mark.parametrize("rank", range(3))
def test_all_ranks_raise(rank: int, met: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorldError, match=rf"rank {rank}: ranks 1 and 2 are both on one device, .*CUDA_VISIBLE_DEVICES"):
        refuse(rank, met, monkeypatch)


def test_over_gloo_they_may(met: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(1, met, monkeypatch, "gloo")


@pytest.mark.parametrize(("version", "refused"), [((2, 28, 9), True), ((2, 30, 3), False)])
def test_nccl_that_is_told_to(
    version: tuple[int, ...], refused: bool, met: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    if refused:
        refuses(WorldError, "both on one device", refuse, 1, met, monkeypatch)
    else:
        refuse(1, met, monkeypatch)
