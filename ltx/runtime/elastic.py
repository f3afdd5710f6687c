"""elastic: training that goes on after a loss of ranks, with those that are left, newcomers, or the last snapshot."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from ltx.core.base.arguments import seconds, whole
from ltx.core.training.metrics import Metrics
from ltx.core.training.train_state import TrainState
from ltx.core.training.train_step import TrainStep
from ltx.core.world.placement import Placement
from ltx.core.world.world import World, settings_of_world
from ltx.core.world.world import world as current_world
from ltx.data import DataPosition
from ltx.errors import InputError, StrategyError, UnsupportedError
from ltx.runtime.elastic_run import Batch, ElasticRun, ones_own


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
            step takes. Those that are known to be gone aren't waited for. A newcomer waits so long for an answer.
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
    meeting_timeout_s = seconds("elastic: meeting_timeout", meeting_timeout)
    run = ElasticRun(
        train, data, epochs, on_step, tuple(on_reset), min_ranks, max_ranks, meeting_timeout_s, snapshots, every, keep
    )
    _check(run, state, position)
    return replace(run, train=replace(train, confirms=True)).to_the_end(state, position)


def _check(run: ElasticRun, state: TrainState, position: DataPosition) -> None:
    """Raise where a loss of ranks would find that training can't go on."""
    world, joins = current_world(), settings_of_world().get("placement", Placement("none")).joins
    for name in ("epochs", "min_ranks", "max_ranks", "every", "keep"):
        if name != "max_ranks" or run.max_ranks is not None:
            whole(f"elastic: {name}", getattr(run, name), 1)
    if not run.min_ranks <= world.size <= (run.max_ranks or world.size) and not joins:
        limits = f"min_ranks={run.min_ranks}" + f", max_ranks={run.max_ranks}" * (run.max_ranks is not None)
        raise InputError(f"elastic: {limits}, and there are {world.size} ranks.")
    if run.train.overlap == "update":
        raise UnsupportedError(
            "elastic: the train step has overlap='update', which doesn't commit a step whole: a "
            'loss in the middle would leave an invalid state. Make it with overlap="backward".'
        )
    axis = run.axis
    if axis is not None and not isinstance(axis, str):
        raise UnsupportedError(
            f"elastic: the step is on {axis!r}, which a new world doesn't have. Leave axis= out, or give its name."
        )
    mesh = settings_of_world().get("mesh", ())
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
    if not joins:
        position.check_sizes(run.min_ranks, world.size)
    if (own := ones_own(state)) and run.snapshots is None and world.size > 1:
        raise StrategyError(
            f"elastic: with {state.layout.strategy} the {' and '.join(own)} of a lost rank {'is' * (len(own) < 2)}"
            f"{'are' * (len(own) > 1)} lost with it, so the others can't go on. Give a directory for snapshots=, "
            "from which a new start of all ranks goes on."
        )
