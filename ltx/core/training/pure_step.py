"""A training step without side effects, for transforms of torch.func, simulated ranks and compiled graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from ltx.core import collectives, comm
from ltx.core.base import traced, tree
from ltx.core.base.errors import UnsupportedError
from ltx.core.base.placements import refuse_in_graph as refuse_dtensors
from ltx.core.collectives.calls import prepare_trace, traced_processes, traced_size
from ltx.core.gradients.planning import any_derivative
from ltx.core.optim.base import Update
from ltx.core.ranks.axis import Axis
from ltx.core.training.guard import (
    all_finite,
    checks_finite,
    kept_if_skipped,
    loss_scale_of,
    next_state,
    not_finite_error,
    should_raise,
)
from ltx.core.training.metrics import Metrics
from ltx.core.training.outputs import Batch, GivenGradients, arguments_of, outputs_of
from ltx.core.training.random_states import torch_states
from ltx.core.training.replicas import check_replicas
from ltx.core.training.settings import TrainSettings, check_layout, refuse_in_graph
from ltx.core.training.train_state import TrainState
from ltx.core.transforms.run import CallOptions, Weighted
from ltx.core.transforms.strategy_update import StepInfo, check_updated
from ltx.core.transforms.sync_state import Synced, SyncState, plain_values


def _check_derivative(train: TrainSettings, state: TrainState, batch: Batch) -> None:
    """Raise if somebody differentiates the next state, and not all of its derivative would pass."""
    parts = state.trained, state.frozen, state.buffers, batch.args, batch.named
    if not any_derivative([x for x in tree.flatten(parts)[0] if isinstance(x, torch.Tensor)]):
        return
    strategy = train.step.strategy
    if any(isinstance(fn, GivenGradients) for fn in (train.step.fn, getattr(train.step.fn, "fn", None))):
        what = (
            'a step with returns="grads" gives gradients whose own derivative is unknown. Let the step return its loss'
        )
    elif state.sync_state.leaves and strategy.communicates_besides:
        what = f"what {type(strategy).__name__} keeps from step to step has no derivative. Use ltx.DDPStrategy()"
    else:
        return
    raise UnsupportedError(
        f"train_step: the state or the batch of this step is differentiated, and {what}; or, if no derivative is "
        "wanted, detach them, or call the step under torch.no_grad()."
    )


def _leaf(x: torch.Tensor) -> torch.Tensor:
    """What gradients are taken with respect to: `x`, with its tangent."""
    tangent = forward_ad.unpack_dual(x).tangent if forward_ad._current_level >= 0 else None
    leaf = x.detach().requires_grad_()
    return leaf if tangent is None else forward_ad.make_dual(leaf, tangent)


def _mean_in_graph(key: str, loss: torch.Tensor, step: int, clock: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss, and the clock one step later; the number of the step goes with the loss, and is compared."""
    number = comm.number_in_graph(step, clock).to(loss.device)
    sums = collectives.psum(torch.stack([loss.double(), number, number * number]), key)
    return (sums[0] / traced_size(key)).to(loss.dtype), comm.count_in_graph(key, step, clock, sums[1], sums[2])


def step_purely(train: TrainSettings, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """The same step, pure: under transforms of torch.func (simulated ranks among them) and in compiled graphs."""
    if traced.recording():
        refuse_dtensors(tuple([type(x).__name__ for x in tree.flatten(state.trained)[0]]))
    else:
        state.check_owned()
        if train.check_every is not None and state.step % train.check_every == 0:
            check_replicas(state, train.step.axis)
    strategy, sync = train.step.strategy, state.sync_state
    if traced.recording():
        refuse_in_graph(strategy, checks_finite(train), train.guard)
        axis = Axis("data", 1)
    else:
        axis = comm.resolve(train.step.axis)
        strategy.check_axis(axis)
    info = StepInfo(sync.checked_step(), axis)
    check_layout(strategy, info.step)
    if not traced.recording():
        _check_derivative(train, state, batch)
    drawn = torch_states() if train.guard == "raise" else {}
    stateful = bool(sync.leaves) or strategy.stateful
    loss_scale = loss_scale_of(train, state)
    others: list[Any] = []

    def mean(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        arguments = arguments_of(tree.unflatten(spec, leaves), state.buffers, batch)
        run = train.step.run(arguments, batch.named, CallOptions(step=info.step, frozen=state.frozen))
        loss, buffers, aux = outputs_of(run, state.buffers, train.has_aux, detached=False)
        if isinstance(loss, Weighted):
            strategy.check_weighted(info.step)
        value = replace(run, output=loss).value()
        # torch.func takes tensors alone as aux.
        rest, structure = tree.flatten((buffers, aux))
        others[:] = [
            structure,
            isinstance(loss, Weighted),
            [None if isinstance(x, torch.Tensor) else x for x in rest],
        ]
        tensors = [value, *(x for x in rest if isinstance(x, torch.Tensor))]
        return value if loss_scale is None else value * loss_scale, tensors

    pending = strategy.begin(state.trained, sync.leaves, info, None)
    # torch.func takes None, which stands in the place of frozen parameters, for a leaf.
    flat, spec = tree.flatten(Synced(state.trained, sync) if stateful else state.trained)
    if traced.recording() or torch._C._are_functorch_transforms_active():
        flat_grads, (_, (loss, *tensors)) = torch.func.grad_and_value(mean, has_aux=True)(flat)
    else:  # below torch.func a step may differentiate its batch by plain autograd
        with torch.enable_grad():
            inputs = [x.view_as(x) if x.requires_grad else _leaf(x) for x in flat]
            total, (loss, *tensors) = mean(inputs)
            flat_grads = torch.autograd.grad(
                total, inputs, create_graph=True, allow_unused=True, materialize_grads=True
            )
    grads = tree.unflatten(spec, flat_grads)
    structure, weighted, rest = others
    aux_tensors = iter(tensors)
    buffers, aux = tree.unflatten(structure, [next(aux_tensors) if x is None else x for x in rest])
    hook, clock = None if traced.recording() else strategy.hook(info.step), sync.clock + 1
    if torch.compiler.is_compiling() and traced_processes(key := prepare_trace(train.step.axis)):
        mean_loss, clock = _mean_in_graph(key, loss, info.step, sync.clock)
        loss = loss if weighted else mean_loss
    elif not weighted and (traced.recording() or hook is not None):
        loss = collectives.pmean(loss, train.step.axis if hook is None else hook.within(axis) or train.step.axis)
    states = grads.sync_state.leaves if stateful else sync.leaves
    grads = grads.params if stateful else grads
    if loss_scale is not None:
        inverse = 1 / loss_scale
        grads = tree.map(lambda g: (g * inverse).to(g.dtype), grads)
    finite = all_finite(train, tree.flatten(tree.detached(grads))[0], info) if checks_finite(train) else None
    if isinstance(finite, torch.Tensor) and should_raise(train, state) and not bool(plain_values(finite).all()):
        raise not_finite_error(train, state, batch, info, tree.flatten(grads)[0], drawn, loss_scale)
    states, buffers = kept_if_skipped(train, finite, state, states, buffers)
    update = Update(train.optimizer, state.trained, grads, state.opt_state, finite=finite)
    updated = check_updated(strategy, strategy.update(update, states, info, pending), update, states)
    if updated.pending is not None:
        raise UnsupportedError(
            f"{strategy!r} leaves work under way between two steps, which transforms can't carry. It has to complete "
            "within a step there."
        )
    if traced.recording():  # a number in the structure that changed would compile each step anew
        next_sync = SyncState(updated.states, sync.uses, clock, sync.step, sync.choice)
    else:
        next_sync = sync.advanced(updated.states)
    return next_state(train, state, updated, buffers, next_sync, Metrics(loss, aux), finite)
