"""The table of environments: what each says, and which are refused in which words."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from ltx import World
from ltx.core.world.launchers import placement_from_env
from ltx.core.world.world import world_of
from ltx.errors import LtxError, WorldError
from tests.contract.runtime.environments import TORCHRUN


def world_from_env(environ: dict[str, str], **given: Any) -> World:
    return world_of(placement_from_env(environ), **given)


def _without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TORCHRUN.items() if name not in names}


CPU = torch.device("cpu")
WORLDS: dict[str, tuple[dict[str, str], World]] = {
    "nothing set": ({}, World(0, 1, 0, 0, 1, CPU, "gloo", "none")),
    "unrelated variables": (
        {"MASTER_ADDR": "a", "LOCAL_RANK": "3", "HOME": "/"},
        World(0, 1, 0, 0, 1, CPU, "gloo", "none"),
    ),
    "torchrun on two nodes": (TORCHRUN, World(5, 8, 1, 1, 2, CPU, "gloo", "torchrun", 4)),
    "torchrun with one process": (
        TORCHRUN
        | dict.fromkeys(["RANK", "LOCAL_RANK", "GROUP_RANK"], "0")
        | dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"], "1"),
        World(0, 1, 0, 0, 1, CPU, "gloo", "torchrun"),
    ),
    "set by hand, one node": (
        _without("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        World(5, 8, 5, 0, 1, CPU, "gloo", "torchrun", 8),
    ),
    "number of nodes left out": (
        _without("GROUP_RANK", "GROUP_WORLD_SIZE"),
        World(5, 8, 1, 1, 2, CPU, "gloo", "torchrun", 4),
    ),
    "a pool's worker": (TORCHRUN | {"LTX_POOL": "8"}, World(5, 8, 1, 1, 2, CPU, "gloo", "pool", 4)),
}


@pytest.mark.parametrize("case", WORLDS)
def test_environments(case: str) -> None:
    environ, expected = WORLDS[case]
    assert world_from_env(environ, cuda_devices=0) == expected


REFUSED: dict[str, tuple[dict[str, str | None], str]] = {
    "rank no integer": (
        {"RANK": "foo"},
        r"RANK='foo' \(launcher torchrun\): expected an integer from 0 to 7, below WORLD_SIZE=8",
    ),
    "rank negative": ({"RANK": "-1"}, r"RANK='-1' .*expected an integer from 0 to 7"),
    "rank not below the size": ({"RANK": "8"}, r"RANK='8' .*expected an integer from 0 to 7"),
    "rank without size": ({"WORLD_SIZE": None}, r"WORLD_SIZE is missing .*at least 1.*since RANK='5' is set"),
    "size without rank": ({"RANK": None}, r"RANK is missing .*from 0 to 7.*since WORLD_SIZE='8' is set"),
    "size zero": ({"WORLD_SIZE": "0"}, r"WORLD_SIZE='0' .*expected an integer of at least 1"),
    "size no integer": ({"WORLD_SIZE": "8.0"}, r"WORLD_SIZE='8.0' .*expected an integer of at least 1"),
    "more local ranks than ranks": (
        {"LOCAL_WORLD_SIZE": "9"},
        r"LOCAL_WORLD_SIZE='9' .*from 1 to 8, at most WORLD_SIZE=8",
    ),
    "local rank too large": ({"LOCAL_RANK": "4"}, r"LOCAL_RANK='4' .*from 0 to 3, below LOCAL_WORLD_SIZE=4"),
    "node rank too large": ({"GROUP_RANK": "2"}, r"GROUP_RANK='2' .*from 0 to 1, below the number of nodes, 2"),
    "no address": ({"MASTER_ADDR": None}, r"MASTER_ADDR=None .*expected the name or address"),
    "empty address": ({"MASTER_ADDR": ""}, r"MASTER_ADDR='' .*expected the name or address"),
    "no port": ({"MASTER_PORT": None}, r"MASTER_PORT is missing .*from 1 to 65535"),
    "port too large": ({"MASTER_PORT": "70000"}, r"MASTER_PORT='70000' .*from 1 to 65535"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_environments_are_named(case: str) -> None:
    changes, text = REFUSED[case]
    environ = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(WorldError, match=text) as caught:
        world_from_env(environ, cuda_devices=0)
    assert isinstance(caught.value, LtxError)
    assert isinstance(caught.value, RuntimeError)


def test_cuda_devices_are_numbered_like_local_ranks() -> None:
    world = world_from_env(TORCHRUN, cuda_devices=4)
    assert (world.device, world.backend) == (torch.device("cuda", 1), "cpu:gloo,cuda:nccl")
    assert world_from_env(TORCHRUN, cuda_devices=4, backend="gloo").device == torch.device("cuda", 1)
    assert world_from_env({}, cuda_devices=1).device == torch.device("cuda", 0)


def test_more_local_ranks_than_cuda_devices() -> None:
    with pytest.raises(
        WorldError, match=r"rank 5 has local rank 1, but its node has 1 CUDA device: .*backend=\"gloo\""
    ):
        world_from_env(TORCHRUN, cuda_devices=1)
    world = world_from_env(TORCHRUN, cuda_devices=1, backend="gloo")
    assert (world.device, world.backend) == (CPU, "gloo")


def test_backend_that_is_asked_for_is_used() -> None:
    assert world_from_env({}, backend="mpi", cuda_devices=0).backend == "mpi"


def test_where_the_ranks_meet() -> None:
    assert placement_from_env(TORCHRUN).master == ("10.0.0.1", 29500)
    assert placement_from_env({}).master is None


def test_a_world_is_a_frozen_value() -> None:
    world = world_from_env(TORCHRUN, cuda_devices=0)
    assert pickle.loads(pickle.dumps(world)) == world
    assert {world: 1}[world_from_env(TORCHRUN, cuda_devices=0)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.rank = 0  # type: ignore[misc]


def test_properties() -> None:
    alone, one_of_many = world_from_env({}, cuda_devices=0), world_from_env(TORCHRUN, cuda_devices=0)
    assert (alone.is_global_zero, alone.is_distributed) == (True, False)
    assert (one_of_many.is_global_zero, one_of_many.is_distributed) == (False, True)
    assert one_of_many.root_device == one_of_many.device
