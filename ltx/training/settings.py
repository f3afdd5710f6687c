"""What a train step is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ltx.optim import Optimizer
from ltx.training.trainable import Trainable, check_trainable
from ltx.training.validation import check_every, check_overlap, check_pieces
from ltx.transforms.data_parallel import DataParallel


@dataclass(frozen=True)
class TrainSettings:
    """The arguments of :func:`ltx.train_step`, each checked, and all of them together."""

    step: DataParallel
    optimizer: Optimizer
    donate: bool = True
    guard: Literal["off", "skip", "raise"] = "off"
    overlap: Literal["backward", "update", "step"] = "backward"
    has_aux: bool = False
    check_every: int | None = None
    trainable: Trainable = None

    def __post_init__(self) -> None:
        check_trainable(self.trainable)
        if isinstance(self.trainable, list):
            object.__setattr__(self, "trainable", tuple(self.trainable))
        check_pieces(self.step, self.optimizer, self.guard)
        check_every(self.check_every, self.step.strategy)
        check_overlap(self.overlap, self.step, self.optimizer, self.guard)
