"""elastic: training that goes on after ranks were lost, with the ranks that are left and with newcomers."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ltx import checkpoint
from ltx.checkpoint import directory
from ltx.checkpoint.directory import Hold
from ltx.checkpoint.together import Together
from ltx.core import collectives, comm
from ltx.core.base import tree
from ltx.core.base.arguments import seconds, whole
from ltx.core.comm.signature import Signature
from ltx.core.training.replicas import fingerprint
from ltx.core.training.train_state import Metrics, TrainState
from ltx.core.training.train_step import TrainStep
from ltx.core.world.init import reform
from ltx.core.world.placement import Placement
from ltx.core.world.world import World, abandon, process, settings_of_world, world
from ltx.data import DataPosition
from ltx.errors import (
    CollectiveTimeoutError,
    DeadlockDetectedError,
    InputError,
    LtxError,
    PeerLostError,
    ReplicaDivergedError,
    StrategyError,
    UnsupportedError,
    WorldError,
)
from ltx.runtime.membership import Membership, begin_run, part_of_run

#: ``data(indices)`` gives a rank's batch.
Batch = Callable[[Any], Any]

#: The errors that the loss of a peer, or of the connection with it, causes.
LOSSES = (PeerLostError, DeadlockDetectedError, CollectiveTimeoutError, ReplicaDivergedError)

# If so many new worlds in a row fail before their first whole step, the reason isn't a lost rank: elastic raises.
_PATIENCE = 3


def elastic(
    train: TrainStep,
    state: TrainState,
    data: Batch,
    position: DataPosition,
    *,
    epochs: int,
    on_step: Callable[[TrainState, Metrics, DataPosition], object] | None = None,
    on_reset: Sequence[Callable[[World], object]] = (),
    min_ranks: int = 1,
    max_ranks: int | None = None,
    meeting_timeout: timedelta | float = timedelta(seconds=60),
    snapshots: str | os.PathLike[str] | None = None,
    every: int = 100,
    keep: int = 2,
) -> tuple[TrainState, DataPosition]:
    """Train for `epochs` epochs, and go on when ranks are lost. Every rank calls it, inside of ``ltx.init``.

    When the connection to a peer breaks, a peer falls silent, or the ranks have come out of step or have different
    values, the ranks that are left regroup: each rank that answers is alive. They make a world of their own, count
    ranks from 0 again, call `on_reset`, take the state of the last step that some rank has completed, and go on from
    there with the samples that come next. Since a step takes the same samples on any number of ranks
    (:class:`ltx.DataPosition`), no sample is lost or comes twice in an epoch, and neither the number of steps nor the
    learning rate changes. A stopped process counts as lost; if it runs again later, it gets a PeerLostError, since the
    others have gone on without it. Local ranks don't change, because they say which device a process uses.

    Newcomers may join while the others train, such as one in place of a rank that was lost: the same program, started
    with the environment variable ``LTX_JOIN=host:port``, the MASTER_ADDR and MASTER_PORT of the others. A newcomer is a
    world of one until it calls this function; then it asks to join. The others notice it between two steps, within half
    of the heartbeat timeout, and regroup with it. Newcomers become the last ranks, `on_reset` is called on all ranks,
    the newcomers get state and position, and :func:`ltx.world` tells them the new world. A newcomer waits while there
    is no room: at `max_ranks`, or while a step's samples can't be divided among that many ranks or fewer.

    On accelerators the host doesn't run ahead: before the optimizer of a step runs, the host waits until all ranks have
    all gradients. So if a rank is lost before that, the state before the step is still whole.

    The ranks regroup through the store of the first world. The launcher hosts this store under torchrun and ``ltx
    run``, else rank 0's process does: if the host is gone, the other ranks raise PeerLostError. ``ltx run`` and
    torchrun end all ranks when one of them dies, and restart them with ``--max-restarts``; then, as after any restart,
    training goes on from the last whole snapshot under `snapshots`, instead of from `state` and `position`.

    Args:
        train: a train step with ``overlap="backward"`` (other modes commit a step in pieces), on the world's own axis.
        state: where training starts: ``train.init(params)``. It may be donated to the first step.
        data: ``data(indices)`` gives this rank's arguments of the step after the state: a tuple, or a single argument.
            `indices` are the samples of this rank, int64, 1-dim; empty if a step has fewer samples than ranks.
        position: where in the data training starts.
        epochs: the number of epochs after which training ends.
        on_step: called after each step with the new state, its metrics and the position after it. A rank that got a
            step's result from its peers doesn't call it for that step.
        on_reset: functions that are called in this order with the new :class:`ltx.World`, after it was made and before
            ranks get the state, as Horovod's reset callbacks.
        min_ranks: if fewer ranks are left, all of them raise PeerLostError.
        max_ranks: newcomers beyond this number wait; None sets no limit.
        meeting_timeout: how long ranks that regroup wait for a rank that lives but doesn't come: choose more than the
            time of a step. No rank waits for ranks that are known to be gone. A newcomer waits this long for an answer.
        snapshots: a directory that all ranks see, for checkpoints (:mod:`ltx.checkpoint`), written every `every` steps
            and at the end. The latest `keep` stay. Random number generators are restored only on as many ranks as they
            were saved from. The directory is locked against other runs.
        every, keep: see `snapshots`.

    Returns:
        The state and the position at the end.

    Raises:
        PeerLostError: too few ranks are left, the store's host is gone, or the others have gone on without this rank.
        CheckpointError: another run uses the directory `snapshots`, or a snapshot can't be written or read.
        ReplicaDivergedError: ranks have different values, no value has a majority, and there are no snapshots.
        StrategyError: the strategy keeps parameters, optimizer state or communication state that differs between ranks
            or is sharded, so a lost rank takes its part with it, and there are no `snapshots`. With `snapshots`, the
            error that the loss caused is raised, and a restart of all ranks goes on from the last snapshot.
        WorldError: there is no training that this newcomer could join, or it is over.
        RankMismatchError: this newcomer's model, optimizer, data, epochs or snapshots aren't those of the others, which
            train on.
        InputError, UnsupportedError: with these arguments training couldn't go on after a loss; raised at the call.

    Any other error of a rank (a mistake in `data`, an interrupt) ends its training; the others go on without it.

    Source: Horovod's ``hvd.elastic.run`` (order of callbacks), torchrun's restarts.

    Example:
        >>> import torch, ltx
        >>> x = torch.arange(8.0)
        >>> step = ltx.data_parallel(lambda w, x: ltx.Weighted((w - x).square().sum(), len(x)))
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        >>> start = ltx.DataPosition(len(x), batch_size=4, weighted=True)
        >>> with ltx.init():
        ...     state, position = ltx.elastic(train, train.init(torch.tensor(0.0)), lambda i: x[i], start, epochs=3)
        >>> state.step, position.epoch, position.done
        (6, 3, 0)
    """
    limit_s = seconds("elastic: meeting_timeout", meeting_timeout)
    others: Any = (on_step, tuple(on_reset), min_ranks, max_ranks, limit_s, snapshots, every, keep, state, position)
    run = ElasticRun(replace(train, confirms=True), data, epochs, *others)
    run.check()
    return run.to_the_end()


class _NewcomersError(LtxError):
    """Newcomers wait to join, and have to be taken in before the next step."""


class _Told(NamedTuple):
    """How far a rank is, which it tells its peers in a new world. `step` is -1 for a newcomer, which has no state."""

    position: DataPosition
    begun: bool
    step: int = -1
    saved: int = -1
    digest: str = ""
    run: str | None = None  # the id of the run that the snapshots belong to


@dataclass
class ElasticRun:
    """One call of :func:`elastic`: its arguments, and how far it has come, in one world after the other."""

    train: TrainStep
    data: Batch
    epochs: int
    on_step: Callable[[TrainState, Metrics, DataPosition], object] | None
    on_reset: tuple[Callable[[World], object], ...]
    min_ranks: int
    max_ranks: int | None
    meeting_timeout_s: float
    snapshots: str | os.PathLike[str] | None
    every: int
    keep: int
    state: TrainState
    position: DataPosition  # the position after the step that gave `state`
    settings: dict[str, Any] = field(default_factory=settings_of_world)
    membership: Membership | None = None
    hold: Hold | None = None  # the lock on the snapshots' directory
    begun: bool = False  # whether this rank has looked for a snapshot to start from
    saved: int = -1  # the step of the last snapshot
    futile: int = 0  # the number of new worlds since the last whole step

    def __post_init__(self) -> None:
        self.axis = self.train.step.axis
        self.place = self.settings.get("placement", Placement("none"))
        # A newcomer has no state until its peers have sent theirs.
        self.has_state = self.place.joins is None

    def check(self) -> None:
        """Raise now if training couldn't go on after a loss of ranks, instead of at the loss."""
        here, mesh = world(), self.settings.get("mesh", ())
        for name in ("epochs", "min_ranks", "max_ranks", "every", "keep"):
            if name != "max_ranks" or self.max_ranks is not None:
                whole(f"elastic: {name}", getattr(self, name), 1)
        if not self.min_ranks <= here.size <= (self.max_ranks or here.size) and self.has_state:
            limits = f"min_ranks={self.min_ranks}" + f", max_ranks={self.max_ranks}" * (self.max_ranks is not None)
            raise InputError(f"elastic: {limits}, and there are {here.size} ranks.")
        if self.train.overlap == "update":
            raise UnsupportedError(
                "elastic: the train step has overlap='update', which doesn't commit a step whole: a "
                'loss in the middle would leave an invalid state. Make it with overlap="backward".'
            )
        if self.axis is not None and not isinstance(self.axis, str):
            raise UnsupportedError(
                f"elastic: the step is on {self.axis!r}, which a new world doesn't have. Leave axis= out, or give its "
                "name."
            )
        if len(mesh) > 1:
            raise UnsupportedError(
                f"elastic: the world has the axes {dict(mesh)}, and those that are left after a loss don't fill such a "
                "mesh. Use ltx.init() without mesh=."
            )
        if here.size > 1 and here.launcher == "user":
            raise UnsupportedError(
                "elastic: the process group was initialised before ltx, so ltx can't make another in its place. Leave "
                "that to ltx.init()."
            )
        if self.has_state:
            self.position.check_sizes(self.min_ranks, here.size)
        if (own := ones_own(self.state)) and self.snapshots is None and here.size > 1:
            raise StrategyError(
                f"elastic: with {self.state.layout.strategy} the {' and '.join(own)} of a lost rank "
                f"{'are' if len(own) > 1 else 'is'} lost with it, so the others can't go on. Give a directory for "
                "snapshots=, from which a new start of all ranks goes on."
            )

    def to_the_end(self) -> tuple[TrainState, DataPosition]:
        """Train, and make a new world after each loss."""
        over = False
        try:
            if self.has_state:
                self._open()
            else:
                self._join()
            while True:
                try:
                    if not self.begun:
                        self._restore()
                    self.begun = True
                    self._train()
                    over = True
                    return self.state, self.position
                except (*LOSSES, _NewcomersError) as loss:
                    self._go_on(self._new_place(loss))
        except BaseException as error:  # else the other ranks would wait for this one
            abandon(error)
            raise
        finally:
            if self.membership is not None:
                self.membership.close(over)
            if self.hold is not None:
                self.hold.release()

    @property
    def _base(self) -> Path:
        assert self.snapshots is not None
        return Path(os.path.abspath(self.snapshots))

    @property
    def _heartbeat_s(self) -> float:
        return float(self.settings["heartbeat_timeout"].total_seconds())

    def _open(self) -> None:
        """Begin a run with all ranks, which can then regroup after a loss, and lock the snapshots' directory."""
        together, store = Together("elastic", self.axis), process.stores.get(self.place)
        size, rank = together.size, together.rank

        def begin() -> tuple[None, str]:
            """Lock the directory and open the run, on rank 0. If that fails, `exchange` raises on all ranks."""
            if self.snapshots is not None and rank == 0:
                self.hold = Hold(self._base, first=True)
            if store is None or rank > 0:
                return None, ""
            own = ones_own(self.state)
            refusal = f"the {' and '.join(own)} of each rank is its own." if own else ""
            return None, begin_run(store, size, process.worlds, self._entrance(), refusal)

        _, (token, *_) = together.exchange(begin, "elastic: the training can't begin")
        if self.snapshots is not None and rank > 0:
            self.hold = Hold(self._base, first=False)
        if store is not None:
            mine = part_of_run(store, token), token, rank
            self.membership = Membership(*mine, range(size), process.worlds, self._heartbeat_s)
            collectives.barrier("the beginning of elastic", self.axis)  # after this, all ranks send heartbeats

    def _entrance(self) -> Signature:
        """The settings, besides the program, that newcomers and members have to share."""
        parts = ("params", "frozen", "buffers", "opt_state")
        leaves = zip(tree.leaf_paths(self.state), tree.flatten(self.state)[0], strict=True)
        found = {path: leaf for path, leaf in leaves if path.partition(".")[0] in parts}
        said = {
            "strategy": self.state.layout.strategy,
            "data": replace(self.position, epoch=0, done=0),
            "epochs": self.epochs,
            "snapshots": self.every if self.snapshots is not None else None,
            "axis": self.settings["mesh"][0][0],
            "backend": self.settings["backend"],
        }
        static = ", ".join(f"{name}={value}" for name, value in said.items())
        return Signature.of("elastic", list(found), list(found.values()), static)

    def _join(self) -> None:
        """Join a run that has begun, and get its state."""
        limit_s = self.meeting_timeout_s
        self.membership = Membership.of_newcomer(self.place, self._entrance(), limit_s, self._heartbeat_s)
        place = self.membership.be_taken(self.place)
        if place.local_rank != self.place.local_rank and world().device.type == "cuda":
            raise WorldError(
                f"rank {place.rank}: this newcomer computes on {world().device}, as another rank of its node "
                f"does. Set LOCAL_RANK to one that is free, such as {place.local_rank}."
            )
        self.begun = True
        self._go_on(place)

    def _train(self) -> None:
        size, rank = comm.size_and_rank(self.axis)
        while self.position.epoch < self.epochs:
            if self.membership is not None and self.membership.waiting and self._room(size, self.membership.waiting):
                raise _NewcomersError(f"rank {rank}: newcomers are to be taken in.")
            batch = self.data(self.position.indices(rank, size))
            state, metrics = self.train(self.state, *(batch if isinstance(batch, tuple) else (batch,)))
            self.state, self.position, self.futile = state, self.position.after_step(), 0
            if self.on_step is not None:
                self.on_step(state, metrics, self.position)
            if state.step % self.every == 0:
                self._save()
        if self.saved != self.state.step:  # after a loss near the end, the last state may be unsaved
            self._save()
        # If a rank ended now, a rank that is still in the last step would count it as lost.
        collectives.barrier("the end of elastic", self.axis)

    def _room(self, here: int, asking: int) -> int:
        """How many of `asking` newcomers `here` ranks can take in."""
        most = here + asking if self.max_ranks is None else min(here + asking, self.max_ranks)
        # If any of these ranks are lost later, training has to be possible with the rest.
        sizes = range(self.min_ranks, most + 1)
        return max(0, next((size - 1 for size in sizes if not self.position.fits(size)), most) - here)

    def _go_on(self, place: Placement) -> None:
        """Make a new world in which this rank is at `place`, and take over the state of the last whole step."""
        while True:
            try:
                done = self._taken_over(self._in_new_world(place))
                break
            except (*LOSSES, WorldError) as error:  # a rank was lost while the new world was made
                loss = error
            place = self._new_place(loss)
        if not done:
            raise ReplicaDivergedError(
                f"elastic: rank {place.rank}: ranks have done as many steps and have different values, none of "
                "which has a majority, and there is no snapshot to go on from. Give a directory for snapshots=."
            )

    def _new_place(self, loss: Exception) -> Placement:
        """This rank's place among those that are left; raises if it can't go on."""
        if own := ones_own(self.state):
            loss.add_note(f"elastic: the {' and '.join(own)} of each rank is its own. Start all ranks again.")
            raise loss
        membership = self.membership
        self.futile += 1
        if membership is None or self.futile > _PATIENCE:
            raise loss
        before = set(membership.members)
        # This asks before the world is abandoned, since only a world knows which peers are gone.
        axis_comm = comm.resolve(self.axis).comm if settings_of_world() else None
        lost = list if axis_comm is None else axis_comm.gone
        abandon(loss)
        failed: BaseException | None = loss
        while failed is not None:  # the frames' local variables keep the old world's connections alive
            traceback.clear_frames(failed.__traceback__)
            failed = failed.__cause__ or failed.__context__
        place = membership.regroup(self.has_state, self.place, lost, self.meeting_timeout_s, self._room)
        if place is None:
            raise PeerLostError(
                f"rank {self.place.rank}: the others have gone on without this rank, which they took for lost. Start "
                "it again with all of them, from the last snapshot."
            ) from loss
        if not before.issuperset(membership.members):
            self.futile = 0
        if place.size < self.min_ranks:
            raise PeerLostError(
                f"rank {self.place.rank}: {place.size} of {self.place.size} ranks are left, fewer than "
                f"min_ranks={self.min_ranks}."
            ) from loss
        return place

    def _in_new_world(self, place: Placement) -> list[_Told]:
        """Make the new world, in which this rank is at `place`. Returns how far each of its ranks is."""
        assert self.membership is not None
        process.stores[place] = self.membership.world_store()
        self.place = place
        making = self.membership.making_world(self.has_state, place)
        new_world = reform(self.settings, self.membership.worlds, place, making)
        for callback in self.on_reset:
            callback(new_world)
        mine = _Told(self.position, begun=True)
        if self.has_state:
            run = None if self.hold is None else directory.runs.get(self._base)
            mine = _Told(self.position, self.begun, self.state.step, self.saved, fingerprint(self.state), run)
        told = list(collectives.all_gather_object(mine, self.axis))
        if self.snapshots is not None and self.hold is None:
            self.hold = Hold(self._base, first=False)
            if (known := next((rank.run for rank in told if rank.run is not None), None)) is not None:
                directory.runs[self._base] = known
        return told

    def _taken_over(self, told: list[_Told]) -> bool:
        """Give all ranks the state of the last whole step, which some rank has `told` of. Whether that was possible."""
        there = [rank for rank in told if rank.step == max(other.step for other in told)]
        digest, count = Counter(rank.digest for rank in there).most_common(1)[0]
        self.begun = all(rank.begun for rank in told)
        if 2 * count <= len(there):  # no digest has a majority, so no rank knows which values are right
            self.has_state = self._restore()
            return self.has_state
        source = next(rank for rank in there if rank.digest == digest)
        if len({(rank.step, rank.digest) for rank in told}) > 1:
            self.state, self.position = self.train.broadcast(self.state, told.index(source)), source.position
        self.saved, self.has_state = min(rank.saved for rank in there), True
        return True

    def _save(self) -> None:
        if self.snapshots is not None:
            data = asdict(self.position)
            checkpoint.save(self.snapshots, self.state, data=data, keep=self.keep, axis=self.axis)
        self.saved = self.state.step

    def _restore(self) -> bool:
        """Go on from the last snapshot. Whether there is one."""
        if self.snapshots is None:
            return False
        # Rank 0 answers for all: a peer may save a snapshot between the looks of two ranks.
        if not collectives.broadcast_object(checkpoint.latest(self.snapshots) is not None, 0, self.axis):
            return False
        restored = checkpoint.load(self.snapshots, self.state, rng="same ranks", axis=self.axis)
        saved = DataPosition(**restored.data)
        if replace(saved, epoch=0, done=0) != replace(self.position, epoch=0, done=0):
            raise InputError(
                f"elastic: the snapshot is of a run over other data or in another order: {saved}, and now "
                f"{self.position}. Give the position that the run began with, or another directory for snapshots."
            )
        self.state, self.position, self.saved = restored.state, saved, restored.step
        return True


def ones_own(state: TrainState) -> list[str]:
    """The parts of `state` that a lost rank takes with it. Buffers aren't among them: any rank's will do."""
    layout = state.layout
    parts = {"params": state.trained, "opt_state": state.opt_state, "sync_state": state.sync_state.leaves}
    return [name for name, part in parts.items() if getattr(layout, name) != "replicated" and tree.flatten(part)[0]]
