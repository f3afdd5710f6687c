"""One eager training step (:class:`Step`), and what it does with each bucket as its gradients arrive."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from operator import attrgetter
from types import FrameType
from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import tree
from ltx.core.base.errors import LtxError, WeightError
from ltx.core.gradients.buffers import unpack
from ltx.core.gradients.pending import ProcessSchedule
from ltx.core.gradients.reduction import Bucket, LeafState, Program, Reduced
from ltx.core.optim.base import Update, advanced, apply_leaves, with_loss
from ltx.core.optim.from_torch import TorchOptimizer
from ltx.core.training.backward import (
    Backward,
    BackwardResult,
    Forward,
    Scale,
    is_one,
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
    should_raise,
)
from ltx.core.training.outputs import Batch, arguments_of, outputs_of, unshared
from ltx.core.training.resolved import Resolved
from ltx.core.training.settings import TrainSettings, check_weighted
from ltx.core.training.train_state import Metrics, TrainState, hand_over, torch_states
from ltx.core.transforms.functional_call import Calls
from ltx.core.transforms.marking import marks_on_wire
from ltx.core.transforms.run import CallOptions, Weighted
from ltx.core.transforms.strategy import shares_gradients, stateful
from ltx.core.transforms.strategy_update import (
    Old,
    PostUpdateHook,
    StepInfo,
    Updated,
    check_next,
    check_updated,
    take_updated,
    with_overwriting,
)
from ltx.core.transforms.sync_state import Synced, states_after
from ltx.typing import Tree


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


class Completion:
    """The base of classes that process each bucket of a backward pass when it is complete."""

    def __init__(self, work: Backward, schedule: ProcessSchedule):
        self.updated = 0  # the number of buckets that the optimizer has updated
        #: The mean loss, if ranks don't share gradients and so have no step summary of it.
        self.mean: torch.Tensor | None = None
        self._work, self._schedule, self._plan = work, schedule, schedule.plan
        self._states: dict[int, LeafState] = {}

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        """The program of `bucket` has returned `reduced`."""
        raise NotImplementedError

    def result(self) -> BackwardResult:
        """The results of all buckets."""
        raise NotImplementedError

    def _begin_update(self, bucket: Bucket, grads: Sequence[torch.Tensor]) -> None:
        """The optimizer is about to update the parameters of `bucket`, whose gradients are `grads`."""
        if self._work.unused:
            self._work.look(bucket.members, grads)
        self.updated += 1
        if self._work.donate:
            self._work.state.begin_writing()

    def _states_after(self, params: Tree) -> dict[str, LeafState]:
        before = self._work.state.held("sync_state").leaves
        return states_after(self._plan, self._states, before, params)


class CollectGradients(Completion):
    """Collects gradients (``overlap="backward"``) for an optimizer that needs all at once. The state doesn't change."""

    def __init__(self, work: Backward, schedule: ProcessSchedule, scale: Scale):
        super().__init__(work, schedule)
        self._scale, self._probes = scale, work.probes
        self._grads: dict[int, torch.Tensor] = {}
        self._sums: list[torch.Tensor | float] = []

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        grads = unpack(reduced[0].view(-1), bucket)
        self._states.update(self._plan.states_by_leaf(bucket, reduced[1]))
        # If the sum of the unscaled gradients is finite, so is the sum after a factor of at most 1.
        known = not isinstance(factor := self._scale.factor, torch.Tensor) and abs(factor) <= 1
        total = self._schedule.total(bucket) if self._probes is not None and known else None
        if not is_one(self._scale.factor):
            self._scale.apply(grads)
        if total is not None:
            self._sums.append(total)
        elif self._probes is not None:
            self._sums += self._probes(grads)  # now, while the gradients are in the cache
        self._grads.update(zip(bucket.members, grads, strict=True))

    def result(self) -> BackwardResult:
        after = self._states_after(self._work.state.held("params"))
        sums = self._sums if self._probes is not None else None
        grads = [*map(self._grads.__getitem__, range(len(self._work.forward.leaves)))]
        return BackwardResult(grads, after, sums=sums, skip=self._scale.skip)


class UpdateBuckets(Completion):
    """Runs the optimizer on each bucket (``overlap="update"``): in the state's memory with `donate`, else in copies."""

    def __init__(self, work: Backward, schedule: ProcessSchedule, scale: Scale):
        super().__init__(work, schedule)
        self._scale, self._params, self._opt_state = scale, work.state.held("params"), work.state.held("opt_state")
        if not work.donate:
            self._params, self._opt_state = tree.map(torch.clone, (self._params, self._opt_state))
        self._leaves = work.forward.leaves if work.donate else tree.flatten(self._params)[0]
        self._leaf_states = work.optimizer.leaf_states(self._opt_state, self._params)
        self._applied = scale.conditional(work.optimizer, self._leaves)

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        """Update the bucket's parameters with its gradients; the gradients are overwritten."""
        grads = unpack(reduced[0].view(-1), bucket)
        self._begin_update(bucket, grads)
        self._scale.apply(grads)
        states, params = [self._leaf_states[m] for m in bucket.members], [self._leaves[m] for m in bucket.members]
        with comm.span("update"):
            apply_leaves(self._applied, grads, states, params, self._opt_state)
        self._states.update(self._plan.states_by_leaf(bucket, reduced[1]))

    def result(self) -> BackwardResult:
        return BackwardResult(None, self._states_after(self._params), self._params, advanced(self._opt_state))


class UpdateThenSend(Completion):
    """Updates a bucket and sends it as soon as its gradients are ready (:mod:`ltx.core.transforms.strategy_update`).

    The backward pass may still need the old parameters, so parameters change only when the pass is over; the
    optimizer's state changes at once. `total`, `weight`: as in :class:`Forward`.
    """

    def __init__(
        self,
        hook: PostUpdateHook,
        work: Backward,
        schedule: ProcessSchedule,
        total: torch.Tensor,
        weight: torch.Tensor | None,
    ):
        # Don't keep `total`: its graph holds the schedule, which holds this object during the pass, and the garbage
        # collector can't free a cycle that goes through a graph.
        super().__init__(work, schedule)
        self._hook, self._axis = hook, self._plan.axis
        state, optimizer = work.state, work.optimizer
        opt_state = hook.own(state.held("opt_state"), self._axis)
        self._opt_state = opt_state = opt_state if work.donate else tree.map(torch.clone, opt_state)
        self._opt_states = optimizer.leaf_states(opt_state, state.held("params"))
        paths = tree.leaf_paths(state.held("params")) if any(self._plan.state_names) else []
        known = [state.sync_state.leaves[path] for path in paths] or [{} for _ in work.forward.leaves]
        old = Old([x.detach() for x in work.forward.leaves], known, self._axis.size)
        self._old = with_overwriting(hook, old, work.donate, opt_state)
        self._params = list(old.params)
        self._optimizer = optimizer
        if hook.shares_gradients:
            self._scale = scale_of(work, schedule, weighted=weight is not None)
            self._optimizer = self._scale.conditional(optimizer, self._params)
        else:
            self.mean, self._divisor = mean_at_once(total, weight, self._axis, local=True)

    def program(self, bucket: Bucket, grads: Sequence[torch.Tensor], states: Sequence[LeafState]) -> Program:
        """The program of a bucket. The optimizer runs inside it on shared gradients, or before it on the rank's own."""
        if self._hook.shares_gradients:
            return self._schedule.program(bucket, grads, states, partial(self._update_shared, bucket))
        self._schedule.plan.refuse_sparse(bucket, grads)
        with comm.span("update"):
            # Kernels need contiguous gradients. Not in place: two parameters may have the same gradient tensor.
            given = self._updated(bucket, self._work.divided([g.contiguous() for g in grads], self._divisor))
        return self._schedule.program(bucket, given, self._hook.begun(self._old.of(bucket)))

    def _update_shared(self, bucket: Bucket, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's new parameters, from shared gradients, which may be overwritten."""
        with comm.span("update"):
            self._scale.apply(grads)
            return self._updated(bucket, list(grads))

    def _updated(self, bucket: Bucket, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        given = [self._hook.part(x, self._axis).clone() for x in self._old.of(bucket).params]
        self._begin_update(bucket, grads)
        opt_states = [self._opt_states[member] for member in bucket.members]
        apply_leaves(self._optimizer, grads, opt_states, given, self._opt_state)
        return given

    def complete(self, bucket: Bucket, reduced: Reduced) -> None:
        finish = take_updated(self._hook, bucket, reduced, self._old, self._params, self._states)
        if finish is not None:
            finish()

    def result(self) -> BackwardResult:
        spec = tree.flatten(params := self._work.state.held("params"))[1]
        opt_state = self._hook.held(advanced(self._opt_state), self._axis)
        return BackwardResult(None, self._states_after(params), tree.unflatten(spec, self._params), opt_state)


def incomplete(state: TrainState, error: BaseException) -> None:
    """Make a state invalid: the host took it over before the device had made it, and the device has given up since."""
    state.invalidate(
        f"this TrainState (step {state.step}) is invalid: the device couldn't complete what it is made of "
        f"({type(error).__name__}: {error}). Load a checkpoint."
    )


@dataclass(eq=False)
class Step:
    """One call of a train step, after the strategy's `begin`: forward, backward, wait, apply, commit."""

    train: TrainSettings
    state: TrainState
    resolved: Resolved
    batch: Batch
    seen: tuple[str, ...]  # the parts of `state` whose tensors the user may hold references to
    info: StepInfo
    pending: Any  # the result of the strategy's `begin`
    commit: Callable[[], None]  # called when the step commits

    def __post_init__(self) -> None:
        self._checks = checks_finite(self.train)
        self._in_place = self.train.donate and (self.resolved.post_update_hook is not None or not self.resolved.late)
        self._params, self._spec = self.resolved.leaves, self.resolved.spec
        self._calls = Calls()

    def run(self) -> tuple[TrainState, Metrics]:
        drawn = torch_states() if may_raise(self.train) else {}
        forward = self._forward()
        work = self._second_half(forward)
        schedule = forward.run.schedule
        if isinstance(schedule, ProcessSchedule):
            with torch.no_grad():  # recording views in autograd would be costly
                done, mean = self._backward(forward, schedule, work)
        else:
            among, local = forward.run.within or self.info.axis, self.train.step.strategy.hook(self.info.step) is None
            mean, divisor = mean_at_once(forward.total, forward.weight, among, local)
            with self._calls.in_pass():
                done = work.run_alone(forward.total, divisor)
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
        if train.donate and not self.resolved.late and sync.leaves:
            # The optimizer writes to the parameters, and one tensor may be a parameter and communication state too.
            sync = replace(sync, leaves=unshared(sync.leaves, self.state.held("params")))
        sync_leaves, sync_spec = tree.flatten(sync.leaves)
        hook = self.resolved.post_update_hook
        plan = self.resolved.plan
        if plan is None and hook is None and not marks_on_wire(train.step, self.resolved.hook, self.info.axis):
            leaves = [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in leaves]
            sync_leaves = [x.detach().requires_grad_() for x in sync_leaves]
        given = tree.unflatten(self._spec, leaves)
        if sync_leaves or (not self.resolved.lasts and stateful(strategy)):
            given = Synced(given, replace(sync, leaves=tree.unflatten(sync_spec, sync_leaves)))
        flat, within = (leaves, self._spec), self.resolved.within
        options = CallOptions(True, self.info.step, hook, self.state.frozen, flat, plan, within)
        with comm.span("forward"), torch.enable_grad():
            arguments = arguments_of(given, held, self.batch)
            with self._calls.recorded():
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
        ahead = self.resolved.ahead
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
                incomplete(self.state, error)
            raise
        if not self.state.of_step and self.train.step.strategy.layout.params == "replicated":
            schedule.unreduced = lambda: "made by the program (dataclasses.replace, ltx.tree.map, a checkpoint)"
        schedule.send_summary(name, total.detach(), 1.0 if weight is None else weight, self._checks)
        completion: Completion | None = None
        try:
            if self.resolved.post_update_hook is not None:
                completion = UpdateThenSend(self.resolved.post_update_hook, work, schedule, total, weight)
                schedule.program_of = completion.program
            with self._calls.in_pass():
                objective = work.objective(total)
                schedule.backward([] if objective is None else [objective], work.inputs)
            if completion is None:
                scale = scale_of(work, schedule, weighted=weight is not None)
                of = UpdateBuckets if self.train.overlap == "update" else CollectGradients
                completion = of(work, schedule, scale)
            for bucket, reduced in schedule.wait_buckets():
                completion.complete(bucket, reduced)
            summary = schedule.finish()
            done = completion.result()
        except BaseException as error:
            schedule.abandon(error)
            if completion is not None:
                work.invalidated_by(error, completion.updated, schedule.plan)
            raise
        assert summary is not None
        return done, summary.mean(total.dtype) if completion.mean is None else completion.mean

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
            if finite is not None:
                states, buffers = kept_if_skipped(train, finite, state, states, buffers)

        # A signal that comes while tensors are updated in place is handled after the step. If its handler raises, the
        # caller doesn't get the result, so the state object itself becomes the next state.
        finished = None
        before: list[int] = []

        def about_to_write() -> None:
            before.extend(self._versions)
            state.begin_writing()

        try:
            if work.unused:
                shared = shares_gradients(train.step.strategy, info.step) and forward.run.within is None
                work.report_unused(shared or info.axis.size == 1)
            with uninterrupted(self._in_place):
                updated = self._updated(done, states, finite, mean, about_to_write)
                next_sync = state.held("sync_state").advanced(updated.states, info.step)
                metrics = Metrics(mean, forward.aux)
                following, metrics = next_state(train, state, updated, buffers, next_sync, metrics, finite)
                carried = self.resolved.after(following, forward.run)
                following.__dict__.update(
                    sees_loss=state.sees_loss, of_step=True, _made_by=self.train, _resolved=carried
                )
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
            grads, later = tree.unflatten(self._spec, done.grads), self.resolved.late and train.donate
            prepared = None if self.resolved.prepared is None else (self.resolved.prepared, grads, [*done.grads])
            done.grads.clear()  # leave the only references to the optimizer, which can free them
            opt_state = state.held("opt_state")
            opt_state = with_loss(opt_state, mean) if state.sees_loss else opt_state
            of_state = state.held("params"), grads, opt_state
            update = Update(train.optimizer, *of_state, self._in_place, finite, later, on_overwriting, prepared)
            return check_updated(strategy, strategy.update(update, states, self.info, self.pending), update, states)
