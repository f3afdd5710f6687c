"""The arguments of elastic: which can be gone on with after a loss, and what newcomers have to agree on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from ltx import tree
from ltx.comm.signature import Signature
from ltx.errors import InputError, StrategyError, UnsupportedError
from ltx.runtime import init
from ltx.runtime.placement import Placement
from ltx.runtime.world import World
from ltx.training.data import DataPosition
from ltx.training.train_state import Metrics, TrainState
from ltx.training.train_step import TrainStep

#: ``data(indices)`` gives a rank's batch.
Batch = Callable[[Any], Any]


@dataclass(frozen=True)
class Arguments:
    """Those of one call of :func:`ltx.elastic`."""

    train: TrainStep
    data: Batch
    epochs: int
    on_step: Callable[[TrainState, Metrics, DataPosition], object] | None
    on_reset: tuple[Callable[[World], object], ...]
    min_ranks: int
    max_ranks: int | None
    meeting_timeout: timedelta
    snapshots: str | os.PathLike[str] | None
    every: int
    keep: int

    @property
    def axis(self) -> Any:
        """The axis of the train step."""
        return self.train.step.axis

    def check(self, state: TrainState, position: DataPosition) -> None:
        """Raise where a loss of ranks would find that training can't go on."""
        world, joins = init.world(), _joins()
        for name in ("epochs", "min_ranks", "max_ranks", "every", "keep"):
            value = getattr(self, name)
            if value is None and name == "max_ranks":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"elastic: expected {name} to be an integer of at least 1, got {value!r}.")
        if not isinstance(self.meeting_timeout, timedelta) or self.meeting_timeout <= timedelta(0):
            raise InputError(
                f"elastic: expected meeting_timeout to be a positive datetime.timedelta, got {self.meeting_timeout!r}."
            )
        if not self.min_ranks <= world.size <= (self.max_ranks or world.size) and not joins:
            limits = f"min_ranks={self.min_ranks}" + f", max_ranks={self.max_ranks}" * (self.max_ranks is not None)
            raise InputError(f"elastic: {limits}, and there are {world.size} ranks.")
        if self.train.overlap != "backward":
            raise UnsupportedError(
                f"elastic: the train step has overlap={self.train.overlap!r}, which doesn't commit a step whole: a "
                'loss in the middle would leave an invalid state. Make it with overlap="backward".'
            )
        axis = self.axis
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
        if not joins:
            position.check_sizes(self.min_ranks, world.size)
        if (own := ones_own(state)) and self.snapshots is None and world.size > 1:
            raise StrategyError(
                f"elastic: with {state.layout.strategy} the {' and '.join(own)} of a lost rank {'is' * (len(own) < 2)}"
                f"{'are' * (len(own) > 1)} lost with it, so the others can't go on. Give a directory for snapshots=, "
                "from which a new start of all ranks goes on."
            )

    def entrance(self, state: TrainState, position: DataPosition) -> Signature:
        """What newcomers have to agree on with those that are there, besides the program."""
        settings = init.settings()
        parts = ("params", "frozen", "buffers", "opt_state")
        leaves = zip(tree.leaf_paths(state), tree.flatten(state)[0], strict=True)
        found = {path: leaf for path, leaf in leaves if path.partition(".")[0] in parts}
        said = {
            "strategy": state.layout.strategy,
            "data": replace(position, epoch=0, done=0),
            "epochs": self.epochs,
            "snapshots": self.every if self.snapshots is not None else None,
            "axis": settings["mesh"][0][0],
            "backend": settings["backend"],
        }
        static = ", ".join(f"{name}={value}" for name, value in said.items())
        return Signature.of("elastic", list(found), list(found.values()), static)


def ones_own(state: TrainState) -> list[str]:
    """The parts of `state` that a lost rank takes with it. Buffers aren't among them: any rank's will do."""
    layout = state.layout
    parts = {"params": state.trained, "opt_state": state.opt_state, "sync_state": state.sync_state.leaves}
    return [name for name, part in parts.items() if getattr(layout, name) != "replicated" and tree.flatten(part)[0]]


def _joins() -> bool:
    """Whether this process is to be taken into a run of others."""
    return init.settings().get("placement", Placement("none")).joins is not None


def check_same_data(saved: DataPosition, given: DataPosition) -> None:
    """Raise unless a snapshot's position is one in the data that is given."""
    if replace(saved, epoch=0, done=0) != replace(given, epoch=0, done=0):
        raise InputError(
            f"elastic: the snapshot is of a run over other data or in another order: {saved}, and now {given}. Give "
            "the position that the run began with, or another directory for snapshots."
        )
