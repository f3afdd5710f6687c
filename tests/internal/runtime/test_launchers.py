"""The table of launchers: what each environment says, and which are refused in which words."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ltx import World
from ltx.core.world.world import Placement, world_of
from ltx.errors import LtxError, WorldError
from ltx.peers.meeting import _misfit
from ltx.runtime.launchers import LAUNCHERS, placement_from_arguments, placement_from_env
from ltx.runtime.placement import DERIVED_PORTS, first_host
from tests.contract.runtime.environments import TORCHRUN
from tests.train_on import refuses

Environ = dict[str, str]


def world_from_env(environ: Environ, **given: Any) -> World:
    return world_of(placement_from_env(environ), **given)


def changed(environ: Environ, changes: Mapping[str, str | None]) -> Environ:
    """With these changes, of which None leaves a variable out."""
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


def without(*names: str) -> Environ:
    return changed(TORCHRUN, dict.fromkeys(names))


#: Of an allocation of three nodes with 4, 4 and 3 tasks, as a job script and the shell of salloc see it.
JOB = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOBID": "1234",
    "SLURM_JOB_NODELIST": "a[01-02],b[7-9]",
    "SLURM_NTASKS": "11",
    "SLURM_NNODES": "3",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
#: Of the last task of a step on two of the nodes, with 2 and 3 tasks.
STEP = JOB | {
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,3",
    "SLURM_STEP_NODELIST": "a02,b7",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
}
STEP_PORT = 15000 + (1234 * 101 + 2) % 10000


def openmpi(rank: int, size: int, local_rank: int, local_size: int, **more: str) -> Environ:
    said = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in said.items()} | more


TWO_BY_FOUR = (5, 8, 1, 4, 1, 2)
# The node rank is the local rank among all jobs, not the node.
OPENMPI = openmpi(5, 8, 1, 4, OMPI_COMM_WORLD_NODE_RANK="1", MASTER_ADDR="n0")
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "MASTER_ADDR": "n0"}
MVAPICH2 = {name.replace("OMPI", "MV2"): value for name, value in openmpi(5, 8, 1, 4, MASTER_ADDR="n0").items()}

ALONE = Placement("none")
AT_RANK_0, N0 = ("10.0.0.1", 29500), ("n0", 29500)
TASK = Placement("slurm", 4, 5, 2, 3, 1, 2, ("a02", STEP_PORT))
OF_A_TERMINAL = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "4000"}
FIRST = dict.fromkeys(["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"], "0")
BY_TORCHRUN, BY_MPIRUN, BY_HYDRA = (
    Placement(launcher, *TWO_BY_FOUR, master)
    for launcher, master in (("torchrun", AT_RANK_0), ("openmpi", N0), ("pmi", N0))
)
#: name: (environment, what it says)
PLACEMENTS: dict[str, tuple[Environ, Placement]] = {
    "nothing set": ({}, ALONE),
    "unrelated variables": ({"MASTER_ADDR": "a", "LOCAL_RANK": "3", "HOME": "/"}, ALONE),
    "torchrun with one process": (
        TORCHRUN
        | dict.fromkeys(["RANK", "LOCAL_RANK", "GROUP_RANK"], "0")
        | dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"], "1"),
        Placement("torchrun", master=AT_RANK_0),
    ),
    "set by hand, one node": (
        without("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        Placement("torchrun", 5, 8, 5, 8, 0, 1, AT_RANK_0),
    ),
    "number of nodes left out": (without("GROUP_RANK", "GROUP_WORLD_SIZE"), BY_TORCHRUN),
    "srun, unequal nodes": (STEP, TASK),
    "srun, rank 0": (STEP | FIRST, Placement("slurm", 0, 5, 0, 2, 0, 2, ("a02", STEP_PORT))),
    "srun, address and port given": (
        STEP | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4711"},
        replace(TASK, master=("10.0.0.9", 4711)),
    ),
    "srun on the whole job, without variables of the step": (
        JOB | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "7", "SLURM_LOCALID": "3", "SLURM_NODEID": "1"},
        Placement("slurm", 7, 11, 3, 4, 1, 3, ("a01", 15000 + 1234 * 101 % 10000)),
    ),
    "srun with one task": (
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"} | FIRST,
        Placement("slurm"),
    ),
    "srun with devices for each task": (STEP | {"SLURM_GPUS_PER_TASK": "a100:1"}, replace(TASK, own_devices=1)),
    "srun --mpi=pmi2": (STEP | {"PMI_RANK": "4", "PMI_SIZE": "5"}, TASK),
    "a job script that sets WORLD_SIZE for its tasks": (STEP | {"WORLD_SIZE": "5"}, TASK),
    "python in a job script": (JOB, ALONE),
    "python in a job script, of a SLURM that gives it a step": (JOB | {"SLURM_STEP_ID": "4294967291"}, ALONE),
    "Jupyter in the shell of salloc": (JOB | OF_A_TERMINAL | {"SLURM_STEP_ID": "4294967290"}, ALONE),
    "an external step": (JOB | {"SLURM_STEP_ID": "4294967292"}, ALONE),
    "a step by name": (JOB | {"SLURM_STEP_ID": "interactive"}, ALONE),
    "srun --pty": (JOB | OF_A_TERMINAL | {"SLURM_STEP_ID": "0"}, ALONE),
    "torchrun in a step": (STEP | TORCHRUN, BY_TORCHRUN),
    "mpirun by slot": (OPENMPI, BY_MPIRUN),
    "mpirun by node": (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, replace(BY_MPIRUN, local_rank=2)),
    "mpirun by node, of three": (openmpi(7, 12, 2, 4, MASTER_ADDR="n0"), Placement("openmpi", 7, 12, 2, 4, 1, 3, N0)),
    "mpirun on one node": (openmpi(1, 2, 1, 2), Placement("openmpi", 1, 2, 1, 2, 0, 1, ("127.0.0.1", 29500))),
    "mpirun with one process": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, Placement("openmpi")),
    "mpirun on unequal nodes that are told": (
        openmpi(4, 5, 1, 2, MASTER_ADDR="n0", GROUP_RANK="1", GROUP_WORLD_SIZE="2"),
        Placement("openmpi", 4, 5, 1, 2, 1, 2, N0),
    ),
    "mpirun, which starts its helpers with srun": (STEP | OPENMPI, BY_MPIRUN),
    "hydra": (HYDRA, BY_HYDRA),
    "hydra, which starts its helpers with srun": (STEP | HYDRA, BY_HYDRA),
    "other names of PMI": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "MASTER_PORT": "99"},
        Placement("pmi", 1, 2, 1, 2, 0, 1, ("127.0.0.1", 99)),
    ),
    "mpirun_rsh": (MVAPICH2, Placement("mvapich2", *TWO_BY_FOUR, N0)),
    "a pool's worker in a step": (STEP | TORCHRUN | {"LTX_POOL": "8"}, Placement("pool", *TWO_BY_FOUR, AT_RANK_0)),
}


@pytest.mark.parametrize("case", PLACEMENTS)
def test_placements(case: str) -> None:
    environ, expected = PLACEMENTS[case]
    placement = placement_from_env(environ)
    assert placement == expected
    assert placement.knows_node == (expected.launcher in ("none", "pool", "slurm", "torchrun"))
    world = world_from_env(environ, cuda_devices=0)
    assert (world.is_global_zero, world.is_distributed) == (expected.rank == 0, expected.size > 1)
    assert (world.backend, world.device) == ("gloo", torch.device("cpu"))


Row = tuple[dict[str, str | None], str]
#: name: (changes, of which None leaves a variable out; text)
OF_TORCHRUN: dict[str, Row] = {
    "letters": ({"RANK": "x"}, r"RANK='x' \(launcher torchrun\): expected an integer from 0 to 7, below WORLD_SIZE=8"),
    "rank negative": ({"RANK": "-1"}, r"RANK='-1' .*expected an integer from 0 to 7"),
    "rank not below the size": ({"RANK": "8"}, r"RANK='8' .*expected an integer from 0 to 7"),
    "rank without size": ({"WORLD_SIZE": None}, r"WORLD_SIZE is missing .*at least 1.*since RANK='5' is set"),
    "size without rank": ({"RANK": None}, r"RANK is missing .*from 0 to 7.*since WORLD_SIZE='8' is set"),
    "size zero": ({"WORLD_SIZE": "0"}, r"WORLD_SIZE='0' .*expected an integer of at least 1"),
    "size no integer": ({"WORLD_SIZE": "8.0"}, r"WORLD_SIZE='8.0' .*expected an integer of at least 1"),
    "more local ranks": ({"LOCAL_WORLD_SIZE": "9"}, r"LOCAL_WORLD_SIZE='9' .*from 1 to 8, at most WORLD_SIZE=8"),
    "torchrun, local rank too large": ({"LOCAL_RANK": "4"}, r"LOCAL_RANK='4' .*from 0 to 3, below LOCAL_WORLD_SIZE=4"),
    "node rank too large": ({"GROUP_RANK": "2"}, r"GROUP_RANK='2' .*from 0 to 1, below the number of nodes, 2"),
    "no address": ({"MASTER_ADDR": None}, r"MASTER_ADDR=None .*expected the name or address"),
    "empty address": ({"MASTER_ADDR": ""}, r"MASTER_ADDR='' .*expected the name or address"),
    "no port": ({"MASTER_PORT": None}, r"MASTER_PORT is missing .*from 1 to 65535"),
    "port too large": ({"MASTER_PORT": "70000"}, r"MASTER_PORT='70000' .*from 1 to 65535"),
    "torchrun, too few nodes": ({"GROUP_WORLD_SIZE": "1", "GROUP_RANK": None}, "GROUP_RANK is missing"),
}
OF_STEP: dict[str, Row] = {
    "step no number": ({"SLURM_STEP_ID": "x"}, r"SLURM_STEP_ID='x' \(launcher slurm\): expected an integer from 0"),
    "no rank": (
        {"SLURM_PROCID": None},
        r"SLURM_PROCID is missing \(launcher slurm\): expected an integer from 0 to 4, below SLURM_STEP_NUM_TASKS=5, "
        r"since SLURM_STEP_ID='2' is set. Start the processes with srun, or unset them all to run as a world of one.",
    ),
    "rank too large": ({"SLURM_PROCID": "5"}, "SLURM_PROCID='5' .*from 0 to 4, below SLURM_STEP_NUM_TASKS=5"),
    "no tasks": ({"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS='0' .*of at least 1"),
    "node too large": ({"SLURM_NODEID": "2"}, "SLURM_NODEID='2' .*from 0 to 1, below SLURM_STEP_NUM_NODES=2"),
    "local rank too large": ({"SLURM_LOCALID": "3"}, "SLURM_LOCALID='3' .*from 0 to 2, below the node's 3 tasks"),
    "tasks that don't add up": (
        {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        r"SLURM_STEP_TASKS_PER_NODE='2\(x2\)' .*such as 4\(x2\),3, which agrees with SLURM_STEP_NUM_TASKS=5 on",
    ),
    "tasks of too many nodes": ({"SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "TASKS_PER_NODE='1.* expected"),
    "tasks misspelt": ({"SLURM_STEP_TASKS_PER_NODE": "2,3x"}, "TASKS_PER_NODE='2,3x'"),
    "tasks of two nodes left out": (
        {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_TASKS_PER_NODE": None},
        "SLURM_STEP_TASKS_PER_NODE is missing",
    ),
    "hosts misspelt": ({"SLURM_STEP_NODELIST": "a[1-"}, r"SLURM_STEP_NODELIST='a\[1-' .*or MASTER_ADDR set"),
    "hosts left out": ({"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None}, "SLURM_STEP_NODELIST is missing"),
    "job left out": ({"SLURM_JOB_ID": None, "SLURM_JOBID": None}, "SLURM_JOB_ID is missing.*or MASTER_PORT set"),
    "port no port": ({"MASTER_PORT": "0"}, "MASTER_PORT='0' .*from 1 to 65535"),
    "another number of processes": (
        {"WORLD_SIZE": "8"},
        "WORLD_SIZE='8' .*expected an integer from 5 to 5, as SLURM_STEP_NUM_TASKS=5; unset WORLD_SIZE",
    ),
    "several tasks and a terminal": (
        {"SLURM_PTY_PORT": "4000"},
        r"SLURM_PTY_PORT='4000' .*has SLURM_STEP_NUM_TASKS=5 tasks.*env -u SLURM_PTY_PORT srun .*rank=0, size=1",
    ),
}
REFUSED: dict[str, tuple[Environ, dict[str, str | None], str]] = {
    **{name: (TORCHRUN, *row) for name, row in OF_TORCHRUN.items()},
    **{name: (STEP, *row) for name, row in OF_STEP.items()},
    "no number of tasks": (JOB, {"SLURM_STEP_ID": "0", "SLURM_NTASKS": None}, "SLURM_STEP_NUM_TASKS is missing"),
    "mpirun without address": (
        OPENMPI,
        {"MASTER_ADDR": None},
        r"MASTER_ADDR=None \(launcher openmpi\): .* 2 nodes .*mpirun -x MASTER_ADDR=\$\(hostname\)",
    ),
    "mpirun without local size": (
        OPENMPI,
        {"OMPI_COMM_WORLD_LOCAL_SIZE": None},
        "OMPI_COMM_WORLD_LOCAL_SIZE is missing .*since OMPI_COMM_WORLD_RANK='5' and .* Start the processes with mpirun",
    ),
    "mpirun, local rank too large": (
        OPENMPI,
        {"OMPI_COMM_WORLD_LOCAL_RANK": "4"},
        "OMPI_COMM_WORLD_LOCAL_RANK='4' .*from 0 to 3, below OMPI_COMM_WORLD_LOCAL_SIZE=4 and at most",
    ),
    "mpirun, half of the node": (OPENMPI, {"GROUP_RANK": "1"}, "GROUP_WORLD_SIZE is missing"),
    "mpirun on unequal nodes": (
        openmpi(4, 5, 1, 2),
        {},
        "OMPI_COMM_WORLD_RANK=4, OMPI_COMM_WORLD_SIZE=5, .*_LOCAL_RANK=1, .*_LOCAL_SIZE=2 .*Set GROUP_RANK .*"
        "GROUP_WORLD_SIZE",
    ),
    "mpirun, a layout of one's own": (openmpi(5, 8, 3, 4), {}, "dealt out by slot or by node.*Set GROUP_RANK"),
    "hydra without size": (HYDRA, {"PMI_SIZE": None}, r"PMI_SIZE is missing \(launcher pmi\)"),
    "hydra without local size": (HYDRA, {"MPI_LOCALNRANKS": None}, "MPI_LOCALNRANKS is missing"),
    "hydra, rank no number": (HYDRA, {"PMI_RANK": ""}, "PMI_RANK='' .*from 0 to 7, below PMI_SIZE=8"),
    "mpirun_rsh, rank too large": (MVAPICH2, {"MV2_COMM_WORLD_RANK": "8"}, "RANK='8' .*below MV2_COMM_WORLD_SIZE=8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_named(case: str) -> None:
    environ, changes, text = REFUSED[case]
    with pytest.raises(WorldError, match=text) as caught:
        placement_from_env(changed(environ, changes))
    assert isinstance(caught.value, LtxError)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("counts", [(2, 3), (1, 4), (3, 1, 2), (4,)])
@pytest.mark.parametrize("cyclic", [False, True])
def test_every_task_of_a_step(counts: tuple[int, ...], cyclic: bool) -> None:
    size, nodes = sum(counts), len(counts)
    slots = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if cyclic:
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    for rank, (node, local) in enumerate(slots):
        own = {"PROCID": rank, "NODEID": node, "LOCALID": local, "STEP_NUM_TASKS": size, "STEP_NUM_NODES": nodes}
        environ = STEP | {f"SLURM_{name}": str(value) for name, value in own.items()}
        environ |= {"SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts))}
        found = world_from_env(environ, cuda_devices=4)
        device = torch.device("cuda", local)
        assert found == World(rank, size, local, node, nodes, device, "cpu:gloo,cuda:nccl", "slurm", counts[node])


@pytest.mark.parametrize("by_node", [False, True])
@pytest.mark.parametrize(("nodes", "each"), [(1, 3), (2, 2), (2, 4), (4, 3), (3, 1)])
def test_every_process_of_mpirun(nodes: int, each: int, by_node: bool) -> None:
    places = []
    for rank in range(nodes * each):
        local, node = (rank // nodes, rank % nodes) if by_node else (rank % each, rank // each)
        found = placement_from_env(openmpi(rank, nodes * each, local, each, MASTER_ADDR="a"))
        places.append((found.node_rank, found.num_nodes, found.local_rank, found.local_size))
        # One rank alone may fit both ways of dealing out; which it was shows when they meet.
        if not (by_node and rank % each == local):
            assert (found.node_rank, found.num_nodes) == (node, nodes)
    assert by_node or _misfit(places) == ""


def test_ranks_that_disagree_about_their_nodes_find_out() -> None:
    """3 and 1 ranks: those of the first node can't know that, the other one thinks of four nodes."""
    said = _misfit([(0, 2, 0, 2), (0, 2, 1, 2), (2, 3, 0, 1)])
    assert "rank 2 takes itself for local rank 0 of 1 on node 2 of 3, but all together found 2 with 1" in said
    assert "rank 0 is there too" in _misfit([(0, 1, 0, 2), (0, 1, 0, 2)])
    assert _misfit([(0, 2, 0, 1), (1, 2, 0, 2), (1, 2, 1, 2)]) == ""


def test_ports_differ_between_steps_and_jobs() -> None:
    def port_in(environ: Environ) -> int:
        master = placement_from_env(environ).master
        assert master[1] in DERIVED_PORTS
        return master[1]

    def port(job: int, step: int) -> int:
        return port_in(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})

    assert len({port(8812345, step) for step in range(100)}) == 100
    assert len({port(job, step) for job in range(50) for step in range(50)}) == 2500
    assert len({port(7, 3) for _ in range(2)}) == 1
    jobs = ("prterun-n0-17@1", "prterun-n0-18@1", "x", "x")
    first, second, *same = [port_in(openmpi(0, 2, 0, 2, PMIX_NAMESPACE=job)) for job in jobs]
    assert first != second
    assert same[0] == same[1]


def test_the_first_of_a_list_of_hosts() -> None:
    expected = {"a": "a", "a,b": "a", "a[01-03,07],b1": "a01", "a[7,09]": "a7", "n[1-2]-ib": "n1-ib"}
    expected |= {"rack[0-1]node[08-15],x": "rack0node08", "node-1.cluster.org": "node-1.cluster.org"}
    assert {hosts: first_host(hosts) for hosts in expected} == expected
    for wrong in ("", ",a", "a[", "a]", "a[]", "a[1-]", "a[x]", "a b", "a[1,2", "[[1]]"):
        assert first_host(wrong) is None, wrong


def test_devices() -> None:
    world = world_from_env(TORCHRUN, cuda_devices=4)
    assert (world.device, world.backend) == (torch.device("cuda", 1), "cpu:gloo,cuda:nccl")
    assert world.root_device == world.device
    assert world_from_env(TORCHRUN, cuda_devices=4, backend="gloo").device == torch.device("cuda", 1)
    assert world_from_env({}, cuda_devices=1).device == torch.device("cuda", 0)
    assert world_from_env({}, backend="mpi", cuda_devices=0).backend == "mpi"
    text = r"rank 5 has local rank 1, but its node has 1 CUDA device: .*backend=\"gloo\""
    refuses(WorldError, text, world_from_env, TORCHRUN, cuda_devices=1)
    world = world_from_env(TORCHRUN, cuda_devices=1, backend="gloo")
    assert (world.device, world.backend) == (torch.device("cpu"), "gloo")
    assert world_from_env(STEP, cuda_devices=3).device == torch.device("cuda", 2)
    own = STEP | {"SLURM_GPUS_PER_TASK": "1"}
    assert world_from_env(own, cuda_devices=1).device == torch.device("cuda", 0), "each task sees its own device alone"
    assert world_from_env(own, cuda_devices=3).device == torch.device("cuda", 2), "all of them, with --gpu-bind=none"
    refuses(WorldError, "local rank 2, but its node has 1 CUDA device", world_from_env, STEP, cuda_devices=1)


def test_a_world_is_a_frozen_value() -> None:
    world = world_from_env(TORCHRUN, cuda_devices=0)
    assert pickle.loads(pickle.dumps(world)) == world
    assert {world: 1}[world_from_env(TORCHRUN, cuda_devices=0)] == 1
    with pytest.raises(FrozenInstanceError):
        world.rank = 0  # type: ignore[misc]


def test_arguments() -> None:
    def told(**arguments: Any) -> Placement | None:
        names = ("rank", "size", "master", "local_rank", "local_size")
        return placement_from_arguments(*[arguments.get(name) for name in names])

    assert told() is None
    alone = told(rank=0, size=1)
    assert alone == Placement("arguments")
    assert alone is not None
    assert not alone.knows_node
    assert told(rank=1, size=2, master="h:1") == Placement("arguments", 1, 2, 1, 2, 0, 1, ("h", 1))
    assert told(rank=5, size=8, master="[fd00::1]:80", local_size=4) == Placement(
        "arguments", 5, 8, 1, 4, 1, 2, ("fd00::1", 80)
    )
    by_node = told(rank=5, size=8, master="h:1", local_rank=2, local_size=4)
    assert by_node == Placement("arguments", 5, 8, 2, 4, 1, 2, ("h", 1))
    for arguments, text in (
        ({"rank": 0}, r"ltx\.init\(rank=0\): expected size to be an integer of at least 1, got None"),
        ({"size": 2, "master": "h:1"}, "expected rank to be an integer from 0 to 1, got None"),
        ({"rank": 2, "size": 2, "master": "h:1"}, "expected rank to be an integer from 0 to 1, got 2"),
        ({"rank": True, "size": 2, "master": "h:1"}, "got True"),
        ({"rank": 0, "size": 2}, r'expected master to be "host:port".* got None'),
        ({"rank": 0, "size": 2, "master": "h"}, "got 'h'"),
        ({"rank": 0, "size": 2, "master": "h:0"}, "got 'h:0'"),
        ({"rank": 0, "size": 2, "master": ":80"}, "got ':80'"),
        ({"rank": 0, "size": 2, "master": 80}, "got 80"),
        ({"rank": 0, "size": 2, "master": "h:1", "local_size": 3}, "local_size to be an integer from 1 to 2, got 3"),
        ({"rank": 1, "size": 2, "master": "h:1", "local_rank": 0}, "rank 1 of 2 can't be the local rank 0 of 2"),
        ({"rank": 4, "size": 5, "master": "h:1", "local_size": 2}, "can't be the local rank 0 of 2.*torchrun's"),
    ):
        refuses(WorldError, text, told, **arguments)


ALL_NAMES = sorted(
    {name for environ, _ in PLACEMENTS.values() for name in environ}
    | {mark for launcher in LAUNCHERS for mark in launcher.marks}
    | {"SLURM_PTY_PORT", "SLURM_GPUS_PER_TASK", "PMIX_NAMESPACE", "MPI_LOCALRANKID"}
)
values = st.one_of(
    st.integers(-2, 9).map(str),
    st.sampled_from(["", "x", "1(x2)", "2,3", "a[1-2]", "a[1", "4294967290", "٣", "1.0", " 1", "9" * 5000, "1_0"]),
    st.text(st.characters(exclude_characters="\0"), max_size=4),
)
bases = st.sampled_from([{}, JOB, STEP, OPENMPI, HYDRA, MVAPICH2, TORCHRUN])


@pytest.mark.full
@settings(max_examples=500, deadline=None)
@given(bases, st.dictionaries(st.sampled_from(ALL_NAMES), st.none() | values, max_size=6), st.sampled_from([0, 1, 4]))
def test_whatever_is_set_gives_a_world_or_an_error_with_a_name(
    base: Environ, changes: dict[str, str | None], cuda_devices: int
) -> None:
    environ = changed(base, changes)
    try:
        world = world_from_env(environ, cuda_devices=cuda_devices)
    except WorldError as error:
        text = str(error)
        assert any(name in text for name in ALL_NAMES) or "CUDA device" in text
        return
    assert 0 <= world.rank < world.size
    assert 0 <= world.local_rank <= world.rank or world.launcher in ("torchrun", "pool")
    assert 0 <= world.node_rank < world.num_nodes <= world.size
    assert asdict(world) == asdict(world_from_env(environ, cuda_devices=cuda_devices))


def test_marks_name_what_is_looked_for() -> None:
    for environ in (environ for environ, expected in PLACEMENTS.values() if expected.launcher != "none"):
        assert any(mark in environ for mark in next(row for row in LAUNCHERS if row.started_this(environ)).marks)


def test_the_page_on_launching_names_them_all() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "launching.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith('| `"')]
    named = dict.fromkeys(row.split('"')[1] for row in rows)
    assert list(named) == ["arguments", *dict.fromkeys(launcher.name for launcher in LAUNCHERS[:7]), "none"]
    for launcher in LAUNCHERS[:7]:
        row = next(row for row in rows if f'"{launcher.name}"' in row)
        assert all(f"`{mark}`" in row for mark in launcher.marks)
    assert f"{DERIVED_PORTS.start} to {DERIVED_PORTS.stop - 1}" in page
