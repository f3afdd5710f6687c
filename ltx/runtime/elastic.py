"""elastic: training that goes on after a loss of ranks, with those that are left, newcomers, or the last snapshot."""

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
from ltx.runtime.membership import Membership, begin_run

#: ``data(indices)`` gives a rank's batch.
Batch = Callable[[Any], Any]

#: The errors that the loss of a peer, or of the connection with it, causes.
LOSSES = (PeerLostError, DeadlockDetectedError, CollectiveTimeoutError, ReplicaDivergedError)

# After this many new worlds in a row without a whole step, a loss isn't the reason.
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
    """Train until `epochs` are done, and go on after a loss of ranks. Every rank calls it, inside of ``ltx.init``.

    When the connection to a peer breaks, a peer falls silent, or the ranks have come out of step or apart, those that
    are left regroup: a rank that comes is alive. They make a world of their own, count ranks from 0 again, call
    `on_reset`, take the state of the last step that some rank has done whole, and go on from there with the samples
    that come next. Since a step takes the same samples on any number of ranks (:class:`ltx.DataPosition`), none is
    lost or comes twice in an epoch, and neither the number of steps nor the learning rate changes. A stopped process
    counts as lost; should it go on later, it is told that the others have gone on without it. Local ranks stay as they
    were, for they say which device is whose.

    Newcomers may join while the others train, such as one in place of a rank that was lost: the same program, started
    with the environment variable ``LTX_JOIN=host:port``, the MASTER_ADDR and MASTER_PORT of the others. It is a world
    of one until it calls this; then it asks to be taken in. The others notice it between two steps, within half of the
    heartbeat timeout, and regroup with it. Newcomers become the last ranks, `on_reset` is called on all, they are
    given state and position, and have the world that :func:`ltx.world` tells then. Where there is no room (`max_ranks`,
    or a step's samples can't be shared out among so many and all fewer) a newcomer waits until there is.

    On accelerators the host doesn't run ahead: before the optimizer of a step runs, it waits until all ranks have all
    gradients. So the state before the step is whole where they haven't.

    They regroup through the store of the first world. The launcher hosts it under torchrun and ``ltx run``, else rank
    0's process: without that one the others can't go on, and say so. ``ltx run`` and torchrun end all ranks
    when one of them dies, and start them anew with ``--max-restarts``; then, as after any other new start, training
    goes on from the last snapshot under `snapshots` that is whole, instead of from `state` and `position`.

    Args:
        train: a train step with ``overlap="backward"`` (others don't commit whole), on the world's own axis.
        state: where training starts: ``train.init(params)``. It may be donated to the first step.
        data: ``data(indices)`` gives this rank's arguments of the step after the state: a tuple, or the only one.
            `indices` are the samples that it takes, int64, 1-dim; none of them where there are fewer than ranks.
        position: where in the data training starts.
        epochs: the number of epochs after which it ends.
        on_step: called after each step on this rank with the new state, its metrics and the position behind it. Not on
            a rank for a step that it has been given by its peers.
        on_reset: called in this order with the new :class:`ltx.World` after it was made and before ranks take the
            state over, as Horovod's reset callbacks.
        min_ranks: with fewer left, all raise.
        max_ranks: more aren't taken in; None is without limit.
        meeting_timeout: how long those that regroup wait for a rank that lives and doesn't come: for longer than a
            step takes. No rank waits for ranks that are known to be gone. A newcomer waits so long for an answer.
        snapshots: a directory that all ranks see, for checkpoints (:mod:`ltx.checkpoint`), written every `every` steps
            and at the end, of which the latest `keep` stay. Random number generators go on only on as many ranks. No
            other run can use the directory meanwhile: it is locked.
        every, keep: see `snapshots`.

    Returns:
        The state at the end, and the position.

    Raises:
        PeerLostError: too few ranks are left, the store's holder is gone, or the others have gone on without this rank.
        CheckpointError: another run uses the directory `snapshots`, or a snapshot can't be written or read.
        ReplicaDivergedError: ranks have different values, none of them most ranks', and there are no snapshots.
        StrategyError: the strategy keeps parameters, optimizer state or communication state for each rank alone or in
            shards, which a lost rank takes with it, and there are no `snapshots`. With these, a loss is raised, and a
            new start goes on from them.
        WorldError: there is no training that this newcomer could join, or it is over.
        RankMismatchError: this newcomer's model, optimizer, data, epochs or snapshots aren't those of the others, which
            train on.
        InputError, UnsupportedError: the arguments can't be gone on with after a loss; when it is called.

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
    """There are some, and they are to be taken in before the next step."""


class _Told(NamedTuple):
    """The values that a rank tells its peers in a new world. A newcomer has done -1 steps."""

    position: DataPosition
    begun: bool
    step: int = -1
    saved: int = -1
    digest: str = ""  # fingerprint of the state
    run: str | None = None  # that the snapshots belong to


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
    position: DataPosition  # that belongs to the state
    settings: dict[str, Any] = field(default_factory=settings_of_world)
    membership: Membership | None = None
    hold: Hold | None = None  # on the directory of the snapshots
    begun: bool = False  # has looked for a snapshot to start from
    saved: int = -1  # the step of the last snapshot
    futile: int = 0  # new worlds since the last whole step

    def __post_init__(self) -> None:
        self.axis = self.train.step.axis
        self.place = self.settings.get("placement", Placement("none"))
        # False for a newcomer until its peers have given it theirs.
        self.has_state = self.place.joins is None

    def check(self) -> None:
        """Raise where a loss of ranks would find that training can't go on."""
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
        except BaseException as error:  # so that others don't wait for this rank
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
        """Begin a run with all ranks, so that they can regroup after a loss, and keep others out of the snapshots."""
        together, store = Together("elastic", self.axis), process.stores.get(self.place)
        size, rank = together.size, together.rank

        def begin() -> tuple[None, str]:
            """On rank 0, for all ranks or none."""
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
            members = range(size)
            self.membership = Membership.of_member(store, token, rank, members, process.worlds, self._heartbeat_s)
            collectives.barrier("the beginning of elastic", self.axis)  # all of them beat

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
        """Be taken into a run that has begun, and given its state."""
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
        if self.saved != self.state.step:  # a peer may have been lost in between
            self._save()
        # A rank that hasn't done the last step would lose a rank that ended now.
        collectives.barrier("the end of elastic", self.axis)

    def _room(self, here: int, asking: int) -> int:
        """How many of the newcomers that ask can be taken in where so many ranks are."""
        most = here + asking if self.max_ranks is None else min(here + asking, self.max_ranks)
        # A loss of any of them has to leave a number that can go on.
        sizes = range(self.min_ranks, most + 1)
        return max(0, next((size - 1 for size in sizes if not self.position.fits(size)), most) - here)

    def _go_on(self, place: Placement) -> None:
        """Make a world at `place`, or the next one if that fails, and take over the state of the last whole step."""
        while True:
            try:
                done = self._taken_over(self._in_new_world(place))
                break
            except (*LOSSES, WorldError) as error:  # while the new world was made
                loss = error
            place = self._new_place(loss)
        if not done:
            raise ReplicaDivergedError(
                f"elastic: rank {place.rank}: ranks have done as many steps and have different values, none of them "
                "most ranks', and there is no snapshot to go on from. Give a directory for snapshots=."
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
        # This comes before the world ends, since the world knows which peers are gone; without a world nothing is
        # known.
        axis_comm = comm.resolve(self.axis).comm if settings_of_world() else None
        lost = list if axis_comm is None else axis_comm.gone
        abandon(loss)
        _let_go_of_frames(loss)
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
        """How far each rank of a new world is."""
        assert self.membership is not None
        process.stores[place] = self.membership.world_store()
        self.place = place
        making = self.membership.making_world(self.has_state, place)
        new_world = reform(self.settings, self.membership.worlds, place, making)
        for callback in self.on_reset:
            callback(new_world)
        mine = _Told(self.position, begun=True)
        if self.has_state:
            run = None if self.hold is None else directory.run_in(self._base)
            mine = _Told(self.position, self.begun, self.state.step, self.saved, fingerprint(self.state), run)
        told = list(collectives.all_gather_object(mine, self.axis))
        if self.snapshots is not None and self.hold is None:
            self.hold = Hold(self._base, first=False)
            directory.continue_run(self._base, next((rank.run for rank in told if rank.run is not None), None))
        return told

    def _taken_over(self, told: list[_Told]) -> bool:
        """Whether all ranks, which are as far as they `told`, have the state of the last whole step now."""
        there = [rank for rank in told if rank.step == max(other.step for other in told)]
        digest, count = Counter(rank.digest for rank in there).most_common(1)[0]
        self.begun = all(rank.begun for rank in told)
        if 2 * count <= len(there):  # no rank knows which values are right
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
        # Rank 0's answer: another rank may look when it has been saved just now, by a peer that is further.
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


def _let_go_of_frames(loss: BaseException | None) -> None:
    """Of what failed: they hold what was under way, and with it connections of the world that ends."""
    while loss is not None:
        traceback.clear_frames(loss.__traceback__)
        loss = loss.__cause__ or loss.__context__
