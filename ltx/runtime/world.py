"""Which process this is among how many, and what the environment says about it.

Everything here is a pure function of the environment variables it is given, plus the number of CUDA devices. A new
launcher (SLURM, MPI) is one row in :data:`LAUNCHERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import torch

from ltx.errors import WorldError

#: Set in the workers of an :class:`ltx.Pool`, beside the variables that torchrun would set.
POOL_VARIABLE = "LTX_POOL"


@dataclass(frozen=True)
class World:
    """The processes that run together, seen from one of them.

    ``ltx.init()`` makes it and :func:`ltx.world` returns it. As a context manager it ends what ``ltx.init()`` began.

    Attributes:
        rank: this process' index among all, 0 to ``size - 1``.
        size: the number of processes, on all nodes together.
        local_rank: this process' index among those of its node.
        node_rank: the index of its node.
        num_nodes: the number of nodes.
        device: the device that this rank computes on.
        backend: the backend of torch.distributed that its process groups use, ``"gloo"`` or ``"nccl"`` for example.
        launcher: who started the processes: ``"torchrun"``, ``"pool"``, ``"user"`` for a process group that was
            initialised before ltx, ``"none"`` for a world of one.

    Example:
        >>> from ltx.runtime.world import world_from_env
        >>> env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        ...        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
        >>> world = world_from_env(env, cuda_devices=0)
        >>> world.rank, world.size, world.node_rank, world.num_nodes, world.backend
        (3, 4, 1, 2, 'gloo')
    """

    rank: int
    size: int
    local_rank: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str
    launcher: str

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 of all nodes together: the one that prints and saves."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    @property
    def root_device(self) -> torch.device:
        """The device, under the name that Lightning's strategies give it."""
        return self.device

    def __enter__(self) -> World:
        """This world. Raises :class:`ltx.errors.WorldError` if it isn't the one that is initialised now."""
        from ltx.runtime import init

        init.check_current(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        from ltx.runtime import init

        try:
            init.release(self, error)
        except Exception:
            if error is None:  # else what ended the block is the news, and peers lost along the way are not
                raise


@dataclass(frozen=True)
class Placement:
    """Where a launcher put this process, and where its processes meet.

    ``master`` is the address and port of the store through which they find each other; None for a process that is
    alone.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master: tuple[str, int] | None = None


@dataclass(frozen=True)
class Launcher:
    """One row of :data:`LAUNCHERS`: how to see that a launcher started this process, and what it says."""

    name: str
    started_this: Callable[[Mapping[str, str]], bool]
    placement: Callable[[Mapping[str, str], str], Placement]


def world_from_env(environ: Mapping[str, str], *, backend: str | None = None, cuda_devices: int | None = None) -> World:
    """The world that the environment variables `environ` describe; a world of one if they describe none.

    The device is the CUDA device numbered like the local rank where there are CUDA devices, else the CPU. The backend
    is NCCL on CUDA and gloo on the CPU. Local ranks beyond the number of CUDA devices are an error, except over gloo,
    where they compute on the CPU.

    Args:
        environ: the environment, ``os.environ`` for example.
        backend: use this backend of torch.distributed.
        cuda_devices: the number of CUDA devices to reckon with; None asks torch.

    Raises:
        WorldError: variables that are malformed or contradict each other; the message names variable, value and
            what is allowed.

    Example:
        >>> world_from_env({}, cuda_devices=0).size
        1
        >>> world_from_env({"RANK": "x", "WORLD_SIZE": "2"})
        Traceback (most recent call last):
        ltx.errors.WorldError: environment variable RANK='x' (launcher torchrun): expected an integer from 0 to 1, \
below WORLD_SIZE=2. Launchers set it; unset it and the launcher's other variables to run as a world of one.
    """
    return world_of(placement_from_env(environ), backend=backend, cuda_devices=cuda_devices)


def placement_from_env(environ: Mapping[str, str]) -> Placement:
    """What the first launcher of :data:`LAUNCHERS` that knows `environ` says; alone if none does."""
    for launcher in LAUNCHERS:
        if launcher.started_this(environ):
            return launcher.placement(environ, launcher.name)
    return Placement("none")


def world_of(placement: Placement, *, backend: str | None = None, cuda_devices: int | None = None) -> World:
    """The world of a process at `placement`; arguments and errors as for :func:`world_from_env`."""
    local_rank = placement.local_rank
    if cuda_devices is None:
        cuda_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < cuda_devices <= local_rank and backend != "gloo":
        raise WorldError(
            f"rank {placement.rank} has local rank {local_rank}, but its node has {cuda_devices} CUDA "
            f"device{'s' * (cuda_devices > 1)}: expected a local rank from 0 to {cuda_devices - 1}. Start at most "
            f'{cuda_devices} ranks on this node, or pass backend="gloo" to run those beyond on the CPU.'
        )
    on_cuda = local_rank < cuda_devices
    return World(
        rank=placement.rank,
        size=placement.size,
        local_rank=local_rank,
        node_rank=placement.node_rank,
        num_nodes=placement.num_nodes,
        device=torch.device("cuda", local_rank) if on_cuda else torch.device("cpu"),
        backend=backend or ("nccl" if on_cuda else "gloo"),
        launcher=placement.launcher,
    )


def _torchrun_placement(environ: Mapping[str, str], launcher: str) -> Placement:
    """The variables of torchrun. Those that people leave out when they set them by hand mean: all on one node."""

    def read(name: str, low: int, high: int | None, relation: str, default: int | None = None) -> int:
        text = environ.get(name)
        if text is None and default is not None:
            return default
        allowed = f"an integer {f'of at least {low}' if high is None else f'from {low} to {high}'}, {relation}"
        if text is None:
            raise WorldError(
                f"environment variable {name} is missing (launcher {launcher}): expected {allowed}, since "
                f"{' and '.join(f'{k}={environ[k]!r}' for k in ('RANK', 'WORLD_SIZE') if k in environ)} is set. "
                "Start the processes with torchrun, or set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or "
                "unset them all to run as a world of one."
            )
        value = int(text) if text.isdecimal() else -1
        if value < low or (high is not None and value > high):
            raise WorldError(
                f"environment variable {name}={text!r} (launcher {launcher}): expected {allowed}. Launchers set it; "
                "unset it and the launcher's other variables to run as a world of one."
            )
        return value

    size = read("WORLD_SIZE", 1, None, "the number of processes")
    rank = read("RANK", 0, size - 1, f"below WORLD_SIZE={size}")
    local_size = read("LOCAL_WORLD_SIZE", 1, size, f"at most WORLD_SIZE={size}", default=size)
    local_rank = read(
        "LOCAL_RANK", 0, local_size - 1, f"below LOCAL_WORLD_SIZE={local_size}", default=rank % local_size
    )
    num_nodes = read("GROUP_WORLD_SIZE", 1, size, f"at most WORLD_SIZE={size}", default=-(-size // local_size))
    node_rank = read(
        "GROUP_RANK", 0, num_nodes - 1, f"below the number of nodes, {num_nodes}", default=rank // local_size
    )
    if not environ.get("MASTER_ADDR"):
        raise WorldError(
            f"environment variable MASTER_ADDR={environ.get('MASTER_ADDR')!r} (launcher {launcher}): expected the name "
            "or address of rank 0's node, 127.0.0.1 for example, since RANK and WORLD_SIZE are set. torchrun sets it."
        )
    port = read("MASTER_PORT", 1, 65535, "a port at MASTER_ADDR where the ranks meet")
    return Placement(launcher, rank, size, local_rank, local_size, node_rank, num_nodes, (environ["MASTER_ADDR"], port))


#: Who may have started this process. The first row that recognises the environment is believed.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher("pool", lambda env: POOL_VARIABLE in env and "RANK" in env, _torchrun_placement),
    Launcher("torchrun", lambda env: "RANK" in env or "WORLD_SIZE" in env, _torchrun_placement),
)
