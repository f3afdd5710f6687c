"""Parts that the eager and the pure training step share: loss scale, guard, next state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ltx import hooks
from ltx.errors import StepError
from ltx.optim import grad_norm
from ltx.optim.base import chosen
from ltx.strategies.update import StepInfo, Updated
from ltx.training.guard import any_not_finite, not_finite, not_finite_on_device
from ltx.training.placed_state import on_any_rank
from ltx.training.settings import TrainSettings
from ltx.training.train_state import Metrics, TrainState
from ltx.transforms.sync_state import SyncState, plain_values
from ltx.typing import Tree

if TYPE_CHECKING:
    from ltx.transforms.precision import DynamicLossScale


def scaling(train: TrainSettings) -> DynamicLossScale | None:
    """The step's dynamic loss scaling, if it has any."""
    return None if train.step.precision is None else train.step.precision.dynamic


def checks_finite(train: TrainSettings) -> bool:
    """Whether steps check that gradients are finite."""
    return scaling(train) is not None or train.guard != "off"


def must_sync_finite(train: TrainSettings, info: StepInfo) -> bool:
    """Whether ranks have to ask each other if gradients are finite, because they don't share them."""
    return checks_finite(train) and info.axis.size > 1 and not train.step.strategy.shares_gradients(info.step)


def runs_ahead(info: StepInfo) -> bool:
    """Whether the host runs ahead of this rank's device, so that it shouldn't read what that computes."""
    axis_comm = info.axis.comm
    return axis_comm is not None and axis_comm.stream_of(axis_comm.device) is not None


def loss_scale_of(train: TrainSettings, state: TrainState) -> torch.Tensor | float | None:
    """The factor of the loss; None for 1."""
    if scaling(train) is None:
        return None if train.step.precision is None else train.step.precision.fixed_scale
    if isinstance(state.loss_scale, tuple):
        raise StepError(
            "train_step: this state has no loss scale, so it was made by another train step. Make it with this "
            "one's init, or add it: dataclasses.replace(state, loss_scale=ltx.DynamicLossScale(...).start())."
        )
    scale: torch.Tensor = state.loss_scale.scale
    return scale


def all_finite(
    train: TrainSettings,
    grads: Sequence[torch.Tensor],
    info: StepInfo,
    sums: Sequence[torch.Tensor | float] | None = None,
) -> bool | torch.Tensor:
    """Whether all gradients of all ranks are finite, on all ranks alike; for steps that :func:`checks_finite`."""
    pure = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    ahead = not pure and runs_ahead(info)  # the host doesn't wait for what is found
    bad = any_not_finite(grads) if pure else not_finite_on_device(grads) if ahead else not_finite(grads, sums)
    if must_sync_finite(train, info):
        shared = train.step.strategy.exchange(
            hooks.AllReduce(), [bad.float().reshape(1)], ["whether gradients are finite"], info
        )
        bad = shared.wait()[0][0].reshape(()) > 0
    if train.step.placements is not None:
        bad = on_any_rank(bad, train.step.placements)
    return bad.logical_not() if pure or ahead else not bad


def should_raise(train: TrainSettings, state: TrainState) -> bool:
    """Whether gradients that aren't finite raise: with dynamic loss scaling, only once the scale isn't the cause."""
    return train.guard == "raise" and (
        scaling(train) is None or bool((plain_values(state.loss_scale.scale) <= 1).all())
    )


def kept_if_skipped(
    train: TrainSettings, finite: bool | torch.Tensor | None, state: TrainState, states: Tree, buffers: Tree
) -> tuple[Tree, Tree]:
    """The next communication state, before the strategy's part, and buffers; the old ones of a skipped step."""
    if states:  # Dynamo can't flatten an empty dict
        states = chosen(finite, states, state.sync_state.leaves)
    if train.guard == "skip" and buffers is not None:
        buffers = chosen(finite, buffers, state.buffers)
    return states, buffers


def next_state(
    train: TrainSettings,
    state: TrainState,
    updated: Updated,
    buffers: Tree,
    sync: SyncState,
    metrics: Metrics,
    finite: bool | torch.Tensor | None,
) -> tuple[TrainState, Metrics]:
    """The next state, and the metrics that can be read off it."""
    norm = grad_norm(updated.opt_state)  # in a tensor that the next step may write into
    metrics = replace(metrics, grad_norm=None if norm is None else norm.clone())
    loss_scale: Any = state.loss_scale
    if finite is not None and checks_finite(train):
        skipped = torch.logical_not(torch.as_tensor(finite, device=metrics.loss.device))
        metrics = replace(metrics, skipped=skipped)
        if (dynamic := scaling(train)) is not None:
            metrics = replace(metrics, loss_scale=loss_scale.scale)
            loss_scale = dynamic.after(loss_scale, finite)
    following = TrainState(
        updated.params,
        buffers,
        updated.opt_state,
        sync,
        state.step + 1,
        replace(train.step.strategy.layout, strategy=state.layout.strategy),
        loss_scale,
        updated.pending,
        state.frozen,
    )
    return following, metrics
