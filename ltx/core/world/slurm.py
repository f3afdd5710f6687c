"""What SLURM says to the tasks of a job step, that is, to what ``srun`` starts.

Only these are ranks. A job script, the shell of ``salloc`` and what is typed into it see the variables of the whole
allocation too, but are one process: their step's id is a reserved one, or they have none.

Source: srun's manual page, "OUTPUT ENVIRONMENT VARIABLES"; slurm.h for the reserved ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ltx.core.base.errors import WorldError
from ltx.core.world.placement import Placement, Variables, derived_port

# Ids from here on are those of the shell of salloc (0xfffffffa), of a job script (0xfffffffb) and the like.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_RESERVED_NAMES = ("batch", "extern", "interactive", "pending")

# The port takes steps of one job apart if their ids differ by less than the range has ports; and jobs with ids in a row
# if each has less than this many steps.
_STEPS_BETWEEN_JOBS = 101

_GROUP = re.compile(r"\[([0-9]+)(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]")
_HOST = re.compile(r"[A-Za-z0-9._:-]+")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task; ``srun --pty``, with one task, is there to type into."""
    return "SLURM_STEP_ID" in environ and why_no_slurm_task(environ) is None


def why_no_slurm_task(environ: Mapping[str, str]) -> str | None:
    """Why a process that sees variables of SLURM is no task of srun; None if it sees none, or is one."""
    step = environ.get("SLURM_STEP_ID")
    if step is None:
        no_step = "SLURM_JOB_ID is set, but not SLURM_STEP_ID: in an allocation, and not started by srun"
        return no_step if "SLURM_JOB_ID" in environ else None
    if "SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1":
        return f"SLURM_STEP_ID={step!r} and SLURM_PTY_PORT is set: a terminal of srun --pty or salloc"
    if step in _RESERVED_NAMES or (step.isdecimal() and len(step) <= 10 and int(step) >= _FIRST_RESERVED_STEP):
        return f"SLURM_STEP_ID={step!r} is that of a job script, or of the shell of salloc"
    return None


def slurm_placement(variables: Variables) -> Placement:
    """The place of a task in its step. Nodes may have unequal numbers of tasks."""
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
    below = f"below {sizes}={size}"
    rank = variables.number("SLURM_PROCID", 0, size - 1, below)
    nodes = variables.first("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    num_nodes = variables.number(nodes, 1, size, f"at most {sizes}={size}")
    node_rank = variables.number("SLURM_NODEID", 0, num_nodes - 1, f"below {nodes}={num_nodes}")
    local_size = _local_size(variables, size, num_nodes, node_rank, f"{sizes}={size}", f"{nodes}={num_nodes}")
    at_most = min(local_size - 1, rank)
    local_rank = variables.number(
        "SLURM_LOCALID", 0, at_most, f"below the node's {local_size} tasks and at most SLURM_PROCID={rank}"
    )
    variables.check_agrees("WORLD_SIZE", size, f"as {sizes}={size}; unset WORLD_SIZE, or start as many tasks")
    master = (_slurm_address(variables), _slurm_port(variables, step)) if size > 1 else None
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
    """The node of task 0: the step's first one, unless MASTER_ADDR says otherwise."""
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
    """The first of a list of hosts in SLURM's short form; None if it isn't one.

    Example:
        >>> first_host("a[01-03,07],b1"), first_host("rack[0-3]node[08,11]"), first_host("a[1")
        ('a01', 'rack0node08', None)
    """
    first = _GROUP.sub(r"\1", hosts).split(",")[0]
    return first if _HOST.fullmatch(first) else None


def _slurm_port(variables: Variables, step: int) -> int:
    """MASTER_PORT, else one that follows from the ids of the job and of the step."""
    name = variables.first("SLURM_JOB_ID", "SLURM_JOBID")
    if "MASTER_PORT" in variables.environ:
        return variables.master_port(0)
    job = variables.number(name, 0, None, "the id of the job, or MASTER_PORT set")
    return derived_port(job * _STEPS_BETWEEN_JOBS + step)
