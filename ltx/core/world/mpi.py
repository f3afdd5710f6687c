"""What the launchers of MPI say to the processes that they start.

All of them say rank and size, in all and on the node, and none says which node it is or where to meet. Nodes are
numbered by how ranks are dealt out to them, where that is sure; ranks compare what they found when they meet.

Source: Open MPI's documentation, "Environment variables set for MPI applications"; the sources of MPICH's hydra,
which is Intel MPI's launcher too, and of MVAPICH2's mpirun_rsh.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from ltx.core.base.errors import WorldError
from ltx.core.world.loopback import LOOPBACK
from ltx.core.world.placement import DEFAULT_PORT, Placement, Variables, derived_port, node_of


def mpi_placement(
    rank: str, size: str, local_rank: tuple[str, ...], local_size: tuple[str, ...], job: tuple[str, ...] = ()
) -> Callable[[Variables], Placement]:
    """How to read a launcher that has these variables for these things; the first that is set of several."""

    def read(variables: Variables) -> Placement:
        world_size = variables.number(size, 1, None, "the number of processes")
        my_rank = variables.number(rank, 0, world_size - 1, f"below {size}={world_size}")
        alone = world_size == 1
        local_sizes, local_ranks = variables.first(*local_size), variables.first(*local_rank)
        of_node = f"the number of processes of the node, at most {size}={world_size}"
        mine = variables.number(local_sizes, 1, world_size, of_node, 1 if alone else None)
        below = f"below {local_sizes}={mine} and at most {rank}={my_rank}"
        local = variables.number(local_ranks, 0, min(mine - 1, my_rank), below, 0 if alone else None)
        because = f"as {size}={world_size}; unset WORLD_SIZE, or start as many processes"
        variables.check_agrees("WORLD_SIZE", world_size, because)
        node, num_nodes = _mpi_node(variables, my_rank, world_size, local, mine, (rank, size, local_ranks, local_sizes))
        # A port that follows from the job's id, where there is one: another for another job on the same nodes.
        ids = [
            variables.environ[name].encode("utf-8", "surrogateescape") for name in job if variables.environ.get(name)
        ]
        port = derived_port(zlib.crc32(ids[0])) if ids else DEFAULT_PORT
        master = None if alone else (_mpi_address(variables, num_nodes), variables.master_port(port))
        return Placement(variables.launcher, my_rank, world_size, local, mine, node, num_nodes, master)

    return read


def _mpi_node(
    variables: Variables, rank: int, size: int, local_rank: int, local_size: int, names: tuple[str, ...]
) -> tuple[int, int]:
    """The index of this process' node and the number of nodes."""
    if "GROUP_RANK" in variables.environ or "GROUP_WORLD_SIZE" in variables.environ:
        num_nodes = variables.number(
            "GROUP_WORLD_SIZE", 1, size - local_size + 1, f"the number of nodes for {size - local_size} other processes"
        )
        return variables.number("GROUP_RANK", 0, num_nodes - 1, f"below GROUP_WORLD_SIZE={num_nodes}"), num_nodes
    found = node_of(rank, size, local_rank, local_size)
    if found is not None:
        return found
    values = (rank, size, local_rank, local_size)
    said = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
    raise WorldError(
        f"environment variables {said} (launcher {variables.launcher}): expected nodes with equal numbers of "
        "processes, dealt out by slot or by node; these don't tell which node this is. Set GROUP_RANK to the index of "
        "the node and GROUP_WORLD_SIZE to the number of nodes, as torchrun does, in what mpirun starts on each node."
    )


def _mpi_address(variables: Variables, num_nodes: int) -> str:
    if address := variables.environ.get("MASTER_ADDR"):
        return address
    if num_nodes == 1:
        return LOOPBACK
    raise WorldError(
        f"environment variable MASTER_ADDR={variables.environ.get('MASTER_ADDR')!r} (launcher {variables.launcher}): "
        f"expected the name or address of rank 0's node, since there are {num_nodes} nodes and MPI doesn't say where "
        "they are. Open MPI: mpirun -x MASTER_ADDR=$(hostname) ...; MPICH and Intel MPI: mpiexec -genv MASTER_ADDR "
        "$(hostname) ..., on the node of rank 0."
    )
