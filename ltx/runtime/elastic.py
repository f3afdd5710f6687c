"""elastic: training that goes on after a loss of ranks, with those that are left or from the last snapshot."""

from __future__ import annotations

import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from ltx import collectives, tree, wire
from ltx.axis import GroupBacking
from ltx.errors import (
    CollectiveTimeoutError,
    DeadlockDetectedError,
    InputError,
    PeerLostError,
    ReplicaDivergedError,
    StrategyError,
    UnsupportedError,
    WorldError,
)
from ltx.runtime import init
from ltx.runtime.groups import meet_in, store_of, worlds_so_far
from ltx.runtime.placement import Placement
from ltx.runtime.regroup import Meeting
from ltx.runtime.world import World
from ltx.transforms.data_position import DataPosition
from ltx.transforms.divergence import fingerprint
from ltx.transforms.train_state import Metrics, TrainState
from ltx.transforms.train_step import TrainStep

#: What the loss of a peer, or of the connection with it, shows as.
LOSSES = (PeerLostError, DeadlockDetectedError, CollectiveTimeoutError, ReplicaDivergedError)

# After so many new meetings in a row without a whole step in between, a loss isn't the reason.
_PATIENCE = 3

Batch = Callable[[Any], Any]
_Told = tuple[int, str, DataPosition]  # steps done, fingerprint of the state, position


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
    meeting_timeout: timedelta = timedelta(seconds=60),
    snapshots: str | os.PathLike[str] | None = None,
    every: int = 100,
    keep: int = 2,
) -> tuple[TrainState, DataPosition]:
    """Train until `epochs` are done, and go on after a loss of ranks. Every rank calls it, inside of ``ltx.init``.

    When the connection to a peer breaks, a peer falls silent, or the ranks have come out of step or apart, those that
    are left meet anew: whoever comes is alive. They make a world of their own, count ranks from 0 again, call
    `on_reset`, take the state of the last step that some rank has done whole, and go on from there with the samples
    that come next. Since a step takes the same samples on any number of ranks (:class:`ltx.DataPosition`), none is
    lost or comes twice in an epoch, and neither the number of steps nor the learning rate changes. A stopped process
    counts as lost; should it go on later, it is told that the others have gone on without it. Local ranks stay as they
    were, for they say which device is whose.

    They meet in the store of the first meeting. It is held by the launcher under torchrun and ``ltx run``, else by
    rank 0's process: without that one the others can't go on, and say so. ``ltx run`` and torchrun end all ranks
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
        meeting_timeout: how long those that have met wait for a rank that lives and doesn't come: for longer than a
            step takes. Those that are known to be gone aren't waited for.
        snapshots: a directory that all ranks see, for checkpoints (:mod:`ltx.checkpoint`), written every `every` steps
            and at the end, of which the latest `keep` stay. Random number generators go on only on as many ranks.
        every, keep: see `snapshots`.

    Returns:
        The state at the end, and the position.

    Raises:
        PeerLostError: too few ranks are left, the store's holder is gone, or the others have gone on without this rank.
        ReplicaDivergedError: ranks have different values, none of them most ranks', and there are no snapshots.
        StrategyError: the strategy keeps parameters, optimizer state or communication state for each rank alone or in
            shards, which a lost rank takes with it, and there are no `snapshots`. With these, a loss is raised, and a
            new start goes on from them.
        InputError, UnsupportedError: the arguments can't be gone on with after a loss; when it is called.

    What else a rank raises (a mistake in `data`, an interrupt) ends its training; the others go on without it.

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
    run = _Run(train, data, epochs, on_step, tuple(on_reset), min_ranks, meeting_timeout, snapshots, every, keep)
    run.check(state, position)
    return run.to_the_end(state, position)


@dataclass(frozen=True)
class _At:
    """A state, and the position in the data that belongs to it."""

    state: TrainState
    position: DataPosition


@dataclass
class _Way:
    """How far this process is, and where among its peers."""

    at: _At
    settings: dict[str, Any]
    place: Placement
    meetings: int
    futile: int = 0  # meetings since the last whole step

    @property
    def next_meeting(self) -> Meeting | None:
        store = store_of(self.place)
        return None if store is None else Meeting(store, self.meetings + 1, self.place)


@dataclass(frozen=True)
class _Run:
    """The arguments of one call of :func:`elastic`."""

    train: TrainStep
    data: Batch
    epochs: int
    on_step: Callable[[TrainState, Metrics, DataPosition], object] | None
    on_reset: tuple[Callable[[World], object], ...]
    min_ranks: int
    meeting_timeout: timedelta
    snapshots: str | os.PathLike[str] | None
    every: int
    keep: int

    @property
    def _axis(self) -> Any:
        return self.train.step.axis

    def check(self, state: TrainState, position: DataPosition) -> None:
        """Raise where a loss of ranks would find that training can't go on."""
        world = init.world()
        for name in ("epochs", "min_ranks", "every", "keep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"elastic: expected {name} to be an integer of at least 1, got {value!r}.")
        if not isinstance(self.meeting_timeout, timedelta) or self.meeting_timeout <= timedelta(0):
            raise InputError(
                f"elastic: expected meeting_timeout to be a positive datetime.timedelta, got {self.meeting_timeout!r}."
            )
        if self.min_ranks > world.size:
            raise InputError(f"elastic: min_ranks={self.min_ranks}, and there are {world.size} ranks.")
        if self.train.overlap != "backward":
            raise UnsupportedError(
                f"elastic: the train step has overlap={self.train.overlap!r}, which doesn't commit a step whole: a "
                'loss in the middle would leave a torn state. Make it with overlap="backward".'
            )
        axis = self._axis
        if axis is not None and not isinstance(axis, str):
            raise UnsupportedError(
                f"elastic: the step is on {axis!r}, which a new world doesn't have. Leave axis= out, or give its name."
            )
        mesh = init.settings().get("mesh", ())
        if len(mesh) > 1:
            raise UnsupportedError(
                f"elastic: the world has the axes {dict(mesh)}, and those that are left after a loss don't fill such a "
                "mesh. Use ltx.init() without mesh=."
            )
        if world.size > 1 and world.launcher == "user":
            raise UnsupportedError(
                "elastic: the process group was initialised before ltx, so ltx can't make another in its place. Leave "
                "that to ltx.init()."
            )
        position.check_sizes(self.min_ranks, world.size)
        if (own := _ones_own(state)) and self.snapshots is None and world.size > 1:
            raise StrategyError(
                f"elastic: with {state.kinds.strategy} the {' and '.join(own)} of a lost rank {'is' * (len(own) < 2)}"
                f"{'are' * (len(own) > 1)} lost with it, so the others can't go on. Give a directory for snapshots=, "
                "from which a new start of all ranks goes on."
            )

    def to_the_end(self, state: TrainState, position: DataPosition) -> tuple[TrainState, DataPosition]:
        """Train, and meet anew after each loss."""
        settings = init.settings()
        way = _Way(_At(state, position), settings, settings.get("placement", Placement("none")), worlds_so_far())
        try:
            self._restore(way)
            while True:
                try:
                    self._train(way)
                    return way.at.state, way.at.position
                except LOSSES as loss:
                    self._meet_anew(way, loss)
        except BaseException as error:  # the others shall not wait for this rank
            if (meeting := way.next_meeting) is not None:
                meeting.decline()
                init.abandon(error)
            raise

    def _train(self, way: _Way) -> None:
        size, rank = wire.size_and_rank(self._axis)
        while way.at.position.epoch < self.epochs:
            batch = self.data(way.at.position.indices(rank, size))
            state, metrics = self.train(way.at.state, *(batch if isinstance(batch, tuple) else (batch,)))
            way.at, way.futile = _At(state, way.at.position.after_step()), 0
            if self.on_step is not None:
                self.on_step(state, metrics, way.at.position)
            if state.step % self.every == 0:
                self._save(way.at)
        if way.at.state.step % self.every:
            self._save(way.at)
        # A rank that ended now would be lost to one that hasn't done the last step.
        collectives.barrier("the end of elastic", self._axis)

    def _meet_anew(self, way: _Way, loss: Exception) -> None:
        """Meet those that are left, make a world with them, and take over the state of the last whole step."""
        if own := _ones_own(way.at.state):
            loss.add_note(f"elastic: the {' and '.join(own)} of each rank is its own. Start all ranks again.")
            raise loss
        while True:
            place = self._meet(way, loss)
            try:
                if self._taken_over(way, self._in_new_world(way, place)):
                    return
            except (*LOSSES, WorldError) as another:  # while the new world was made
                loss = another
                continue
            raise ReplicaDivergedError(
                f"elastic: rank {place.rank}: ranks have done as many steps and have different values, none of them "
                "most ranks', and there is no snapshot to go on from. Give a directory for snapshots=."
            ) from loss

    def _meet(self, way: _Way, loss: Exception) -> Placement:
        """This rank's place among those that are left; raises if it can't go on."""
        meeting, gone = way.next_meeting, _gone(self._axis)
        way.futile += 1
        if meeting is None or way.futile > _PATIENCE:
            raise loss
        init.abandon(loss)
        _let_go_of_frames(loss)
        place = meeting.hold(gone, self.meeting_timeout.total_seconds())
        if place is None:
            raise PeerLostError(
                f"rank {way.place.rank}: the others have gone on without this rank, which they took for lost. Start it "
                "again with all of them, from the last snapshot."
            ) from loss
        if place.size < self.min_ranks:
            raise PeerLostError(
                f"rank {way.place.rank}: {place.size} of {way.place.size} ranks are left, fewer than "
                f"min_ranks={self.min_ranks}."
            ) from loss
        return place

    def _in_new_world(self, way: _Way, place: Placement) -> list[_Told]:
        """How far each rank of a new world is."""
        store = store_of(way.place)
        assert store is not None
        meet_in(store, place)
        way.place, way.meetings = place, way.meetings + 1
        world = init.reform(way.settings, way.meetings, place)
        for callback in self.on_reset:
            callback(world)
        mine = (way.at.state.step, fingerprint(way.at.state), way.at.position)
        return list(collectives.all_gather_object(mine, self._axis))

    def _taken_over(self, way: _Way, told: list[_Told]) -> bool:
        """Whether all ranks, which are as far as they `told`, have the state of the last whole step now."""
        last = max(step for step, _, _ in told)
        there = [rank for rank, (step, _, _) in enumerate(told) if step == last]
        most, count = Counter(told[rank][1] for rank in there).most_common(1)[0]
        if 2 * count <= len(there):  # nobody knows which is right
            return self._restore(way)
        if len({(step, digest) for step, digest, _ in told}) > 1:
            src = next(rank for rank in there if told[rank][1] == most)
            way.at = _At(self.train.broadcast(way.at.state, src), told[src][2])
        return True

    def _save(self, at: _At) -> None:
        if self.snapshots is not None:
            from ltx import checkpoint  # takes a while

            checkpoint.save(self.snapshots, at.state, data=asdict(at.position), keep=self.keep, axis=self._axis)

    def _restore(self, way: _Way) -> bool:
        """Go on from the last snapshot. Whether there is one."""
        if self.snapshots is None:
            return False
        from ltx import checkpoint

        # Rank 0's answer: another rank may look when it has been saved just now, by a peer that is further.
        if not collectives.broadcast_object(checkpoint.latest(self.snapshots) is not None, 0, self._axis):
            return False
        with warnings.catch_warnings():
            # To go on with other ranks than the snapshot's is what this is for.
            warnings.filterwarnings("ignore", "checkpoint.load: random number generators", RuntimeWarning)
            restored = checkpoint.load(self.snapshots, way.at.state, axis=self._axis)
        saved = DataPosition(**restored.data)
        _check_same_data(saved, way.at.position)
        way.at = _At(restored.state, saved)
        return True


def _ones_own(state: TrainState) -> list[str]:
    """The parts of `state` that a lost rank takes with it. Buffers aren't among them: any rank's will do."""
    kinds = state.kinds
    parts = {"params": state.params, "opt_state": state.opt_state, "sync_state": state.sync_state.leaves}
    return [name for name, part in parts.items() if getattr(kinds, name) != "replicated" and tree.flatten(part)[0]]


def _let_go_of_frames(loss: BaseException | None) -> None:
    """Of what failed: they hold what was under way, and with it connections of the world that ends."""
    while loss is not None:
        traceback.clear_frames(loss.__traceback__)
        loss = loss.__cause__ or loss.__context__


def _gone(axis: Any) -> Callable[[], list[int]]:
    """Asks which peers of the world that is up are known to be gone; of none that is, nothing is known."""
    if not init.settings():
        return list
    backing = wire.resolve(axis).backing
    return backing.line.gone if isinstance(backing, GroupBacking) else list


def _check_same_data(saved: DataPosition, given: DataPosition) -> None:
    if replace(saved, epoch=0, done=0) != replace(given, epoch=0, done=0):
        raise InputError(
            f"elastic: the snapshot is of a run over other data or in another order: {saved}, and now {given}. Give "
            "the position that the run began with, or another directory for snapshots."
        )
