"""The executor of a training step without side effects: for transforms, also simulated ranks, and compiled graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad

from ltx.core import collectives, comm
from ltx.core.base import private, traced, tree
from ltx.core.base.errors import UnsupportedError
from ltx.core.collectives.calls import prepare_trace, traced_processes, traced_size
from ltx.core.gradients.comm_hook import shared_part
from ltx.core.gradients.pending import inner_pass
from ltx.core.gradients.planning import any_derivative
from ltx.core.ranks.axis import Axis
from ltx.core.training.backward import BackwardResult
from ltx.core.training.guard import all_finite, loss_scale_of
from ltx.core.training.outputs import Batch, GivenGradients
from ltx.core.training.replicas import check_replicas
from ltx.core.training.settings import TrainSettings, check_layout, refuse_in_graph
from ltx.core.training.step import Step
from ltx.core.training.train_state import TrainState
from ltx.core.transforms.calls_again import Calls, own_grad_and_value
from ltx.core.transforms.run import CallOptions, Weighted
from ltx.core.transforms.strategy import StepInfo, Updated, stateful
from ltx.core.transforms.sync_state import Synced
from ltx.typing import Tree


class PureStep(Step):
    """A step whose results are new tensors, which derivatives pass through."""

    detached = False

    @classmethod
    def of(cls, train: TrainSettings, state: TrainState, batch: Batch) -> PureStep:
        """The step of `train` from `state`, after the checks that it wants, with the strategy's `begin`."""
        strategy, sync = train.step.strategy, state.sync_state
        if traced.recording():
            refuse_in_graph(strategy, train.checks_finite, train.may_raise)
            axis = Axis("data", 1)
        else:
            if train.check_every is not None and state.step % train.check_every == 0:
                check_replicas(state, train.step.axis)
            axis = comm.resolve(train.step.axis)
            strategy.check(train.optimizer, axis)
            _check_derivative(train, state, batch)
        info = StepInfo(sync.checked_step(), axis)
        check_layout(strategy, info.step)
        params = state.trained
        pending = strategy.begin(params, sync.leaves, info, None)
        return cls(train, state, batch, info, pending, params, *tree.flatten(params))

    def differentiate(self) -> tuple[BackwardResult, torch.Tensor, Tree, Any]:
        strategy, sync = self.train.step.strategy, self.state.sync_state
        with_state = len(sync.leaves) > 0 or stateful(strategy)
        # torch.func treats None as a leaf, and None stands in the places of frozen parameters.
        flat, spec = tree.flatten(Synced(self.params, sync)) if with_state else (self.leaves, self.spec)
        loss_scale = loss_scale_of(self.train, self.state)
        others: list[Any] = []

        def mean(leaves: list[torch.Tensor], calls: AbstractContextManager[None] | None = None) -> tuple[Any, Any]:
            flat = None if with_state else (leaves, spec)
            options = CallOptions(step=self.info.step, frozen=self.state.frozen, flat=flat)
            run, (loss, buffers, aux) = self.called(tree.unflatten(spec, leaves), options, calls)
            value = run._replace(output=loss).value()
            # torch.func accepts only tensors as aux.
            rest, structure = tree.flatten((buffers, aux))
            others[:] = [structure, loss, [None if isinstance(x, torch.Tensor) else x for x in rest], run.own]
            tensors = [value, *(x for x in rest if isinstance(x, torch.Tensor))]
            return value if loss_scale is None else value * loss_scale, tensors

        if traced.recording() or private.in_transform():
            flat_grads, (_, (loss, *tensors)) = own_grad_and_value(mean, has_aux=True)(flat)
        else:  # under plain autograd, a user of the step may differentiate with respect to its batch
            with torch.enable_grad():
                inputs = [x.view_as(x) if x.requires_grad else _leaf(x) for x in flat]
                calls = Calls()
                total, (loss, *tensors) = mean(inputs, calls.recorded())
                with calls.in_pass():
                    flat_grads = torch.autograd.grad(
                        total, [*inputs, *others[-1]], create_graph=True, allow_unused=True, materialize_grads=True
                    )[: len(inputs)]
                if any(x.is_leaf and x.grad is not None for x in inputs):
                    raise inner_pass("train_step")
        grads, states = flat_grads[: len(self.leaves)], sync.leaves
        if with_state:
            states = tree.unflatten(spec, flat_grads).sync_state.leaves
        if loss_scale is not None:
            inverse = 1 / loss_scale
            grads = [(g * inverse).to(g.dtype) for g in grads]
        structure, output, rest, _ = others
        its_tensors = iter(tensors)
        buffers, aux = tree.unflatten(structure, [next(its_tensors) if x is None else x for x in rest])
        return BackwardResult([*grads], states), self._mean(loss, isinstance(output, Weighted)), buffers, aux

    def _mean(self, loss: torch.Tensor, weighted: bool) -> torch.Tensor:
        """The mean loss of all ranks. In a compiled graph of several ranks its sum has the next clock beside it."""
        axis, clock = self.train.step.axis, self.state.sync_state.clock
        hook = None if traced.recording() else self.train.step.strategy.hook(self.info.step)
        self.clock = clock + 1 if traced.recording() else None
        if torch.compiler.is_compiling() and traced_processes(key := prepare_trace(axis)):
            step, dtype = self.info.step, loss.dtype  # ranks compare the number of the step
            number = comm.number_in_graph(step, clock).to(loss.device)
            sums = collectives.psum(torch.cat([loss.double().reshape(1), number, number * number]), key)
            self.clock = comm.count_in_graph(key, step, clock, sums[1], sums[2])
            return loss if weighted else (sums[0] / traced_size(key)).to(dtype)
        if not weighted and (traced.recording() or hook is not None):
            loss = collectives.pmean(loss, axis if hook is None else shared_part(hook, self.info.axis) or axis)
        return loss

    def finite(self, done: BackwardResult) -> Any:
        if not self.train.checks_finite:
            return None
        grads = [x.detach() for x in done.grads or ()]
        waits = not (traced.recording() or private.in_transform() or any(x.device.type != "cpu" for x in grads[:1]))
        return all_finite(self.train, grads, self.info, waits)

    def commit(self, updated: Updated, following: TrainState) -> None:
        if updated.pending is not None:
            raise UnsupportedError(
                f"{self.train.step.strategy!r} leaves work under way between two steps, which transforms can't carry."
            )
        if not traced.recording() and self.state.module is not None and not private.in_transform():
            following.__dict__["module"] = self.state.module
            self.state.module.show(following)


def _check_derivative(train: TrainSettings, state: TrainState, batch: Batch) -> None:
    """Raise if the step is differentiated and the derivative would be incomplete."""
    parts = state.trained, state.frozen, state.buffers, batch.args, batch.named
    if not any_derivative([x for x in tree.flatten(parts)[0] if isinstance(x, torch.Tensor)]):
        return
    strategy = train.step.strategy
    if any(isinstance(fn, GivenGradients) for fn in (train.step.fn, getattr(train.step.fn, "fn", None))):
        what = 'a step with returns="grads" gives gradients whose own derivative is unknown. Let it return its loss'
    elif state.sync_state.leaves and strategy.communicates_besides:
        what = f"what {type(strategy).__name__} keeps from step to step has no derivative. Use ltx.DDPStrategy()"
    else:
        return
    raise UnsupportedError(
        f"train_step: the state or the batch of this step is differentiated, and {what}; or, if no derivative is "
        "wanted, detach them, or call the step under torch.no_grad()."
    )


def _leaf(x: torch.Tensor) -> torch.Tensor:
    """A new leaf with the value and tangent of `x`, to take gradients with respect to it."""
    tangent = forward_ad.unpack_dual(x).tangent if private.has_tangents() else None
    leaf = x.detach().requires_grad_()
    return leaf if tangent is None else forward_ad.make_dual(leaf, tangent)
