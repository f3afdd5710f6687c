"""How a training step treats gradients that aren't finite: the guard, the loss scale, and the next state.

Every hook delivers NaN and infinity, so ranks that share gradients see them without asking. Only for an error do they
find out which rank caused it: each computes its own again, and they compare descriptions by the store.
"""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import private, tree
from ltx.core.base.errors import NotFiniteError, StepError
from ltx.core.base.private import Tensors
from ltx.core.gradients.buffers import prefers_few_calls
from ltx.core.gradients.comm_hook import EXACT
from ltx.core.optim import TorchState, grad_norm
from ltx.core.training.outputs import Batch, outputs_of
from ltx.core.training.settings import TrainSettings
from ltx.core.training.train_state import LossScale, Metrics, TrainState, drawn_again
from ltx.core.transforms.grad import gradients
from ltx.core.transforms.run import CallOptions, Weighted
from ltx.core.transforms.strategy import StepInfo, exchange, shares_gradients
from ltx.core.transforms.sync_state import plain_values
from ltx.typing import Tree


def probes(grads: Tensors) -> list[torch.Tensor]:
    """Each one's sum, in one pass over memory. It isn't finite if an element isn't, and rarely otherwise."""
    return [g.sum(dtype=torch.float32) if g.dtype.itemsize < 4 else g.sum() for g in grads]


def not_finite(grads: Tensors, sums: Sequence[torch.Tensor | float] | None = None) -> torch.Tensor:
    """Whether any element isn't finite, exactly: a 0-dim bool tensor. `sums`: :func:`probes` of `grads`, if known."""
    sums = probes(grads) if sums is None else sums
    if all(map(cmath.isfinite, sums)):
        return torch.tensor(False, device=grads[0].device if grads else None)
    return any_not_finite(grads)  # the sum of finite numbers may overflow, so look at the elements


def any_not_finite(grads: Tensors) -> torch.Tensor:
    """Whether any element isn't finite: a 0-dim bool tensor."""
    grads = [g for g in grads if g.numel()]
    if not grads:
        return torch.tensor(False, device="cpu")
    if prefers_few_calls(grads[0]):
        return torch.stack(torch._foreach_norm(grads, float("inf"))).isfinite().all().logical_not()
    return torch.stack([g.isfinite().all().logical_not().to(grads[0].device) for g in grads]).any()


def not_finite_error(
    train: TrainSettings, state: TrainState, batch: Batch, info: StepInfo, reduced: Tensors, states: dict[str, Any]
) -> NotFiniteError:
    """The error of a step, alike on all ranks, which all call this. `states`: random numbers' before the step."""
    paths = tree.leaf_paths(state.trained)
    with drawn_again(states):
        own = _own_gradients(train, state, batch, info)
    count = len(own)
    told = info.axis.ranks.by_rank(
        comm.Signature("whose gradients aren't finite", ()),
        lambda xs, _: [_described(paths, xs[:count]), _described(paths, xs[count:])],
        [*own, *reduced],
    )
    by_rank, together = [texts for texts, _ in told], sorted({text for _, texts in told for text in texts})
    found = [f"rank {rank}: {_listed(texts)}" for rank, texts in enumerate(by_rank) if texts]
    if not found and not together and train.bad_anywhere is not None:
        found = ["they are in parts of the parameters that ranks beside this axis hold"]
    elif not found:
        found = [f"each rank's own, computed again, are finite, but the reduced ones aren't: {_listed(together)}"]
    limit = train.max_skipped if over_limit(train, state) else None
    before = "" if limit is None else f" Nor were those of {limit} steps before, which were skipped."
    fix = 'guard="skip" leaves such steps out' if limit is None else f"max_skipped={limit} allows no more in a row"
    return NotFiniteError(
        f"train_step: gradients of step {info.step} aren't finite. {'; '.join(found)}.{before} The state is as it was "
        f"before the step, and may be used again. {fix}; torch.autograd.detect_anomaly() finds the operation."
    )


def _own_gradients(train: TrainSettings, state: TrainState, batch: Batch, info: StepInfo) -> list[Any]:
    """This rank's gradients, before the reduction; zeros for parameters that this rank doesn't use."""
    local, own, factor = replace(train.step, blocked=True), list[torch.Tensor](), loss_scale_of(train, state)
    leaves, spec = tree.flatten(state.trained)

    def loss(leaves: Tensors) -> torch.Tensor:
        buffers = () if state.buffers is None else (state.buffers,)
        arguments = tree.unflatten(spec, leaves), *buffers, *batch.args
        run = local.run(arguments, batch.named, CallOptions(step=info.step, frozen=state.frozen))
        own.extend(run.own)
        found, *_ = outputs_of(run, state.buffers, train.has_aux)
        total = found.total if isinstance(found, Weighted) else found
        return total if factor is None else total * factor

    if private.in_transform():
        return [*torch.func.grad(loss)(leaves)]
    leaves = [x.detach().requires_grad_() for x in leaves]
    with torch.enable_grad():  # as the step does, whatever torch.func has set
        total = loss(leaves)
    return gradients(total, leaves, own=own)


def _described(paths: Sequence[str], grads: Tensors) -> list[str]:
    """A text for each gradient that isn't finite, with the number of its bad elements."""
    found = []
    for path, grad in zip(paths, grads, strict=True):
        values = plain_values(grad)
        if bad := int(values.isfinite().logical_not().sum()):
            what = "NaN" if bool(values.isnan().any()) else "infinite"
            found.append(f"leaf {path!r} ({what}, {bad} of {values.numel()} elements)")
    return found


def _listed(texts: Sequence[str], most: int = 4) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def must_sync_finite(train: TrainSettings, info: StepInfo) -> bool:
    """Whether ranks have to ask each other if gradients are finite, because they don't share them."""
    alone = not train.checks_finite or info.axis.size == 1
    return not (alone or shares_gradients(train.step.strategy, info.step, info.axis))


def loss_scale_of(train: TrainSettings, state: TrainState) -> torch.Tensor | float | None:
    """The factor of the loss; None for 1."""
    if train.dynamic is None:
        return None if train.step.precision is None else train.step.precision.loss_scale
    scale = getattr(state.loss_scale, "scale", None)
    if not isinstance(scale, torch.Tensor):
        raise StepError(
            "train_step: this state has no loss scale, so it was made by another train step. Make it with this "
            "one's init, or add it: dataclasses.replace(state, loss_scale=ltx.DynamicLossScale(...).start())."
        )
    return scale


def all_finite(train: TrainSettings, grads: Tensors, info: StepInfo, waits: bool, sums: Any = None) -> Any:
    """Whether all gradients of all ranks are finite, on all ranks alike: a tensor, or a bool if the host `waits`."""
    bad = not_finite(grads, sums) if waits else any_not_finite(grads)
    if must_sync_finite(train, info):
        shared = exchange(train.step.strategy, EXACT, [bad.float().reshape(1)], ["whether gradients are finite"], info)
        bad = shared.wait()[0][0].reshape(()) > 0
    if train.bad_anywhere is not None:
        bad = train.bad_anywhere(bad)
    return not bad if waits else bad.logical_not()


def should_raise(train: TrainSettings, state: TrainState) -> bool:
    """Whether gradients that aren't finite raise: by the guard (if a dynamic scale is down), or the limit."""
    by_guard = train.guard == "raise"
    if by_guard and (dynamic := train.dynamic) is not None:
        by_guard = bool((plain_values(state.loss_scale.scale) <= max(1, dynamic.least)).all())
    return by_guard or over_limit(train, state)


def over_limit(train: TrainSettings, state: TrainState) -> bool:
    """Whether as many steps in a row have been skipped as the limit allows."""
    if train.max_skipped is None or isinstance(state.loss_scale, tuple):
        return False
    return bool((plain_values(state.loss_scale.good_steps) <= -train.max_skipped).any())


def measured(train: TrainSettings, state: TrainState, opt_state: Tree, metrics: Metrics, finite: Any) -> Any:
    """(`metrics` with what the guard and the optimizer say, the next loss scale) of a step that makes `opt_state`."""
    if type(opt_state) is not TorchState and (norm := grad_norm(opt_state)) is not None:
        # A copy, as the next step may write into this tensor; a step that is skipped leaves it as it was.
        good = None if finite is None else torch.as_tensor(finite, device=norm.device)
        metrics = replace(metrics, grad_norm=norm.clone() if good is None else torch.where(good, norm, torch.nan))
    loss_scale: Any = state.held_loss_scale
    if finite is not None and train.checks_finite:
        metrics = replace(metrics, skipped=torch.as_tensor(finite, device=metrics.loss.device).logical_not())
        if (dynamic := train.dynamic) is not None:
            metrics = replace(metrics, loss_scale=loss_scale.scale)
            loss_scale = dynamic.after(loss_scale, finite)
        elif train.max_skipped is not None:
            # the state comes from a step without a limit
            before = LossScale() if isinstance(loss_scale, tuple) else loss_scale
            loss_scale = LossScale(good_steps=before.run_after(finite))
    return metrics, loss_scale
