"""One training step, eager (:class:`Step`), or without side effects (:func:`step_purely`)."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch.autograd import forward_ad

from ltx.core import collectives, comm
from ltx.core.base import private, traced, tree
from ltx.core.base.errors import LtxError, UnsupportedError, WeightError
from ltx.core.base.placements import refuse_in_graph as refuse_meshes
from ltx.core.collectives.calls import prepare_trace, traced_processes, traced_size
from ltx.core.gradients.comm_hook import CommHook
from ltx.core.gradients.planning import any_derivative
from ltx.core.gradients.schedule import ProcessSchedule
from ltx.core.optim.base import Update, with_loss
from ltx.core.optim.from_torch import TorchOptimizer
from ltx.core.ranks.axis import Axis
from ltx.core.training.backward import (
    Backward,
    BackwardResult,
    CollectGradients,
    Completion,
    Forward,
    UpdateBuckets,
    UpdateThenSend,
    mean_at_once,
    scale_of,
    unreached,
)
from ltx.core.training.guard import (
    all_finite,
    checks_finite,
    host_asks,
    kept_if_skipped,
    loss_scale_of,
    may_raise,
    next_state,
    not_finite_error,
    probes,
    runs_ahead,
    should_raise,
)
from ltx.core.training.outputs import Batch, GivenGradients, arguments_of, outputs_of, unshared
from ltx.core.training.replicas import check_replicas
from ltx.core.training.settings import TrainSettings, check_layout, check_weighted, refuse_in_graph
from ltx.core.training.train_state import Metrics, TrainState, hand_over, torch_states
from ltx.core.transforms.marking import marks_on_wire
from ltx.core.transforms.run import CallOptions, Weighted
from ltx.core.transforms.strategy_update import PostUpdateHook, StepInfo, Updated, check_next, check_updated
from ltx.core.transforms.sync_state import Synced, SyncState, plain_values


@contextmanager
def uninterrupted(wanted: bool) -> Iterator[None]:
    """Delay signals to the end of the block, if `wanted`: their handlers may raise, as those of Ctrl-C and alarms.

    It has an effect only in the main thread, which handles signals.
    """
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: dict[int, FrameType | None] = {}
    found = [*map(_signals.getsignal, _SIGNALS)]
    handlers = [*compress(zip(_SIGNALS, found, strict=True), map(callable, found))]  # no Python code for each signal
    raised: BaseException | None = None
    try:
        for number, _ in handlers:
            _signals.signal(number, came.__setitem__)
        yield
    finally:
        for number, handler in handlers:
            try:
                _signals.signal(number, handler)
                if number in came:
                    handler(number, came[number])
            except BaseException as error:  # restore the other handlers too
                raised = error
        if raised is not None:
            raise raised


# Python's wrappers look for each handler among the members of an enumeration, which would take most of the time here.
_signals: Any = importlib.import_module("_signal")
_SIGNALS = sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


@dataclass(eq=False)
class Step:
    """One call of a train step, after the strategy's `begin`: forward, backward, wait, apply, commit."""

    train: TrainSettings
    state: TrainState
    flat: tuple[list[torch.Tensor], Any]  # the leaves of the state's trained parameters, and their structure
    batch: Batch
    seen: tuple[str, ...]  # the parts of `state` whose tensors the user may hold references to
    info: StepInfo
    hook: CommHook | None  # reduces gradients; None if they stay local
    pending: Any  # the result of the strategy's `begin`
    late: bool  # ranks communicate after the optimizer
    post_update_hook: PostUpdateHook | None  # communicates each bucket after the optimizer, if that is possible
    commit: Callable[[], None]  # called when the step commits

    def __post_init__(self) -> None:
        self._checks = checks_finite(self.train)
        self._in_place = self.train.donate and (self.post_update_hook is not None or not self.late)
        self._params, self._spec = self.flat

    def run(self) -> tuple[TrainState, Metrics]:
        drawn = torch_states() if may_raise(self.train) else {}
        forward = self._forward()
        work = self._second_half(forward)
        if forward.schedule is None:
            among, local = forward.run.within or self.info.axis, self.train.step.strategy.hook(self.info.step) is None
            mean, divisor = mean_at_once(forward.total, forward.weight, among, local, forward.run.schedule is not None)
            done = work.run_alone(forward.total, divisor)
        else:
            with torch.no_grad():  # recording views in autograd would be costly
                done, mean = self._backward(forward, forward.schedule, work)
        return self._apply(forward, work, done, mean if forward.mean is None else forward.mean, drawn)

    @property
    def _versions(self) -> list[int]:
        """The version counters of the tensors that the optimizer writes to."""
        counts_first = isinstance(self.train.optimizer, TorchOptimizer)  # it counts on parameters, before any write
        states = [] if counts_first else tree.flatten(self.state.held("opt_state"))[0]
        return [*map(attrgetter("_version"), (*self._params, *states))]

    # --- forward -----------------------------------------------------------------------------------------------------

    def _forward(self) -> Forward:
        """Run the user's step on the marked parameters."""
        train, strategy, sync = self.train, self.train.step.strategy, self.state.held("sync_state")
        held = self.state.held("buffers")
        leaves = self._params
        if train.donate and not self.late and sync.leaves:
            # The optimizer writes to the parameters, and one tensor may be a parameter and communication state too.
            sync = replace(sync, leaves=unshared(sync.leaves, self.state.held("params")))
        sync_leaves, sync_spec = tree.flatten(sync.leaves)
        hook = self.post_update_hook
        if hook is None and not marks_on_wire(train.step, self.hook, self.info.axis):
            leaves = [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in leaves]
            sync_leaves = [x.detach().requires_grad_() for x in sync_leaves]
        given = tree.unflatten(self._spec, leaves)
        if sync_leaves or strategy.stateful:
            given = Synced(given, replace(sync, leaves=tree.unflatten(sync_spec, sync_leaves)))
        options = CallOptions(True, self.info.step, hook, self.state.frozen, (leaves, self._spec))
        with comm.span("forward"), torch.enable_grad():
            arguments = arguments_of(given, held, self.batch)
            run = train.step.run(arguments, self.batch.named, options)
            loss, buffers, aux = outputs_of(run, held, train.has_aux)
        if self._in_place and not (buffers is aux is None):  # outputs mustn't change with the parameters
            buffers, aux = unshared((buffers, aux), leaves)
        if isinstance(loss, Weighted):
            check_weighted(strategy, self.info.step)
        total, weight = loss.checked() if isinstance(loss, Weighted) else (loss, None)
        asked = run.mean and weight is None and (run.local or run.within is not None)
        mean = run.averaged(total.detach()) if asked else None
        return Forward(run, leaves, sync_leaves, sync_spec, total, weight, buffers, aux, mean)

    # --- backward ----------------------------------------------------------------------------------------------------

    def _second_half(self, forward: Forward) -> Backward:
        train, given = self.train, forward.run.inputs
        loss_scale = loss_scale_of(train, self.state)
        factor: float | torch.Tensor = 1.0 if loss_scale is None else loss_scale
        ahead = runs_ahead(self.info, self._params)
        if isinstance(factor, torch.Tensor) and not ahead:
            factor = float(factor)
        leaves = forward.leaves
        inputs = [*leaves, *forward.sync_leaves] if given is None else given
        look = probes if self._checks and not ahead else None
        unused: dict[int, str] = {}
        if self.state.step == 0:
            schedule = forward.run.schedule
            missing = unreached(forward.total, leaves, None if schedule is None else schedule.plan)
            if missing:
                paths = tree.leaf_paths(self.state.trained)
                unused = {member: paths[member] for member in missing}
        return Backward(train.optimizer, self.state, forward, inputs, self._in_place, factor, look, unused)

    def _backward(
        self, forward: Forward, schedule: ProcessSchedule, work: Backward
    ) -> tuple[BackwardResult, torch.Tensor]:
        """Run the backward pass, which launches the buckets' programs. Returns (buckets' results, mean loss)."""
        total, weight, name = forward.total, forward.weight, f"step {self.state.step}"
        try:
            comm.read_last_summary(schedule.among)
        except LtxError as error:  # the host has run ahead of the device, and an earlier step failed there
            if not isinstance(error, WeightError):  # after a WeightError that step has changed nothing
                self.state.invalidate(
                    f"this TrainState (step {self.state.step}) is invalid: the device couldn't complete what it is "
                    f"made of ({type(error).__name__}: {error}). Load a checkpoint."
                )
            raise
        schedule.send_summary(name, total.detach(), 1.0 if weight is None else weight, self._checks)
        completion: Completion | None = None
        try:
            if self.post_update_hook is not None:
                completion = UpdateThenSend(self.post_update_hook, work, schedule, total, weight)
                schedule.program_of = completion.program
            schedule.backward(work.objective(total), work.inputs)
            if completion is None:
                scale = scale_of(work, schedule, weighted=weight is not None)
                of = UpdateBuckets if self.train.overlap == "update" else CollectGradients
                completion = of(work, schedule, scale)
            for bucket, reduced in schedule.wait_buckets():
                completion.complete(bucket, reduced)
            if self.train.confirms and not self.late:
                comm.confirm(schedule.among)
            summary = schedule.finish()
            done = completion.result()
        except BaseException as error:
            schedule.abandon(error)
            if completion is not None:
                work.invalidated_by(error, completion.updated, schedule.plan)
            raise
        assert summary is not None
        return done, summary.mean.to(total.dtype) if completion.mean is None else completion.mean

    # --- apply and commit --------------------------------------------------------------------------------------------

    def _apply(
        self, forward: Forward, work: Backward, done: BackwardResult, mean: torch.Tensor, drawn: dict[str, Any]
    ) -> tuple[TrainState, Metrics]:
        """Check that gradients are finite, run the optimizer and the strategy's part, and commit."""
        train, state, info = self.train, self.state, self.info
        states, buffers = done.states, forward.buffers
        finite: bool | torch.Tensor | None = None
        if done.grads is not None:
            if work.unused:
                work.look(range(len(done.grads)), done.grads)
            if self._checks:
                finite = all_finite(train, done.grads, info, done.sums)
            if isinstance(finite, torch.Tensor) and host_asks(train, state.step):  # the host waits for the device
                finite = bool(info.axis.ranks.read(finite, "the guard"))
            if done.skip is not None and finite is not False:
                finite = done.skip.logical_not() if finite is None or finite is True else finite & ~done.skip
            if finite is False and should_raise(train, state):
                raise not_finite_error(train, state, self.batch, info, done.grads, drawn, loss_scale_of(train, state))
            states, buffers = kept_if_skipped(train, finite, state, states, buffers)

        # A signal that comes while tensors are updated in place is handled after the step. If its handler raises, the
        # caller doesn't get the result, so the state object itself becomes the next state.
        finished = None
        before: list[int] = []

        def about_to_write() -> None:
            before.extend(self._versions)
            state.begin_writing()

        try:
            work.warn_of_unused()
            with uninterrupted(self._in_place):
                updated = self._updated(done, states, finite, mean, about_to_write)
                if train.confirms and self.late and info.axis.comm is not None:
                    comm.confirm(info.axis.comm)
                next_sync = state.held("sync_state").advanced(updated.states, info.step)
                metrics = Metrics(mean, forward.aux)
                following, metrics = next_state(train, state, updated, buffers, next_sync, metrics, finite)
                following.__dict__["sees_loss"] = state.sees_loss
                with nullcontext() if updated.finish is None else uninterrupted(True):
                    if updated.finish is not None:
                        state.begin_writing()
                        updated.finish()
                    finished = following, metrics
                    self.commit()
                    if train.donate:
                        hand_over(state, following.unseen(), self.seen)
        except BaseException as error:
            if finished is None and done.grads is None:
                work.invalidated_by(error)
            elif finished is None and before and before != self._versions:
                state.invalidate(
                    f"this TrainState (step {state.step}) is invalid: the optimizer had begun to update its tensors in "
                    f"place when something failed ({type(error).__name__}: {error}). Load a checkpoint. With "
                    "donate=False the tensors of a state are never written to."
                )
            elif finished is None and before:
                state.undo_begin()
            elif finished is not None and train.donate:
                state.become(finished[0])
            raise
        return finished

    def _updated(
        self,
        done: BackwardResult,
        states: Any,
        finite: bool | torch.Tensor | None,
        mean: torch.Tensor,
        on_overwriting: Callable[[], None],
    ) -> Updated:
        """Run the optimizer, unless it has run bucket by bucket, and the strategy's part."""
        train, state, strategy = self.train, self.state, self.train.step.strategy
        if done.grads is None:
            got = strategy.after_update(done.params, states, self.info)
            params, after = check_next(strategy, "after_update", got, done.params, states)
            return Updated(params, done.opt_state, after, self.pending)
        with comm.span("update"):
            grads, later = tree.unflatten(self._spec, done.grads), self.late and train.donate
            done.grads.clear()  # leave the only references to the optimizer, which can free them
            opt_state = state.held("opt_state")
            opt_state = with_loss(opt_state, mean) if state.sees_loss else opt_state
            of_state = state.held("params"), grads, opt_state
            update = Update(train.optimizer, *of_state, self._in_place, finite, later, on_overwriting)
            return check_updated(strategy, strategy.update(update, states, self.info, self.pending), update, states)


# --- without side effects --------------------------------------------------------------------------------------------


def _check_derivative(train: TrainSettings, state: TrainState, batch: Batch) -> None:
    """Raise if the step is differentiated and the derivative would be incomplete."""
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
    """A new leaf with the value and tangent of `x`, to take gradients with respect to it."""
    tangent = forward_ad.unpack_dual(x).tangent if private.has_tangents() else None
    leaf = x.detach().requires_grad_()
    return leaf if tangent is None else forward_ad.make_dual(leaf, tangent)


def _mean_in_graph(key: str, loss: torch.Tensor, step: int, clock: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean loss, clock one step later). The sum includes the step's number, which ranks compare."""
    number = comm.number_in_graph(step, clock).to(loss.device)
    sums = collectives.psum(torch.stack([loss.double(), number, number * number]), key)
    return (sums[0] / traced_size(key)).to(loss.dtype), comm.count_in_graph(key, step, clock, sums[1], sums[2])


def step_purely(train: TrainSettings, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """A step without side effects, for transforms of torch.func (also simulated ranks) and for compiled graphs."""
    if traced.recording():
        refuse_meshes(tuple([type(x).__name__ for x in tree.flatten(state.trained)[0]]))
    else:
        state.check_owned()
        if train.check_every is not None and state.step % train.check_every == 0:
            check_replicas(state, train.step.axis)
    strategy, sync = train.step.strategy, state.sync_state
    if traced.recording():
        refuse_in_graph(strategy, checks_finite(train), may_raise(train))
        axis = Axis("data", 1)
    else:
        axis = comm.resolve(train.step.axis)
        strategy.check_axis(axis)
    info = StepInfo(sync.checked_step(), axis)
    check_layout(strategy, info.step)
    if not traced.recording():
        _check_derivative(train, state, batch)
    drawn = torch_states() if may_raise(train) else {}
    stateful = bool(sync.leaves) or strategy.stateful
    loss_scale = loss_scale_of(train, state)
    others: list[Any] = []

    def mean(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        arguments = arguments_of(tree.unflatten(spec, leaves), state.buffers, batch)
        run = train.step.run(arguments, batch.named, CallOptions(step=info.step, frozen=state.frozen))
        loss, buffers, aux = outputs_of(run, state.buffers, train.has_aux, detached=False)
        if isinstance(loss, Weighted):
            check_weighted(strategy, info.step)
        value = run._replace(output=loss).value()
        # torch.func accepts only tensors as aux.
        rest, structure = tree.flatten((buffers, aux))
        others[:] = [structure, isinstance(loss, Weighted), [None if isinstance(x, torch.Tensor) else x for x in rest]]
        tensors = [value, *(x for x in rest if isinstance(x, torch.Tensor))]
        return value if loss_scale is None else value * loss_scale, tensors

    pending = strategy.begin(state.trained, sync.leaves, info, None)
    # torch.func treats None as a leaf, and None stands in the places of frozen parameters.
    flat, spec = tree.flatten(Synced(state.trained, sync) if stateful else state.trained)
    if traced.recording() or private.in_transform():
        flat_grads, (_, (loss, *tensors)) = torch.func.grad_and_value(mean, has_aux=True)(flat)
    else:  # under plain autograd, a user of the step may differentiate with respect to its batch
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
    update = Update(train.optimizer, state.trained, grads, with_loss(state.opt_state, loss), finite=finite)
    updated = check_updated(strategy, strategy.update(update, states, info, pending), update, states)
    if updated.pending is not None:
        raise UnsupportedError(
            f"{strategy!r} leaves work under way between two steps, which transforms can't carry. It has to complete "
            "within a step there."
        )
    if traced.recording():  # a step number in the structure would make every step compile anew
        next_sync = SyncState(updated.states, sync.uses, clock, sync.step, sync.choice)
    else:
        next_sync = sync.advanced(updated.states)
    return next_state(train, state, updated, buffers, next_sync, Metrics(loss, aux), finite)
