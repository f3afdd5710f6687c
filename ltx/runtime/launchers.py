"""Which launcher has started this process: the table of launchers, and arguments that override it; reports to it.

Placements are pure functions of the given environment variables. A new launcher is one row in :data:`LAUNCHERS`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from ltx.core.base.arguments import brief, is_whole
from ltx.core.base.errors import WorldError, message_of
from ltx.core.world.world import Placement, abandon
from ltx.runtime.placement import Variables, is_slurm_task, mpi_placement, node_of, slurm_placement
from ltx.runtime.tracebacks import place_of_error

#: The variable that marks workers of an :class:`ltx.Pool`, which also have the variables that torchrun would set.
POOL_VARIABLE = "LTX_POOL"
#: The file of torchrun, and an attribute of what was reported in it.
_ERROR_FILE, _NOTED = "TORCHELASTIC_ERROR_FILE", "_ltx_noted"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class Launcher:
    """One row of :data:`LAUNCHERS`: how to recognise a launcher, and how to read the placement that it sets."""

    name: str  # as in ltx.World.launcher
    marks: tuple[str, ...]  # the variables that errors name as the launcher's marks
    started_this: Callable[[Mapping[str, str]], bool]  # whether it set this environment
    placement: Callable[[Variables], Placement]  # reads its placement
    start: str  # how to start processes with the launcher, for error messages


def placement_from_env(environ: Mapping[str, str]) -> Placement:
    """The placement by the first of :data:`LAUNCHERS` that recognises `environ`; a process alone if none does."""
    launcher = launcher_of(environ)
    if launcher is None:
        return Placement("none")
    placement = launcher.placement(Variables(environ, launcher.name, launcher.marks, launcher.start))
    shown = next((environ[name] for name in _VISIBLE if name in environ), "")
    one_is_shown = "," not in shown and shown.strip() not in ("", "-1")
    # Jobs of Kubernetes and some launchers give each process a device of its own.
    has_own = placement.own_devices is None and placement.local_size > 1 and one_is_shown
    return replace(placement, own_devices=1) if has_own else placement


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise :class:`WorldError` if `environ` says that this process, which has no world, is one of several."""
    launcher, found = launcher_of(environ), Placement("none")
    with suppress(WorldError):  # a program without ltx.init may not have set the address
        found = placement_from_env({"MASTER_ADDR": "?", "MASTER_PORT": "1", **environ})
    if launcher is not None and found.size > 1:
        marks = ", ".join(f"{name}={environ[name]}" for name in launcher.marks if name in environ)
        raise WorldError(
            f"rank {found.rank}: by its environment ({marks}) this process is rank {found.rank} of {found.size}, but "
            "no world is open in it: each rank would compute alone. Write `with ltx.init():` around the program. If it "
            "is to compute alone, write `with ltx.init(rank=0, size=1):`."
        )


def placement_beside_group(environ: Mapping[str, str], rank: int, size: int) -> Placement:
    """The placement of a process whose process group exists: `environ` completes its `rank` and `size`. Launchers of
    other libraries set some of torchrun's variables: Lightning Fabric's all but RANK, and NODE_RANK for GROUP_RANK. A
    variable that contradicts the group isn't used, since ranks may be renumbered. LOCAL_RANK alone says the device.
    """
    known = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if "NODE_RANK" in environ:
        known |= {"GROUP_RANK": environ["NODE_RANK"]}
    for said in (environ, {**environ, **known}):
        with suppress(WorldError):
            found = placement_from_env(said)
            if (found.rank, found.size) == (rank, size):
                return found
    local_rank = environ.get("LOCAL_RANK", "")
    local = int(local_rank) if local_rank.isdecimal() and int(local_rank) <= rank else rank
    return Placement("user", rank, size, local_rank=local, local_size=size)


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    return next((launcher for launcher in LAUNCHERS if launcher.started_this(environ)), None)


def placement_from_arguments(
    rank: int | None, size: int | None, master: str | None, local_rank: int | None, local_size: int | None
) -> Placement | None:
    """The placement by the arguments of :func:`ltx.init`, on one node without local_size; None if none is given."""
    given = {"rank": rank, "size": size, "master": master, "local_rank": local_rank, "local_size": local_size}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    said = ", ".join(f"{name}={brief(value)}" for name, value in given.items())

    def read(name: str, low: int, high: int | None, default: int | None = None) -> int:
        value = given.get(name, default)
        if not is_whole(value) or value < low or (high is not None and value > high):
            allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise WorldError(
                f"ltx.init({said}): expected {name} to be an integer {allowed}, got {brief(value)}. Give rank=, size= "
                'and master="host:port" on every rank, or none of them to read what the launcher says.'
            )
        return int(value)

    total = read("size", 1, None)
    index = read("rank", 0, total - 1)
    on_node = read("local_size", 1, total, total)
    local = read("local_rank", 0, min(on_node - 1, index), index % on_node)
    node = node_of(index, total, local, on_node)
    if node is None:
        raise WorldError(
            f"ltx.init({said}): expected nodes with equal numbers of ranks, dealt out by slot or by node; rank {index} "
            f"of {total} can't be the local rank {local} of {on_node} then. For other layouts set torchrun's "
            "environment variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT."
        )
    where = None
    if master is not None or total > 1:
        where = _host_and_port(master)
        if where is None:
            raise WorldError(
                f'ltx.init({said}): expected master to be "host:port", the name or address of rank 0\'s node and a '
                f'free port there, as in "10.0.0.1:29500" or "[fd00::1]:29500", got {brief(master)}.'
            )
    return Placement("arguments", index, total, local, on_node, *node, where, knows_node=False)


def _host_and_port(text: str | None) -> tuple[str, int] | None:
    """Host and port of ``"host:port"``, None for another text; an IPv6 address stands in brackets."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return (host, int(port)) if host and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536 else None


def _torchrun_placement(variables: Variables) -> Placement:
    """torchrun's variables; those of the node may be missing if set by hand: then all ranks are on one node."""
    size = variables.number("WORLD_SIZE", 1, None, "the number of processes")
    rank = variables.number("RANK", 0, size - 1, f"below WORLD_SIZE={size}")
    local_size = variables.number("LOCAL_WORLD_SIZE", 1, size, f"at most WORLD_SIZE={size}", size)
    below_size = f"below LOCAL_WORLD_SIZE={local_size}"
    local_rank = variables.number("LOCAL_RANK", 0, local_size - 1, below_size, rank % local_size)
    num_nodes = variables.number("GROUP_WORLD_SIZE", 1, size, f"at most WORLD_SIZE={size}", -(-size // local_size))
    below, by_slot = f"below the number of nodes, {num_nodes}", rank // local_size
    node_rank = variables.number("GROUP_RANK", 0, num_nodes - 1, below, by_slot if by_slot < num_nodes else None)
    address = variables.environ.get("MASTER_ADDR")
    if not address:
        raise WorldError(
            f"environment variable MASTER_ADDR={address!r} (launcher {variables.launcher}): expected the name or "
            "address of rank 0's node, 127.0.0.1 for example, since RANK and WORLD_SIZE are set. torchrun sets it."
        )
    master = address, variables.master_port()
    return Placement(variables.launcher, rank, size, local_rank, local_size, node_rank, num_nodes, master)


_BY_TORCHRUN = "Start the processes with torchrun, or set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
_BY_SRUN, _BY_MPIRUN = "Start the processes with srun", "Start the processes with mpirun"
_pmi = partial(mpi_placement, prefix="PMI", local_rank=("MPI_LOCALRANKID",), local_size=("MPI_LOCALNRANKS",))


def _mpirun(name: str, prefix: str, *job: str) -> Launcher:
    """The row of an mpirun with variables such as ``{prefix}_RANK``. `job`: variables that may hold the job's id."""
    marks = f"{prefix}_RANK", f"{prefix}_SIZE"
    return Launcher(name, marks, _has(marks[0]), partial(mpi_placement, prefix=prefix, job=job), _BY_MPIRUN)


def _has(*names: str) -> Callable[[Mapping[str, str]], bool]:
    """A function that tells whether an environment has all of the variables `names`."""
    return lambda environ: all(name in environ for name in names)


#: The known launchers. The first row that recognises the environment counts. A launcher that uses another one stands
#: above it: mpirun starts processes on other nodes by srun, and then the variables of both are set.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher("pool", (POOL_VARIABLE, "RANK"), _has(POOL_VARIABLE, "RANK"), _torchrun_placement, _BY_TORCHRUN),
    Launcher("torchrun", ("RANK", "WORLD_SIZE"), _has("RANK"), _torchrun_placement, _BY_TORCHRUN),
    _mpirun("openmpi", "OMPI_COMM_WORLD", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    _mpirun("mvapich2", "MV2_COMM_WORLD"),
    # The variables of MPICH's and Intel MPI's hydra; srun sets only the first two.
    Launcher("pmi", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), _has("PMI_RANK", "MPI_LOCALRANKID"), _pmi, _BY_MPIRUN),
    Launcher("slurm", ("SLURM_STEP_ID", "SLURM_PROCID"), is_slurm_task, slurm_placement, _BY_SRUN),
    Launcher("pmi", ("PMI_RANK", "PMI_SIZE"), _has("PMI_RANK"), _pmi, _BY_MPIRUN),
    # The last row, since job scripts may set this variable for processes that srun starts.
    Launcher("torchrun", ("RANK", "WORLD_SIZE"), _has("WORLD_SIZE"), _torchrun_placement, _BY_TORCHRUN),
)


def note_failure(error: BaseException) -> None:
    """In a rank: report its exception to the launcher now, since its teardown may take long."""
    file = os.environ.get(_ERROR_FILE)
    if not file or (isinstance(error, SystemExit) and not error.code) or getattr(error, _NOTED, False):
        return
    now, rank = time.time(), os.environ.get("RANK")
    extra = {"py_callstack": "", "timestamp": str(int(now)), "at_s": now, "rank": rank}
    extra |= {"kind": type(error).__name__, "where": place_of_error(error)}
    with suppress(OSError, AttributeError):
        Path(file).write_text(json.dumps({"message": {"message": message_of(error), "extraInfo": extra}}))
        setattr(error, _NOTED, True)


def note_uncaught() -> None:
    """In a rank: report the exception that ends the program, to the launcher and to the peers."""
    before = sys.excepthook
    if getattr(before, _NOTED, False):
        return

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        note_failure(error)
        before(kind, error, where)
        abandon(error)

    setattr(hook, _NOTED, True)
    sys.excepthook = hook
