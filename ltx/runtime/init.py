"""``ltx.init``: set up process groups and axes once, and take them down again whatever happens.

A process has at most one world at a time. What is set up is recorded as teardown steps on a stack while it is set up,
so that a failure halfway, an exception in a ``with`` block, ``shutdown()`` and the end of the process all undo exactly
what was done.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ltx import comm
from ltx import tree as trees
from ltx.arguments import checked
from ltx.axis import DEFAULT_NAME, Axis, set_world_axes
from ltx.errors import PeerLostError, TreeError, WorldError, message_of
from ltx.runtime.failures import note_failure, note_uncaught
from ltx.runtime.groups import adopted_world, check_mesh, make_group, meet_as, open_axes, settle
from ltx.runtime.init_arguments import DEFAULT_HEARTBEAT, DEFAULT_TIMEOUT, asked_settings, check_same
from ltx.runtime.launchers import (
    JOIN_VARIABLE,
    placement_beside_group,
    placement_from_arguments,
    placement_from_env,
)
from ltx.runtime.placement import Placement
from ltx.runtime.release_groups import close_others, let_go
from ltx.runtime.world import World, world_of
from ltx.typing import Tree


@dataclass
class _Session:
    """What one ``init`` set up: its world and settings, how to undo it, and how many ``init()`` calls share it."""

    world: World
    settings: dict[str, Any]
    teardown: ExitStack
    holds: int = 1
    before: tuple[World, ...] = ()  # those in whose place this one came: who entered one of them holds this one
    pid: int = field(default_factory=os.getpid)


@dataclass
class _Process:
    """What is up in this process: process-wide, because process groups and axes are."""

    session: _Session | None = None
    fallen: _Session | None = None  # in whose place another was to come that couldn't be set up


_process = _Process()


@checked("backend")
def init(
    strategy: Any = None,
    *,
    backend: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    mesh: Mapping[str, int] | None = None,
    heartbeat_timeout: timedelta = DEFAULT_HEARTBEAT,
    rank: int | None = None,
    size: int | None = None,
    master: str | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
) -> World:
    """Set up this process' part of the world that its launcher describes, and put the world's axes in scope.

    Launchers are torchrun, srun of SLURM, mpirun of Open MPI, MPICH, Intel MPI and MVAPICH2, and :class:`ltx.Pool`;
    ``ltx doctor`` tells which was found. Without one it is a world of one and no process group is made. A process group
    that torch.distributed has already is adopted, and left alone at the end. Call it on every rank, equally often.

    As a context manager it takes everything down at the end of the block, also after an exception. As a plain call it
    lasts until :func:`shutdown` or the end of the process. A second call gives the same world; an inner
    ``with ltx.init()`` then doesn't end what an outer call began.

    Args:
        strategy: a strategy whose fields ``process_group_backend`` and ``timeout`` are used where the arguments below
            are left out.
        backend: the backend of torch.distributed; by default NCCL on CUDA and gloo on the CPU.
        timeout: how long setting up and each operation on a process group may take.
        mesh: the sizes of the world's axes by name, outermost first, ``{"node": 2, "data": 4}`` for example. Rank
            ``r`` is at ``divmod(r, 4)`` then. Their product must be the world's size. By default there is one axis,
            ``{"data": size}``. With several, calls name theirs: ``axis="data"`` for one, ``axis=("node", "data")`` for
            the ranks of both; ``axis=None`` raises.
        heartbeat_timeout: a rank that waits for a peer without a sign of life for so long (its process was stopped, its
            machine or the link to it is down) raises :class:`ltx.errors.PeerLostError`. `timeout` is for peers that
            live and don't come.
        rank: with `size` and `master`, which rank this is, whatever a launcher says: for processes that were started
            by hand. ``rank=0, size=1`` is a process alone. With ``LTX_JOIN`` set the process has no rank until
            :func:`ltx.elastic` has it taken in, and these arguments don't count.
        size: the number of ranks.
        master: where they meet, ``"host:port"``: the name or address of rank 0's node and a free port there.
        local_rank: this rank's index among those of its node.
        local_size: their number, the same on each node; by default all ranks are on one node.

    Returns:
        The world, which is a context manager too.

    Raises:
        WorldError: the environment is malformed, the ranks can't meet, the mesh doesn't fit, a world with other
            arguments is up already, or this process is a fork of a rank's.

    Example:
        >>> import torch, ltx
        >>> with ltx.init() as world:
        ...     world.size, ltx.psum(torch.tensor(3.0))
        (1, tensor(3.))
    """
    asked = asked_settings(strategy, backend, timeout, mesh, heartbeat_timeout)
    told = placement_from_arguments(rank, size, master, local_rank, local_size)
    if told is not None and told.master is not None and JOIN_VARIABLE in os.environ:
        told = None  # a newcomer runs the program of the ranks that are there, and has no rank yet
    if told is not None:
        asked["placement"] = told
    session = _process.session
    if session is not None and session.pid != os.getpid():
        if dist.is_initialized():
            raise WorldError(
                f"rank {session.world.rank}: this process ({os.getpid()}) is a fork of the rank's own "
                f"({session.pid}), whose world isn't its own. Start processes that are to be ranks with ltx.launch, or "
                "before ltx.init."
            )
        session = None
        forget()
    if session is None:
        session = _process.session = _start(asked)
        _process.fallen = None
        note_uncaught(abandon)
        atexit.unregister(shutdown)  # once, and before anything registered earlier
        atexit.register(shutdown)
    else:
        check_same(asked, session.settings, session.world.rank)
        session.holds += 1
    return session.world


def shutdown() -> None:
    """Take down what :func:`init` set up: axes, and the process group unless it was adopted. Does nothing otherwise.

    It runs by itself when a process ends, since one that ends without it is aborted by gloo. :func:`init` works again
    afterwards.
    """
    session, _process.session = _process.session, None
    if session is not None and session.pid == os.getpid():  # a fork has none of the groups' threads
        session.teardown.close()


def abandon(error: BaseException) -> None:
    """Tell the peers that wait in a collective that this rank won't join it, because of `error`."""
    for axis in comm.open_axes():
        if axis.comm is not None:
            why, lost = f"{type(error).__name__}: {message_of(error)}", isinstance(error, PeerLostError)
            axis.comm.recovery.abandon(why, lost)


def forget() -> None:
    """In a fork: the world that is up is the parent's."""
    _process.session = _process.fallen = None


def renew(count: int) -> None:
    """Make a new world in place of one that an exception has left in pieces, with the same settings.

    Args:
        count: which world of this process it is, a number above all before, equal on all ranks. They may have counted
            differently.
    """
    session = _process.session
    settings = dict(session.settings) if session is not None else {}
    settings.pop("placement", None)  # as the environment says
    shutdown()
    if dist.is_initialized():  # the user's own, in pieces as well
        dist.destroy_process_group()
    meet_as(count)
    _process.session = _start(settings)


def settings() -> dict[str, Any]:
    """What the world that is up was set up with; empty if none is."""
    return dict(_process.session.settings) if _process.session is not None else {}


def reform(asked: Mapping[str, Any], count: int, placement: Placement) -> World:
    """A world of other ranks in place of the one that is up, or of one that couldn't be set up.

    Args:
        asked: the :func:`settings` of the world before.
        count: as in :func:`renew`.
        placement: where this process is in the new one.
    """
    old = _process.fallen = _process.session or _process.fallen
    shutdown()
    meet_as(count)
    mesh = ((asked["mesh"][0][0], placement.size),)
    _process.session = session = _start({**asked, "placement": placement, "mesh": mesh})
    if old is not None:
        session.before, session.holds = (*old.before, old.world), old.holds
    _process.fallen = None
    return session.world


def world() -> World:
    """The world that :func:`init` set up; a world of one if it hasn't.

    Example:
        >>> import ltx
        >>> ltx.world().rank
        0
    """
    return _process.session.world if _process.session else world_of(Placement("none"))


def to_device(tree: Tree) -> Tree:
    """`tree` with every leaf that has a ``.to(device)`` method moved to this rank's device; other leaves as they are.

    Example:
        >>> import torch, ltx
        >>> ltx.to_device({"x": torch.ones(2), "name": "a"})
        {'x': tensor([1., 1.]), 'name': 'a'}
    """
    device = world().device

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_meta and device.type != "meta":
            raise TreeError(f"to_device: a leaf is {trees.describe(leaf)} on the meta device, which holds no values.")
        return leaf.to(device) if isinstance(leaf, torch.Tensor) or callable(getattr(leaf, "to", None)) else leaf

    leaves, spec = trees.flatten(tree)
    trees.check_open(
        [None if hasattr(leaf, "to") else leaf for leaf in leaves], tree, "to_device", "moved", tensors_only=True
    )
    return trees.unflatten(spec, [moved(leaf) for leaf in leaves])


def check_current(entered: World) -> None:
    """Raise unless `entered` is the world that is up: one that was pickled, or has ended, can't be entered."""
    if _process.session is None or _process.session.world is not entered:
        raise WorldError(
            f"rank {entered.rank}: this World isn't the one that is initialised now, so it can't be entered. "
            "Write `with ltx.init(...) as world:`."
        )


def release(left: World, error: BaseException | None = None) -> None:
    """The end of a ``with`` block on `left`, by `error` or not: take the world down if nobody else holds it."""
    session = _process.session
    if session is not None and any(known is left for known in (session.world, *session.before)):
        session.holds -= 1
        if session.holds == 0:
            if error is not None:
                note_failure(error)
                abandon(error)
            elif getattr(session.settings.get("placement"), "joins", None) is not None:
                warnings.warn(
                    "LTX_JOIN is set, and ltx.elastic, which would have this process taken into the run there, wasn't "
                    "called: what was done here was done alone. Train with ltx.elastic, or unset LTX_JOIN.",
                    RuntimeWarning,
                    stacklevel=3,
                )
            shutdown()


def _start(asked: Mapping[str, Any]) -> _Session:
    with ExitStack() as undo:
        timeout = asked.get("timeout", DEFAULT_TIMEOUT)
        heartbeat = asked.get("heartbeat_timeout", DEFAULT_HEARTBEAT)
        placement = asked.get("placement") or (
            placement_beside_group(os.environ, dist.get_rank(), dist.get_world_size())
            if dist.is_initialized()
            else placement_from_env(os.environ)
        )
        if dist.is_initialized():
            world = adopted_world(placement, asked.get("backend"), told="placement" in asked)
        else:
            world = world_of(placement, backend=asked.get("backend"))
        mesh = asked.get("mesh", ((DEFAULT_NAME, world.size),))
        check_mesh(mesh, world)
        if world.device.index is not None:
            torch.accelerator.set_device_index(world.device.index)
        held: list[Any] = []
        undo.callback(let_go, held)  # what is pushed first is undone last
        meeting = None
        if not dist.is_initialized() and placement.master is not None:
            meeting = make_group(placement, world, timeout, undo)
        if dist.is_initialized():
            axes, whole = open_axes(mesh, world, timeout, heartbeat, undo)
        else:
            axes, whole = tuple(Axis(name, size) for name, size in mesh), None
        undo.callback(set_world_axes, ())
        set_world_axes(axes, whole)
        undo.callback(close_others, axes if whole is None else (*axes, whole), held)
        if meeting is not None:
            settle(meeting, world, placement, timeout)
        settings = {
            "backend": world.backend,
            "timeout": timeout,
            "heartbeat_timeout": heartbeat,
            "mesh": mesh,
            "placement": placement,
        }
        return _Session(world, settings, undo.pop_all())
