"""A training step: one list of stages, :meth:`Step.run`, and the executor of eager steps. The other executor,
:class:`ltx.core.training.pure_step.PureStep`, has no side effects, for transforms and compiled graphs.
"""

from __future__ import annotations

import enum
import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import attrgetter
from types import FrameType
from typing import Any, ClassVar

import torch

from ltx.core import comm
from ltx.core.base import private, traced, tree
from ltx.core.base.errors import LtxError, WeightError
from ltx.core.base.needs import require
from ltx.core.gradients.pending import ProcessSchedule
from ltx.core.optim.base import Prepared, Update, chosen
from ltx.core.optim.from_torch import TorchOptimizer
from ltx.core.training import backward, guard
from ltx.core.training.backward import Backward, BackwardResult
from ltx.core.training.outputs import Batch, outputs_of
from ltx.core.training.resolved import Resolved
from ltx.core.training.settings import TrainSettings
from ltx.core.training.train_state import Metrics, TrainState, hand_over, torch_states
from ltx.core.transforms.calls_again import Calls
from ltx.core.transforms.marking import marks_on_wire
from ltx.core.transforms.run import Called, CallOptions, Run, Weighted
from ltx.core.transforms.strategy import StepInfo, Updated, check_next, check_updated, shares_gradients, stateful
from ltx.core.transforms.sync_state import Synced, SyncState, plain_values
from ltx.typing import Tree


@dataclass(eq=False)
class Step:
    """One call of a train step."""

    train: TrainSettings
    state: TrainState
    batch: Batch
    info: StepInfo
    pending: Any  # the strategy's communication under way, from its `begin`
    params: Tree  # those that are trained; then their leaves and structure
    leaves: list[torch.Tensor]
    spec: Any

    def run(self) -> tuple[TrainState, Metrics]:
        """The stages, in order: differentiate, check, update, commit."""
        train, state = self.train, self.state
        drawn = torch_states() if train.may_raise else {}
        done, loss, buffers, aux = self.differentiate()
        finite = self.finite(done)
        bad = finite is False
        if isinstance(finite, torch.Tensor) and train.may_raise and not self.detached:
            bad = not bool(plain_values(finite).all())  # the host of an eager step doesn't wait for the device
        if bad and guard.should_raise(train, state):
            raise guard.not_finite_error(train, state, self.batch, self.info, done.grads or [], drawn)
        states = done.states
        if finite is not None:  # those before, if the step is skipped
            states = chosen(finite, states, state.sync_state.leaves)
            if train.guard == "skip" and buffers is not None:
                buffers = chosen(finite, buffers, state.buffers)
        try:
            with self.updating():
                updated, rates, module = self.update(done, states, finite), None, None
                was, layout, loss_scale = state.layout, train.step.strategy.layout, state.held_loss_scale
                sync, now = state.held_sync_state, self.info.step
                if self.clock is not None:  # the structure keeps its step and module, or each call would compile anew
                    module, clock, now, step = state.module, self.clock, sync.step, traced.one_more(state.step)
                else:
                    rates = train.step.strategy.rates(train.optimizer, state.held_opt_state, self.info.axis)
                    clock = sync.clock if now == sync.step else torch.zeros_like(sync.clock)  # it is at 0
                    now, step = now + 1, state.step + 1
                metrics = Metrics(loss, aux, rates=rates)
                if finite is not None or self.prepared is None:
                    metrics, loss_scale = guard.measured(train, state, updated.opt_state, metrics, finite)
                if layout != was:  # the state held the whole optimizer state, or a program has made it
                    was = replace(was, params=layout.params, opt_state=layout.opt_state, sync_state=layout.sync_state)
                sync = SyncState(updated.states, sync.uses, clock, now)
                parts = updated.params, buffers, updated.opt_state, sync, step, was, loss_scale, updated.pending
                following = TrainState(*parts, state.frozen, module, [None])
                self.commit(updated, following)
        except BaseException as error:
            self.failed(done, error)
            raise
        return following, metrics

    def update(self, done: BackwardResult, states: Any, finite: Any) -> Updated:
        """Run the optimizer, unless it has run bucket by bucket, and the strategy's part."""
        strategy, state = self.train.step.strategy, self.state
        if done.grads is None:
            got = strategy.after_update(done.params, states, self.info)
            params, after = check_next(strategy, "after_update", got, done.params, states)
            return Updated(params, done.opt_state, after, self.pending)
        with comm.span("update"):
            opt_state = state.held_opt_state
            grads = tree.unflatten(self.spec, done.grads)
            faster = None if self.prepared is None else (self.prepared, grads, [*done.grads])
            done.grads.clear()  # leave the only references to the optimizer, which can free them
            of = self.train.optimizer, self.params, grads, opt_state
            update = Update(*of, self.in_place, finite, self.later, self.about_to_write, faster)
            return check_updated(strategy, strategy.update(update, states, self.info, self.pending), update, states)

    def called(self, given: Tree, options: CallOptions, calls: Any = None) -> tuple[Run, Any]:
        """The user's step on the parameters `given`: (run, (loss, buffers, aux)). `calls` records functional calls."""
        buffers, strategy = self.state.held_buffers, self.train.step.strategy
        with calls or comm.NOTHING:
            args = (given, *self.batch.args) if buffers is None else (given, buffers, *self.batch.args)
            run = self.train.step.run(args, self.batch.named, options)
        outputs = outputs_of(run, buffers, self.train.has_aux, self.detached)
        if isinstance(outputs[0], Weighted):
            require("weighted, strategy", strategy, "", self.info.step)
            require("weighted, hook", strategy.hook(self.info.step))
        return run, outputs

    #: Buffers and aux have no derivative.
    detached: ClassVar[bool] = True
    #: Of the optimizer's :class:`ltx.core.optim.base.Update`: `donate`, `may_overwrite`, `prepared`, `on_overwriting`.
    in_place: bool = field(default=False, init=False)
    later: bool = field(default=False, init=False)
    prepared: Prepared | None = field(default=None, init=False)
    about_to_write: ClassVar[Any] = None
    clock: Any = field(default=None, init=False)  # the next one of the communication state, in a graph

    def differentiate(self) -> tuple[BackwardResult, torch.Tensor, Tree, Any]:
        """The forward and the backward pass: (reduced gradients, the mean loss, buffers, aux)."""
        raise NotImplementedError

    def finite(self, done: BackwardResult) -> bool | torch.Tensor | None:
        """Whether all gradients of all ranks are finite; None if nobody asks. A tensor where the host doesn't wait."""
        raise NotImplementedError

    def updating(self) -> AbstractContextManager[None]:
        """Surrounds the update, and the commit."""
        return nullcontext()

    def commit(self, updated: Updated, following: TrainState) -> None:
        """Give the memory of the state to the `following` one, if it is reused."""

    def failed(self, done: BackwardResult, error: BaseException) -> None:
        """Say what has become of the state, as something failed in the update or after it."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals to the end of the block, as their handlers may raise (Ctrl-C, alarms). The main thread has them."""
    if threading.current_thread() is not threading.main_thread():
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
_NO_LEAVES = tree.flatten({})


def incomplete(state: TrainState, error: BaseException) -> None:
    """Make a state invalid: the host took it over before the device had made it, and the device has given up since."""
    state.invalidate("the device couldn't complete what it is made of", error)


class Written(enum.Enum):
    """What a step has written into the memory of its state."""

    NOTHING = enum.auto()
    PERHAPS = enum.auto()  # the optimizer has been told to write, and may have begun to
    ALL = enum.auto()  # the next state is complete


@dataclass(eq=False)
class EagerStep(Step):
    """A step whose buckets are reduced while the backward pass runs."""

    resolved: Resolved
    seen: tuple[str, ...]  # as the state's, before this step looked at it
    committed: Callable[[], None]  # called when the step commits

    def __post_init__(self) -> None:
        self.in_place = self.train.donate and (self.resolved.post_update_hook is not None or not self.resolved.late)
        self.later, self.prepared = self.resolved.late and self.train.donate, self.resolved.prepared
        self._calls = Calls()
        self._known, self._unused = self.resolved.known, dict[int, str]()
        self._called: Called | None = None  # the user's function, if that has been called
        self._written, self._before = Written.NOTHING, list[int]()

    def differentiate(self) -> tuple[BackwardResult, torch.Tensor, Tree, Any]:
        work, mean, buffers, aux = self._forward()
        if isinstance(work.run.schedule, ProcessSchedule):
            with private.no_grad():  # recording views in autograd would be costly
                done, summed = self._backward(work, work.run.schedule)
        else:
            local = self.train.step.strategy.hook(self.info.step) is None
            summed, divisor = work.mean_at_once(work.run.known.within or self.info.axis, local)
            with self._calls.in_pass():
                done = work.run_alone(divisor)
        return done, summed if mean is None else mean, buffers, aux

    def _forward(self) -> tuple[Backward, torch.Tensor | None, Tree, Any]:
        """Call the user's step: (the pass to come, the mean loss or None if it comes with that, buffers, aux)."""
        train, strategy, sync = self.train, self.train.step.strategy, self.state.held_sync_state
        leaves = self.leaves
        if train.donate and not self.resolved.late and sync.leaves:
            # The optimizer writes to the parameters, and one tensor may be a parameter and communication state too.
            sync = replace(sync, leaves=tree.unshared(sync.leaves, self.params))
        sync_leaves, sync_spec = tree.flatten(sync.leaves) if sync.leaves else _NO_LEAVES
        hook, known = self.resolved.post_update_hook, self.resolved.known
        if known.plan is None and hook is None and not marks_on_wire(train.step, self.resolved.hook, self.info.axis):
            leaves = [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in leaves]
            sync_leaves = [x.detach().requires_grad_() for x in sync_leaves]
        given = self.params if leaves is self.leaves else tree.unflatten(self.spec, leaves)
        if sync_leaves or (not self.resolved.lasts and stateful(strategy)):
            given = Synced(given, replace(sync, leaves=tree.unflatten(sync_spec, sync_leaves)))
        options = CallOptions(True, self.info.step, hook, self.state.frozen, (leaves, self.spec), known, self._called)
        with comm.span("forward"), torch.enable_grad():
            run, (loss, buffers, aux) = self.called(given, options, self._calls.recorded())
        if (self.in_place or self.later) and not (buffers is aux is None):  # they mustn't change with the parameters
            buffers, aux = tree.unshared((buffers, aux), leaves)
        total, weight = loss.checked() if isinstance(loss, Weighted) else (loss, None)
        asked = run.mean and weight is None and (run.local or run.known.within is not None)
        mean = run.averaged(total.detach()) if asked else None
        scale = None if train.step.precision is None else guard.loss_scale_of(train, self.state)
        factor, ahead = 1.0 if scale is None else scale, self.resolved.ahead
        if isinstance(factor, torch.Tensor) and not ahead:
            factor = float(factor)
        guarded, unused = self.train.checks_finite and not ahead, dict[int, str]()
        if self.state.step == 0:
            given = run.inputs if len(run.inputs or ()) == len(leaves) else leaves  # in place of these
            missing = backward.unreached(total, given or leaves, None if run.schedule is None else run.schedule.plan)
            if missing:
                paths = tree.leaf_paths(self.state.trained)
                unused = {member: paths[member] for member in missing}
        inputs = [*leaves, *sync_leaves] if run.inputs is None else run.inputs
        of_pass = sync_leaves, inputs, sync_spec, total, weight, self.in_place, factor, guarded, unused, self.prepared
        self._known, self._unused = run.known, unused
        self._work = work = Backward(train.optimizer, self.state, run, leaves, *of_pass)
        return work, mean, buffers, aux

    def _backward(self, work: Backward, schedule: ProcessSchedule) -> tuple[BackwardResult, torch.Tensor]:
        """Run the backward pass, which launches the buckets' programs. Returns (buckets' results, mean loss)."""
        total, weight, name = work.total, work.weight, f"step {self.state.step}"
        if (among := schedule.pending.among).unread is not None:
            try:
                comm.read_last_summary(among)
            except LtxError as error:  # the host has run ahead of the device, and an earlier step failed there
                if not isinstance(error, WeightError):  # after a WeightError that step has changed nothing
                    incomplete(self.state, error)
                raise
        if not self.state.of_step and self.train.step.strategy.layout.params == "replicated":
            schedule.unreduced = lambda: "made by the program (dataclasses.replace, ltx.tree.map, a checkpoint)"
        schedule.send_summary(name, total.detach(), 1.0 if weight is None else weight, self.train.checks_finite)
        completion: backward.CollectGradients | backward.UpdateBuckets | backward.UpdateThenSend | None = None
        try:
            if self.resolved.post_update_hook is not None:
                completion = backward.UpdateThenSend(self.resolved.post_update_hook, work, schedule)
                schedule.program_of = completion.program
            with self._calls.in_pass():
                objective = work.objective()
                schedule.backward([] if objective is None else [objective], work.inputs, None, False, work.run.own)
            if completion is None:
                of = backward.UpdateBuckets if self.train.overlap == "update" else backward.CollectGradients
                completion = of(work, schedule)
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

    def finite(self, done: BackwardResult) -> bool | torch.Tensor | None:
        if done.grads is None:
            return None
        if self._unused:
            self._work.look(range(len(done.grads)), done.grads)
        finite, train, most = None, self.train, self.train.max_skipped
        if train.checks_finite:
            finite = guard.all_finite(train, done.grads, self.info, not self.resolved.ahead, done.sums)
        asks = train.guard == "raise" or (most is not None and self.state.step % most == 0)
        if asks and isinstance(finite, torch.Tensor):
            finite = bool(self.info.axis.ranks.read(finite, "the guard"))  # the host waits for the device
        if done.skip is not None and finite is not False:
            finite = done.skip.logical_not() if finite is None or finite is True else finite & ~done.skip
        return finite

    def updating(self) -> AbstractContextManager[None]:
        if self._unused:
            shared = shares_gradients(self.train.step.strategy, self.info.step) and self._known.within is None
            self._work.report_unused(shared or self.info.axis.size == 1)
        # A signal that comes while tensors are updated in place is handled after the step. If its handler raises, the
        # caller doesn't get the result, so the state object itself becomes the next state.
        return uninterrupted() if self.in_place else comm.NOTHING

    def about_to_write(self) -> None:
        self._written, self._before = Written.PERHAPS, self._versions
        self.state.begin_writing()

    @property
    def _versions(self) -> list[int]:
        """The version counters of the tensors that the optimizer writes to."""
        counts_first = isinstance(self.train.optimizer, TorchOptimizer)  # it counts on parameters, before any write
        states = [] if counts_first else tree.flatten(self.state.held_opt_state)[0]
        return [*map(attrgetter("_version"), (*self.leaves, *states))]

    def commit(self, updated: Updated, following: TrainState) -> None:
        state = self.state
        carried = self.resolved.after(following, self._known)
        following.__dict__.update(of_step=True, made_by=self.train, resolved=carried, module=state.module)
        with comm.NOTHING if updated.finish is None else uninterrupted():
            if updated.finish is not None:
                state.begin_writing()
                updated.finish()
            self._written, self._following = Written.ALL, following
            self.committed()
            if (module := state.module) is not None:
                moved = carried is not self.resolved or module.shows is not state.lease
                module.last = following.lease
                if moved or module.buffers:
                    module.show(following, moved)
                else:
                    module.shows = following.lease
            if self.train.donate:
                hand_over(state, following, self.seen)

    def failed(self, done: BackwardResult, error: BaseException) -> None:
        state = self.state
        match self._written:
            case Written.ALL if self.train.donate:  # an interrupt has kept the next state from the caller
                state.__dict__.update(self._following.__dict__)
            case Written.NOTHING if done.grads is None:
                self._work.invalidated_by(error)
            case Written.PERHAPS if self._before == self._versions:
                state.lease[0] = None
            case Written.PERHAPS:
                state.invalidate("the optimizer had begun to update its tensors in place when something failed", error)
