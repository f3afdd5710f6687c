"""train_step: a whole training step as a function from state to state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ltx import comm, tree
from ltx.arguments import checked
from ltx.axis import Axis
from ltx.errors import CollectiveTimeoutError, PeerLostError, StepError
from ltx.gradients.leaves import differentiable
from ltx.gradients.process_schedule import PassOptions, ProcessSchedule
from ltx.optim import Optimizer
from ltx.strategies.post_update import PostUpdateHook
from ltx.strategies.update import StepInfo, Updated
from ltx.training.backward_update import BackwardUpdate, mean_at_once
from ltx.training.donated import hand_over
from ltx.training.given_gradients import as_loss
from ltx.training.guard import not_finite_error, probes, random_states
from ltx.training.interrupts import uninterrupted
from ltx.training.outputs import Batch, Outputs, arguments_of, outputs_of, unshared
from ltx.training.pending_step import PendingStep, StepStart, step_start
from ltx.training.placed_state import on_parts
from ltx.training.pure_step import step_purely
from ltx.training.replicas import check_replicas
from ltx.training.state_operations import StateOperations
from ltx.training.step_parts import (
    all_finite,
    checks_finite,
    kept_if_skipped,
    loss_scale_of,
    must_sync_finite,
    next_state,
    should_raise,
)
from ltx.training.train_state import Metrics, TrainState
from ltx.training.trainable import Trainable
from ltx.training.update_then_send import UpdateThenSend
from ltx.transforms.data_parallel import DataParallel
from ltx.transforms.marking import marks_on_wire
from ltx.transforms.run import CallOptions
from ltx.transforms.sync_state import Synced, SyncState
from ltx.transforms.weighted import Weighted


@dataclass(frozen=True)
class TrainStep(StateOperations):
    """What :func:`train_step` returns: ``init(params) -> state`` and ``(state, *batch) -> (state, metrics)``."""

    @on_parts
    def __call__(self, state: TrainState, *args: Any, **named: Any) -> tuple[TrainState, Metrics]:
        batch = Batch(args, named)
        if not isinstance(state, TrainState):
            raise StepError(
                f"the first argument is the TrainState that init or the last step gave, got {type(state).__name__}."
            )
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return step_purely(self, state, batch)
        state.check_owned()
        axis, seen = comm.resolve(self.step.axis), state.seen
        self._compare(state, axis)
        start = replace(step_start(state, self.step.fn, late=self.overlap == "step"), seen=seen)
        strategy, moment = self.step.strategy, StepInfo(start.sync.checked_step(), axis)
        strategy.check_axis(axis)
        begins = strategy.communicates_besides
        pending = strategy.begin(state.trained, start.sync.leaves, moment, state.pending) if begins else state.pending
        late = axis.size > 1 and strategy.communicates_after_update(moment.step)
        try:
            with comm.span("step"):
                return self._step(state, start, batch, moment, pending, late)
        except BaseException as error:
            begun = pending is not None and pending is not state.pending
            if (late or begun or must_sync_finite(self, moment)) and axis.comm is not None:
                axis.comm.recovery.abort(error)
            if isinstance(error, PeerLostError | CollectiveTimeoutError):
                error.args = (f"{error} It was in step {state.step} of the training.",)
            raise

    def _compare(self, state: TrainState, axis: Axis) -> None:
        """Compare what should be the same on all ranks: when it is due, and at the first step in a world.

        Ranks that come from a checkpoint or from an interrupt may come from different steps.
        """
        axis_comm = axis.comm
        first = (
            axis_comm is not None
            and not axis_comm.has_compared(TrainStep, None)
            and self.step.strategy.layout.params == "replicated"
        )
        if first or (self.check_every is not None and state.step % self.check_every == 0):
            check_replicas(state, axis)
            if axis_comm is not None:
                axis_comm.count_as_compared(TrainStep, None)

    def _step(
        self, state: TrainState, start: StepStart, batch: Batch, info: StepInfo, pending: Any, late: bool
    ) -> tuple[TrainState, Metrics]:
        """The step, after the strategy's `begin`. `late`: ranks communicate after the optimizer."""
        sync, spec, strategy = start.sync, start.spec, self.step.strategy
        if self.donate and not late and sync.leaves and start.pending_step is None:
            # The optimizer writes into the parameters; the last step may have returned one tensor as both.
            sync = replace(sync, leaves=unshared(sync.leaves, tree.unflatten(spec, start.leaves)))
        drawn = random_states() if self.guard == "raise" else []
        post_update_hook = self.post_update_hook(info.step) if late and info.axis.comm is not None else None
        in_place = self.donate and (post_update_hook is not None or not late)
        leaves, trained = start.leaves, differentiable(start.leaves)
        sync_leaves, sync_spec = tree.flatten(sync.leaves)
        if post_update_hook is None and not marks_on_wire(self.step.hook_as_chosen(sync), info.step, training=True):
            leaves = [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in leaves]
            sync_leaves = [x.detach().requires_grad_() for x in sync_leaves]
        given = tree.unflatten(spec, leaves)
        if sync_leaves or strategy.stateful:
            given = Synced(given, replace(sync, leaves=tree.unflatten(sync_spec, sync_leaves)))
        with comm.span("forward"), torch.enable_grad():
            arguments = arguments_of(given, state.buffers, batch)
            ahead = self.overlap == "step"
            around = None if start.pending_step is None else start.pending_step.hidden_in
            run = self.step.run(
                arguments, batch.named, CallOptions(True, ahead, info.step, post_update_hook, state.frozen, around)
            )
            returned = outputs_of(run, state.buffers, self.has_aux)
            loss, buffers, aux = returned
        if in_place:  # what the step returned mustn't change when the parameters do
            buffers, aux = unshared((buffers, aux), leaves)
        if isinstance(loss, Weighted):
            strategy.check_weighted(info.step)
        total, weight = loss.checked() if isinstance(loss, Weighted) else (loss, None)
        schedule = run.schedule if isinstance(run.schedule, ProcessSchedule) else None
        if start.pending_step is not None:
            start.pending_step.wait_all()
        if schedule is not None:
            states = None if start.pending_step is None else start.pending_step.states_for(schedule.plan, trained)
            schedule.configure(PassOptions(f"step {state.step}", checks_finite(self), states))
            schedule.send_summary(total.detach(), torch.ones_like(total) if weight is None else weight)
        loss_scale = loss_scale_of(self, state)
        factor = 1.0 if loss_scale is None else float(loss_scale)
        mine = [leaves[i] for i in trained]
        by_bucket = self.overlap != "backward"
        look = probes if checks_finite(self) else None
        inputs = [*mine, *sync_leaves] if run.source is None else [run.source]
        work = BackwardUpdate(
            self.optimizer, by_bucket, state, mine, trained, sync_leaves, inputs, in_place, factor, look
        )
        if schedule is not None and post_update_hook is not None:
            done, mean = UpdateThenSend(post_update_hook, work, schedule, sync.leaves, total, weight).run(total)
        elif schedule is not None:
            try:
                work.backward(total)
                if ahead and schedule.progresses_alone:
                    return self._later(state, start, work, returned, schedule, info)
                done, summary = work.wait(schedule, weighted=weight is not None)
            except BaseException as error:
                schedule.abandon(error)
                raise
            mean = summary.mean.to(total.dtype)
        else:
            mean, divisor = mean_at_once(total, weight, info.axis, local=strategy.hook(info.step) is None)
            done = work.at_once(total, divisor)
        states = tree.unflatten(sync_spec, done.sync_flat)
        finite = None if done.grads is None else all_finite(self, done.grads, info, done.sums)
        if done.grads is not None and finite is False and should_raise(self, state):
            by_place = dict(zip(trained, done.grads, strict=True))
            reduced = [by_place.get(i, x) for i, x in enumerate(leaves)]
            raise not_finite_error(self, state, batch, info, reduced, drawn, loss_scale)
        if done.grads is not None:
            states, buffers = kept_if_skipped(self, finite, state, states, buffers)

        def commit() -> tuple[TrainState, Metrics, Callable[[], None] | None]:
            if done.grads is None:
                params, after = strategy.after_update(done.params, states, info)
                updated = Updated(params, done.opt_state, after, pending)
            else:
                with comm.span("update"):
                    update = replace(work.update(done.grads, finite), may_overwrite=late and self.donate)
                    updated = strategy.update(update, states, info, pending)
            next_sync = SyncState(updated.states, sync.uses, sync.clock, info.step + 1, sync.choice)
            following, metrics = next_state(self, state, updated, buffers, next_sync, Metrics(mean, aux), finite)
            return following, metrics, updated.finish

        updated_early = done.grads is None and schedule is not None
        return self._committed(state, start.seen, in_place, commit, work.invalidated_by if updated_early else None)

    def post_update_hook(self, step: int) -> PostUpdateHook | None:
        """What ranks do with each bucket of parameters after the optimizer, in the step after `step` others.

        None where they do nothing then, or do it only when the optimizer has run on all parameters.
        """
        if self.overlap != "update" or not self.step.strategy.communicates_after_update(step):
            return None
        hook = self.step.strategy.post_update_hook(self.optimizer, step)
        return hook if hook is None or self.step.reduce_dtype is None else hook.cast(self.step.reduce_dtype)

    def _committed(
        self,
        state: TrainState,
        seen: tuple[str, ...],
        in_place: bool,
        commit: Callable[[], tuple[TrainState, Metrics, Callable[[], None] | None]],
        invalidated_by: Callable[[BaseException], None] | None,
    ) -> tuple[TrainState, Metrics]:
        """Commit the step, protected from interrupts.

        If an interrupt comes while tensors are updated in place, the step is finished first. The caller doesn't get its
        result then, so `state` itself becomes the next state. `invalidated_by`: buckets have been updated already.
        """
        finished = None
        try:
            with uninterrupted() if in_place else nullcontext():
                following, metrics, finish = commit()
                with uninterrupted() if finish is not None else nullcontext():
                    if finish is not None:
                        finish()
                    finished = following, metrics
                    if self.donate:
                        hand_over(state, following.unseen(), seen)
        except BaseException as error:
            if finished is None and invalidated_by is not None:
                invalidated_by(error)
            elif finished is not None and self.donate:
                state.become(finished[0])
            raise
        return finished

    def _later(
        self,
        state: TrainState,
        start: StepStart,
        work: BackwardUpdate,
        returned: Outputs,
        schedule: ProcessSchedule,
        info: StepInfo,
    ) -> tuple[TrainState, Metrics]:
        """The next state and metrics of a step that is still pending."""
        loss, summary = returned.loss, schedule.summary
        assert summary is not None
        scale = work.scale(schedule, weighted=isinstance(loss, Weighted))
        total = loss.total if isinstance(loss, Weighted) else loss
        kept = replace(state, _lease=[None])  # it can still be read when the original is donated
        if self.donate:
            hand_over(state, kept, start.seen)
        work = replace(work, state=kept)
        sync = replace(kept.sync_state, step=info.step + 1)
        pending_step = PendingStep(
            work, schedule, scale, sync, None if start.pending_step is None else start.pending_step.stand_in
        )
        # What the step returned mustn't change when the parameters do.
        buffers, aux = unshared((returned.buffers, returned.aux), kept.trained)
        layout = replace(self.step.strategy.layout, strategy=state.layout.strategy)
        others = {"step": state.step + 1, "layout": layout, "loss_scale": kept.loss_scale, "frozen": state.frozen}
        following = TrainState.later(pending_step, buffers=buffers, pending=state.pending, **others)
        return following, Metrics.later(summary, total.dtype, aux)


@checked("donate", "has_aux")
def train_step(
    step: DataParallel,
    optimizer: Optimizer,
    *,
    donate: bool = True,
    guard: Literal["off", "skip", "raise"] = "off",
    overlap: Literal["backward", "update", "step"] = "backward",
    has_aux: bool = False,
    check_every: int | None = None,
    trainable: Trainable = None,
) -> TrainStep:
    """A whole training step: gradients, their reduction, the optimizer, the strategy's work on parameters.

    Args:
        step: a data-parallel step that returns a 0-dim loss or :class:`ltx.Weighted`, or a mapping or dataclass that
            holds it as `loss`; accumulated or not. Or one with ``returns="grads"``, which returns ``(grads, loss)``, as
            :func:`ltx.grad_and_value` does, and what else a step returns after them: DP-SGD, evolution strategies.
            With a Weighted loss its gradients are those of the total.
        optimizer: from :mod:`ltx.optim`.
        donate: update the state's tensors in place, as JAX's buffer donation does; the old state can't be used again.
            Off under transforms.
        guard: what happens to a step whose gradients are NaN or infinite on any rank. "off": no check. "skip":
            parameters, buffers, optimizer state and what hooks carry are as they were, on all ranks alike; the step is
            counted, ``metrics.skipped`` says so, and what a strategy does to parameters besides (averages) it still
            does. "raise": the same NotFiniteError on every rank, which names ranks and leaves; the state may be used
            again. Ranks that share gradients see it without asking one another; others ask at every step. With
            :class:`ltx.DynamicLossScale`, which skips such steps anyway, "raise" raises once the scale has come down
            to 1, where it isn't to blame.
        overlap: "backward": gradients are reduced while the backward pass goes on, and the optimizer runs when all have
            complete. The step commits whole: if anything fails before that, the state is as it was. "update": the
            optimizer runs on each bucket when it is complete, which is faster and not atomic: after a failure in the
            middle a donated state is invalid, and using it raises InvalidStateError. For optimizers that update leaf by
            leaf; refused for others (clipping). Where ranks communicate after the optimizer (ZeRO, Adasum, the
            low-precision ring), it runs and they communicate bucket by bucket during the backward pass, so a failure of
            that invalidates the state too. "step": buckets also complete between steps and during the next forward
            pass, see below.
        has_aux: the step returns ``(loss, aux)``; aux comes back in ``metrics.aux``, where it is this rank's own. With
            ``data_parallel(outputs="mean")`` floating tensors in it are means over ranks, at the price of a message;
            or the step takes the mean of what it wants the mean of, ``return loss, {"accuracy": ltx.pmean(accuracy)}``.
            A mapping or dataclass with an entry `loss`, as models of transformers return, stands for its loss; with
            `has_aux` it is aux as well.
        check_every: before every so many steps, the first included, compare what should be the same on all ranks
            (:func:`ltx.check_replicas`). None: never. In compiled graphs nobody does.
        trainable: which parameters are trained, of those that :meth:`TrainStep.init` wouldn't freeze: a pattern of
            their paths such as ``"head.*"``, a list of such patterns, or a function of a path. None: all.

    Returns:
        A :class:`TrainStep`: ``.init(params, buffers=None) -> TrainState`` copies, and broadcasts from rank 0;
        ``(state, *batch) -> (state, Metrics)``. Every rank calls it with its own batch, by position or by keyword, as
        the step takes it.

    Raises:
        DonatedStateError: the state was donated to an earlier step.
        RankMismatchError: ranks differ in their parameters, or have issued different collectives; before the update.
        WeightError: all weights of a Weighted step are 0; before the update.
        ReplicaDivergedError: ranks have different parameters, with `check_every`; before the step.
        NotFiniteError: (a FloatingPointError) gradients aren't finite, with ``guard="raise"``; before the update.
        InvalidStateError: something failed while a step with overlap="update" or "step" was being applied.
        StepError, StrategyError, OptimError: the pieces don't fit, at once.

    With ``overlap="step"`` a step returns when its backward pass is done. Each bucket completes where the next step
    first uses its parameters, and the optimizer runs there; values are the same, bit for bit, as with the others. No
    pending tensor is visible: reading, flattening, saving, pickling or printing the state waits for all of it, and
    ``metrics.loss`` waits for the loss alone. ltx.shutdown and the end of the process wait too. So:

    * it pays on slow links. Through shared memory nothing progresses while no rank waits, so "step" is "update" there.
    * a step that reads all of its parameters before it begins waits for all of them: a cast of mixed precision does,
      and so does a compiled function, which is noticed at the first such step.
    * an error of the network is raised in the next step, or where the state is read. That state is invalid from then
      on, and every later use raises. Keep checkpoints.
    * a donated state can't be read any more.
    * code that bypasses torch, such as a C++ extension, finds NaN in a parameter that nothing else has used before in
      this step.
    * it is refused for strategies that change parameters between two steps, for dynamic loss scaling, and for a train
      step that is compiled as a whole.

    Example:
        >>> import torch, ltx
        >>> step = ltx.data_parallel(lambda p, x: ((p["w"] * x) ** 2).mean())
        >>> train = ltx.train_step(step, ltx.optim.from_torch(torch.optim.SGD, lr=0.1))
        >>> state = train.init({"w": torch.tensor(1.0)})
        >>> state, metrics = train(state, torch.tensor([1.0, 2.0]))
        >>> metrics.loss, state.params["w"]
        (tensor(2.5000), tensor(0.5000))
    """
    if isinstance(step, DataParallel):
        step = as_loss(step)
    return TrainStep(step, optimizer, donate, guard, overlap, has_aux, check_every, trainable)
