"""The World: this process' rank, the number of processes, the device; and the current session, and its end."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from ltx.core import comm
from ltx.core.base.errors import PeerLostError, WorldError, said_of
from ltx.core.base.handed_in import HandedIn
from ltx.core.comm.backends import default_backend
from ltx.core.ranks import axis as axes

#: The loopback address: no other machine can connect to it.
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Placement:
    """The placement of this process, and where its peers meet. Other fields are as in :class:`ltx.World`."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master: tuple[str, int] | None = None  # the address of the store where ranks meet; None if the process is alone
    own_devices: int | None = None  # the number of devices that only this process sees; None if all see all
    knows_node: bool = field(default=True, compare=False)  # else ranks compare their nodes when they meet


@dataclass(frozen=True)
class World:
    """The processes that run together, seen from one of them.

    ``ltx.init()`` makes it and :func:`ltx.world` returns it. As a context manager it ends that world.

    Attributes:
        rank: this process' index among all, 0 to ``size - 1``.
        size: the number of processes, on all nodes together.
        local_rank: this process' index among those of its node.
        node_rank: the index of its node.
        num_nodes: the number of nodes.
        device: the device that this rank computes on.
        backend: torch.distributed's backends of its process groups, such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
        launcher: who started the processes: ``"pool"``, ``"torchrun"``, ``"slurm"`` (srun), ``"openmpi"``, ``"pmi"``
            (MPICH, Intel MPI), ``"mvapich2"``; ``"arguments"`` if :func:`ltx.init` was told by its caller, ``"user"``
            for a process group that was initialised before ltx, ``"none"`` for a process that nobody started as a rank.
        local_size: the number of processes on this node.

    Example:
        >>> import ltx
        >>> with ltx.init() as world:
        ...     world.rank, world.size, world.backend
        (0, 1, 'gloo')
    """

    rank: int
    size: int
    local_rank: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str
    launcher: str
    local_size: int = 1

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 of all nodes together: the rank that prints and saves."""
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
        """This world. Raises :class:`ltx.errors.WorldError` if this World isn't the current one."""
        if process.session is None or process.session.world is not self:  # this World is a pickled copy, or has ended
            raise WorldError(
                f"rank {self.rank}: this World isn't the one that is initialised now, so it can't be entered. "
                "Write `with ltx.init(...) as world:`."
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        session = process.session
        if session is None or all(known is not self for known in (session.world, *session.before)):
            return
        session.holds -= 1
        if session.holds:  # another call holds the world
            return
        try:
            if error is not None:
                HandedIn.launchers.note_failure(error)
                abandon(error)
            shutdown()
        except Exception:
            if error is None:  # else the block's own error is raised, not an error of the teardown
                raise


@dataclass
class Session:
    """The result of one ``init``: its world, settings, teardown, and the number of ``init()`` calls that share it."""

    world: World
    settings: dict[str, Any]
    teardown: ExitStack
    holds: int = 1
    before: tuple[World, ...] = ()  # the worlds that failed before it, whose `with` blocks keep it open
    pid: int = field(default_factory=os.getpid)


@dataclass
class _Process:
    """The session of this process: process-wide, because process groups and axes are."""

    session: Session | None = None  # the session of the current world
    #: The number of worlds that this process has been in, equal on all ranks: a part of the world's keys in the store,
    #: so that one made after ``shutdown()`` doesn't read old addresses, and ranks of other numbers don't meet.
    worlds: int = 0
    #: Called whenever this process has made a world.
    when_made: list[Callable[[], object]] = field(default_factory=list)
    abandoned: bool = False  # whether this rank leaves its world because of an exception
    #: The store through which the ranks of the last world, or of a world that is being made, met. It stays open: if
    #: rank 0 closed it and opened another on the same port, a peer could still reach the old one.
    stores: dict[Placement, Store] = field(default_factory=dict)
    # the parent's stores, which a fork mustn't close
    inherited: list[dict[Placement, Store]] = field(default_factory=list)


process = _Process()


def _leave_stores_to_parent() -> None:
    """In a fork: keep the parent's stores unused, since their threads don't exist here."""
    process.inherited.append(process.stores)
    process.stores = {}


os.register_at_fork(after_in_child=_leave_stores_to_parent)


def settings_of_world() -> dict[str, Any]:
    return dict(process.session.settings) if process.session is not None else {}


def world() -> World:
    """The world that :func:`init` has set up; a world of one if there is none.

    In a process that a rank has started by ``multiprocessing``, such as a DataLoader's worker, it is the rank's world.
    They can't communicate.

    Example:
        >>> import ltx
        >>> ltx.world().rank
        0
    """
    return process.session.world if process.session else world_of_parent() or world_of(Placement("none"))


#: In a rank that has peers: its process' id and its world, for the processes that it starts.
RANK_VARIABLE = "LTX_RANK"


def tell_children(of: World) -> None:
    """Tell the processes that this process starts which rank it is."""
    os.environ[RANK_VARIABLE] = json.dumps([os.getpid(), {**asdict(of), "device": str(of.device)}])


def world_of_parent() -> World | None:
    """The world of the rank that has started this process by ``multiprocessing``; None for any other process."""
    parent, said = multiprocessing.parent_process(), os.environ.get(RANK_VARIABLE)
    pid, fields = json.loads(said) if parent is not None and said is not None else (None, {})
    return World(**fields | {"device": torch.device(fields["device"])}) if parent and pid == parent.pid else None


def _check_alone() -> None:
    """Raise if this process has had no world, but is one of several ranks."""
    if (mine := world_of_parent()) is not None:
        raise WorldError(
            f"rank {mine.rank}: this process ({os.getpid()}) is a worker of rank {mine.rank} of {mine.size}, and can't "
            "communicate: its peers know the rank's own process. Call collectives and steps there. If the worker is to "
            "compute alone, write `with ltx.init(rank=0, size=1):`."
        )
    HandedIn.launchers.check_alone(os.environ)


axes.checks_alone.append(_check_alone)


def shutdown() -> None:
    """Take down what :func:`init` set up: axes, and the process group unless it was adopted. Does nothing otherwise.

    It runs by itself when a process ends, which gloo would abort without it. :func:`init` works again afterwards.
    """
    session, process.session = process.session, None
    if session is not None and session.pid == os.getpid():  # the groups' threads don't exist in a fork
        session.teardown.close()


def abandon(error: BaseException, call: int | None = None) -> None:
    """Tell peers that this rank won't join the collective they wait in, because of `error` in a Pool's `call`."""
    process.abandoned = True
    why, lost = said_of(error), isinstance(error, PeerLostError)
    for axis_comm in comm.communicators():
        axis_comm.passes.failed = axis_comm.passes.failed or comm.Failed(why, lost, call=call)
    for peers in comm.all_peers():
        peers.tell(wait=True, heard=world().rank == 0)  # with rank 0's process the store may end


def forget() -> None:
    """Run in each fork, where the open world is the parent's."""
    process.session = None
    os.environ.pop(RANK_VARIABLE, None)


def accelerators() -> tuple[str, int]:
    """The type and number of this machine's accelerators, without initialising CUDA, which forks couldn't use then."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return "cuda", 0
    return found.type, int(torch.get_device_module(found.type).device_count())


def world_of(placement: Placement, *, backend: str | None = None, cuda_devices: int | None = None) -> World:
    """The world of a process at `placement`. The device is the accelerator with the local rank's number; the first one
    if each rank sees only its own (srun's tasks, or one entry in CUDA_VISIBLE_DEVICES); the CPU if there is none. Local
    ranks beyond the devices are an error, but over gloo. `cuda_devices`: None asks torch which accelerators there are.
    """
    local_rank = placement.local_rank
    kind, count = accelerators() if cuda_devices is None else ("cuda", cuda_devices)
    index = 0 if count == placement.own_devices else local_rank
    if 0 < count <= index and backend != "gloo":
        raise WorldError(
            f"rank {placement.rank} has local rank {local_rank}, but its node has {count} {kind.upper()} "
            f"device{'s' * (count > 1)}: expected a local rank from 0 to {count - 1}. Start at most "
            f'{count} ranks on this node, or pass backend="gloo" to run those beyond on the CPU.'
        )
    device = torch.device(kind, index) if index < count else torch.device("cpu")
    on_node = placement.node_rank, placement.num_nodes, device, backend or default_backend(device)
    return World(placement.rank, placement.size, local_rank, *on_node, placement.launcher, placement.local_size)
