"""Metrics: what a step reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ltx.core.base import tree


@dataclass(frozen=True, eq=False)
class Metrics:
    """What a step reports.

    Attributes:
        loss: 0-dim tensor: the mean over ranks (or samples, for a Weighted step), the same on every rank; over those
            that share gradients in this step, as of a node, or this rank's own, unless all do or outputs are "mean".
        aux: what the step returned besides; None without `has_aux`. It is this rank's own, unless the step takes the
            mean itself, ``return loss, {"accuracy": ltx.pmean(accuracy)}``, or ``data_parallel(outputs="mean")`` does.
        grad_norm: 0-dim tensor: the norm of the reduced gradients before clipping, of this rank's own where ranks share
            none; None without :func:`ltx.optim.clip_by_global_norm` or :func:`ltx.optim.measure_global_norm` in the
            optimizer, or in some groups of a partition.
        loss_scale: 0-dim tensor: what this step's loss was multiplied by; None without dynamic loss scaling.
        skipped: 0-dim bool tensor: whether this step left parameters and optimizer state as they were, because
            gradients weren't finite; None without dynamic loss scaling or a guard. (`grad_norm` is then an earlier
            step's.)
    """

    loss: torch.Tensor
    aux: Any = None
    grad_norm: torch.Tensor | None = None
    loss_scale: torch.Tensor | None = None
    skipped: torch.Tensor | None = None


tree.register_node(
    Metrics,
    lambda m: ((m.loss, m.aux, m.grad_norm, m.loss_scale, m.skipped), None),
    lambda children, _: Metrics(*children),
    names=("loss", "aux", "grad_norm", "loss_scale", "skipped"),
)
