"""The placement of a process by its launcher, read from environment variables of SLURM and MPI's launchers.

SLURM sets them for the tasks of a job step, that is, for processes that ``srun`` starts. Only these are ranks. A job
script, and a program in the shell of ``salloc``, see the variables of the whole allocation too, but are a single
process: their step id is reserved or missing.

MPI's launchers set rank and size, both global and on the node, but neither the node's number nor MASTER_ADDR. If the
distribution of ranks is unambiguous, the node's number follows from it; ranks compare the numbers when they meet.

Sources: srun's manual page, "OUTPUT ENVIRONMENT VARIABLES"; slurm.h for the reserved ids; Open MPI's documentation,
"Environment variables set for MPI applications"; the sources of MPICH's hydra, which is Intel MPI's launcher too, and
of MVAPICH2's mpirun_rsh.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ltx.core.base.errors import WorldError
from ltx.core.world.world import LOOPBACK, Placement

#: Ports that are derived from a job's id: below those that Linux gives to connections by itself, 32768 to 60999.
DERIVED_PORTS = range(15000, 25000)
DEFAULT_PORT = 29500

#: Environment variables.
Names = tuple[str, ...]

# More digits than any launcher's numbers have. Python raises an error of its own for thousands of digits.
_MAX_DIGITS = 20


@dataclass(frozen=True)
class Variables:
    """The environment, read for one launcher; fields are as in :class:`ltx.runtime.launchers.Launcher`."""

    environ: Mapping[str, str]
    launcher: str
    marks: Sequence[str]
    start: str

    def first(self, *names: str) -> str:
        """The first of `names` that is set, or ``names[0]`` if none is."""
        return next((name for name in names if name in self.environ), names[0])

    def number(self, name: str, low: int, high: int | None, relation: str, default: int | None = None) -> int:
        """The integer in variable `name`, from `low` to `high`. `relation` explains the bounds in an error."""
        text = self.environ.get(name)
        if text is None and default is not None:
            return default
        allowed = f"an integer {f'of at least {low}' if high is None else f'from {low} to {high}'}, {relation}"
        if text is None:
            raise self.missing(name, allowed)
        value = int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else -1
        if value < low or (high is not None and value > high):
            raise self.wrong(name, allowed)
        return value

    def missing(self, name: str, allowed: str) -> WorldError:
        found = [f"{mark}={self.environ[mark]!r}" for mark in self.marks if mark in self.environ]
        return WorldError(
            f"environment variable {name} is missing (launcher {self.launcher}): expected {allowed}, since "
            f"{' and '.join(found)} is set. {self.start}, or unset them all to run as a world of one."
        )

    def wrong(self, name: str, allowed: str) -> WorldError:
        return WorldError(
            f"environment variable {name}={self.environ[name]!r} (launcher {self.launcher}): expected {allowed}. "
            "Launchers set it; unset it and the launcher's other variables to run as a world of one."
        )

    def master_port(self, default: int | None = None) -> int:
        return self.number("MASTER_PORT", 1, 65535, "a port at MASTER_ADDR where the ranks meet", default)


def derived_port(seed: int) -> int:
    """A port of :data:`DERIVED_PORTS`; consecutive seeds get different ports."""
    return DERIVED_PORTS[seed % len(DERIVED_PORTS)]


def node_of(rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int] | None:
    """The index of a process' node, and the number of nodes, if all nodes have equally many processes; else None.

    Ranks are dealt out to nodes by slot, one node after the other; else by node, in turns.

    Example:
        >>> node_of(5, 8, 1, 4), node_of(5, 8, 2, 4), node_of(4, 5, 1, 2)
        ((1, 2), (1, 2), None)
    """
    num_nodes, rest = divmod(size, local_size)
    if rest == 0 and rank % local_size == local_rank:
        return rank // local_size, num_nodes
    if rest == 0 and rank // num_nodes == local_rank:
        return rank % num_nodes, num_nodes
    return None


# Step ids from here on are reserved: salloc's shell is 0xfffffffa, a job script is 0xfffffffb.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_RESERVED_NAMES = ("batch", "extern", "interactive", "pending")

# Steps of one job get different ports, and so do jobs with consecutive ids, if each has fewer steps than this.
_STEPS_BETWEEN_JOBS = 101

_GROUP = re.compile(r"\[([0-9]+)(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]")
_HOST = re.compile(r"[A-Za-z0-9._:-]+")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task. A terminal (``srun --pty`` with one task) doesn't count."""
    step = environ.get("SLURM_STEP_ID")
    if step is None or ("SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1"):
        return False
    reserved = step.isdecimal() and len(step) <= 10 and int(step) >= _FIRST_RESERVED_STEP
    return not reserved and step not in _RESERVED_NAMES


def slurm_placement(variables: Variables) -> Placement:
    """The placement of a task in its job step. Nodes may have unequal numbers of tasks."""
    environ = variables.environ
    step = variables.number("SLURM_STEP_ID", 0, _FIRST_RESERVED_STEP - 1, "the id of a job step")
    sizes = variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    size = variables.number(sizes, 1, None, "the number of tasks of the step")
    if "SLURM_PTY_PORT" in environ and size > 1:
        raise WorldError(
            f"environment variable SLURM_PTY_PORT={environ['SLURM_PTY_PORT']!r} (launcher {variables.launcher}): "
            f"expected it unset, since the step has {sizes}={size} tasks: under `srun --pty` only one of them is there "
            "to type into, while `srun` called from such a shell, or from that of salloc, starts them all, and leaves "
            "this variable as it was. To run as the ranks of a world: env -u SLURM_PTY_PORT srun ... To run this "
            "process alone: ltx.init(rank=0, size=1)."
        )
    rank = variables.number("SLURM_PROCID", 0, size - 1, f"below {sizes}={size}")
    nodes = variables.first("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    num_nodes = variables.number(nodes, 1, size, f"at most {sizes}={size}")
    node_rank = variables.number("SLURM_NODEID", 0, num_nodes - 1, f"below {nodes}={num_nodes}")
    local_size = _local_size(variables, size, num_nodes, node_rank, f"{sizes}={size}", f"{nodes}={num_nodes}")
    below_both = f"below the node's {local_size} tasks and at most SLURM_PROCID={rank}"
    local_rank = variables.number("SLURM_LOCALID", 0, min(local_size - 1, rank), below_both)
    as_many = f"as {sizes}={size}; unset WORLD_SIZE, or start as many tasks"
    variables.number("WORLD_SIZE", size, size, as_many, size)
    master = None
    if size > 1:
        address, jobs = _slurm_address(variables), variables.first("SLURM_JOB_ID", "SLURM_JOBID")
        port = None  # derived from the ids of the job and the step, unless MASTER_PORT is set
        if "MASTER_PORT" not in environ:
            job = variables.number(jobs, 0, None, "the id of the job, or MASTER_PORT set")
            port = derived_port(job * _STEPS_BETWEEN_JOBS + step)
        master = address, variables.master_port(port)
    own = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    own_devices = int(own) if own.isdecimal() and len(own) < 5 else None
    return Placement(variables.launcher, rank, size, local_rank, local_size, node_rank, num_nodes, master, own_devices)


def _local_size(variables: Variables, size: int, num_nodes: int, node_rank: int, of: str, on: str) -> int:
    """The number of tasks on a node, from a list of them such as ``4(x2),3``."""
    name = variables.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    allowed = f"the tasks of each node, such as 4(x2),3, which agrees with {of} on {on}"
    text = variables.environ.get(name)
    if text is None:
        if num_nodes == 1:
            return size
        raise variables.missing(name, allowed)
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        repeated = int(found[2] or 1) if found else 0
        if found is None or len(counts) + repeated > num_nodes:
            raise variables.wrong(name, allowed)
        counts += [int(found[1])] * repeated
    if len(counts) != num_nodes or sum(counts) != size or 0 in counts:
        raise variables.wrong(name, allowed)
    return counts[node_rank]


def _slurm_address(variables: Variables) -> str:
    """The node of task 0: the step's first node, unless MASTER_ADDR names another."""
    if address := variables.environ.get("MASTER_ADDR"):
        return address
    name = variables.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    allowed = "the names of the step's nodes, such as a[01-03,07],b1, or MASTER_ADDR set"
    if name not in variables.environ:
        raise variables.missing(name, allowed)
    host = first_host(variables.environ[name])
    if host is None:
        raise variables.wrong(name, allowed)
    return host


def first_host(hosts: str) -> str | None:
    """The first host in a list in SLURM's short form; None if the text isn't such a list.

    Example:
        >>> first_host("a[01-03,07],b1"), first_host("rack[0-3]node[08,11]"), first_host("a[1")
        ('a01', 'rack0node08', None)
    """
    first = _GROUP.sub(r"\1", hosts).split(",")[0]
    return first if _HOST.fullmatch(first) else None


def mpi_placement(
    variables: Variables, prefix: str, local_rank: Names = (), local_size: Names = (), job: Names = ()
) -> Placement:
    """The placement from variables such as ``{prefix}_RANK``. `local_rank`, `local_size`: other names that come first,
    where they are set. `job`: variables that may hold the job's id.
    """
    environ, rank, size = variables.environ, f"{prefix}_RANK", f"{prefix}_SIZE"
    world_size = variables.number(size, 1, None, "the number of processes")
    my_rank = variables.number(rank, 0, world_size - 1, f"below {size}={world_size}")
    alone = world_size == 1
    local_ranks = variables.first(*local_rank, f"{prefix}_LOCAL_RANK")
    local_sizes = variables.first(*local_size, f"{prefix}_LOCAL_SIZE")
    of_node = f"the number of processes of the node, at most {size}={world_size}"
    mine = variables.number(local_sizes, 1, world_size, of_node, 1 if alone else None)
    below = f"below {local_sizes}={mine} and at most {rank}={my_rank}"
    local = variables.number(local_ranks, 0, min(mine - 1, my_rank), below, 0 if alone else None)
    as_many = f"as {size}={world_size}; unset WORLD_SIZE, or start as many processes"
    variables.number("WORLD_SIZE", world_size, world_size, as_many, world_size)
    found = node_of(my_rank, world_size, local, mine)
    if "GROUP_RANK" in environ or "GROUP_WORLD_SIZE" in environ:
        others = world_size - mine
        for_others = f"the number of nodes for {others} other processes"
        num_nodes = variables.number("GROUP_WORLD_SIZE", 1, others + 1, for_others)
        found = variables.number("GROUP_RANK", 0, num_nodes - 1, f"below GROUP_WORLD_SIZE={num_nodes}"), num_nodes
    if found is None:
        raise WorldError(
            f"environment variables {rank}={my_rank}, {size}={world_size}, {local_ranks}={local}, {local_sizes}={mine} "
            f"(launcher {variables.launcher}): expected nodes with equal numbers of processes, dealt out by slot or by "
            "node; these don't tell which node this is. Set GROUP_RANK to the index of the node and GROUP_WORLD_SIZE "
            "to the number of nodes, as torchrun does, in what mpirun starts on each node."
        )
    master = None
    if not alone:
        address = environ.get("MASTER_ADDR")
        if not address and found[1] > 1:
            raise WorldError(
                f"environment variable MASTER_ADDR={address!r} (launcher {variables.launcher}): expected the name or "
                f"address of rank 0's node, since there are {found[1]} nodes and MPI doesn't say where they are. Open "
                "MPI: mpirun -x MASTER_ADDR=$(hostname) ...; MPICH and Intel MPI: mpiexec -genv MASTER_ADDR "
                "$(hostname) ..., on the node of rank 0."
            )
        # The port is derived from the job's id, if there is one, so that other jobs on the same nodes use other ports.
        ids = [environ[name].encode("utf-8", "surrogateescape") for name in job if environ.get(name)]
        port = derived_port(zlib.crc32(ids[0])) if ids else DEFAULT_PORT
        master = address or LOOPBACK, variables.master_port(port)
    return Placement(variables.launcher, my_rank, world_size, local, mine, *found, master, knows_node=False)
