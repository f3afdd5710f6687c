"""A training step: one list of stages, :meth:`Step.run`, and two executors of it.

:class:`ltx.core.training.eager_step.EagerStep` communicates while the backward pass runs, and may reuse the state's
memory. :class:`ltx.core.training.pure_step.PureStep` has no side effects, for transforms and compiled graphs. They
differ in when answers come, and in who owns memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ltx.core import comm
from ltx.core.base import traced, tree
from ltx.core.optim.base import Update, with_loss
from ltx.core.training.backward import BackwardResult
from ltx.core.training.guard import (
    all_finite,
    checks_finite,
    kept_if_skipped,
    loss_scale_of,
    may_raise,
    next_state,
    not_finite_error,
    should_raise,
)
from ltx.core.training.outputs import Batch, Outputs, arguments_of, outputs_of
from ltx.core.training.settings import TrainSettings, check_weighted
from ltx.core.training.train_state import Metrics, Rates, TrainState, torch_states
from ltx.core.transforms.run import CallOptions, Run, Weighted
from ltx.core.transforms.strategy_update import StepInfo, Updated, check_next, check_updated
from ltx.core.transforms.sync_state import SyncState
from ltx.typing import Tree


@dataclass(eq=False)
class Step:
    """One call of a train step.

    Attributes:
        train: the train step. state, batch: its arguments.
        info: the number of the step, and the ranks.
        pending: the strategy's communication under way, from its `begin`.
        params: the trained parameters. leaves, spec: their leaves and structure.
    """

    detached: ClassVar[bool] = True  # buffers and aux have no derivative

    train: TrainSettings
    state: TrainState
    batch: Batch
    info: StepInfo
    pending: Any
    params: Tree
    leaves: list[torch.Tensor]
    spec: Any

    def run(self) -> tuple[TrainState, Metrics]:
        """The stages, in order: differentiate, check, update, commit."""
        train, state = self.train, self.state
        drawn = torch_states() if may_raise(train) else {}
        done, loss, buffers, aux = self.differentiate()
        finite = self.finite(done)
        if self.knows_bad(finite) and should_raise(train, state):
            grads, scale = done.grads or [], loss_scale_of(train, state)
            raise not_finite_error(train, state, self.batch, self.info, grads, drawn, scale)
        states = done.states
        if finite is not None:
            states, buffers = kept_if_skipped(train, finite, state, states, buffers)
        try:
            with self.uninterrupted():
                updated = self.update(done, states, finite, loss)
                sync, metrics = self.next_sync(updated), Metrics(loss, aux)
                if not traced.recording():
                    found = train.step.strategy.rates(train.optimizer, state.held("opt_state"), self.info.axis)
                    metrics = Metrics(loss, aux, rates=Rates(found))
                following, metrics = next_state(train, state, updated, buffers, sync, metrics, finite)
                self.commit(updated, following, metrics)
        except BaseException as error:
            self.failed(done, error)
            raise
        return following, metrics

    # --- stages in which executors differ ----------------------------------------------------------------------------

    def differentiate(self) -> tuple[BackwardResult, torch.Tensor, Tree, Any]:
        """The forward and the backward pass: (reduced gradients, the mean loss, buffers, aux)."""
        raise NotImplementedError

    def finite(self, done: BackwardResult) -> bool | torch.Tensor | None:
        """Whether all gradients of all ranks are finite; None if nobody asks. A tensor where the host doesn't wait."""
        if done.grads is None or not checks_finite(self.train):
            return None
        return all_finite(self.train, done.grads, self.info, done.sums)

    def knows_bad(self, finite: bool | torch.Tensor | None) -> bool:
        """Whether the host knows that gradients aren't finite."""
        return finite is False

    def uninterrupted(self) -> AbstractContextManager[None]:
        """Surrounds what mustn't be done by halves."""
        raise NotImplementedError

    def update_of(self, done: BackwardResult, grads: Tree, opt_state: Tree, finite: Any) -> Update:
        """The optimizer's part of the step."""
        raise NotImplementedError

    def next_sync(self, updated: Updated) -> SyncState:
        """The communication state after this step."""
        raise NotImplementedError

    def commit(self, updated: Updated, following: TrainState, metrics: Metrics) -> None:
        """Give the memory of the state to the `following` one, if it is reused."""

    def failed(self, done: BackwardResult, error: BaseException) -> None:
        """Say what has become of the state, as something failed in the update or after it."""

    # --- what they share ---------------------------------------------------------------------------------------------

    def called(self, given: Tree, options: CallOptions, calls: Any = None) -> tuple[Run, Outputs]:
        """The call of the user's step on the parameters `given`. `calls`: a context that records functional calls."""
        buffers = self.state.held("buffers")
        arguments = arguments_of(given, buffers, self.batch)
        with calls or nullcontext():
            run = self.train.step.run(arguments, self.batch.named, options)
        outputs = outputs_of(run, buffers, self.train.has_aux, self.detached)
        if isinstance(outputs.loss, Weighted):
            check_weighted(self.train.step.strategy, self.info.step)
        return run, outputs

    def update(self, done: BackwardResult, states: Any, finite: Any, loss: torch.Tensor) -> Updated:
        """Run the optimizer, unless it has run bucket by bucket, and the strategy's part."""
        strategy, state = self.train.step.strategy, self.state
        if done.grads is None:
            got = strategy.after_update(done.params, states, self.info)
            params, after = check_next(strategy, "after_update", got, done.params, states)
            return Updated(params, done.opt_state, after, self.pending)
        with comm.span("update"):
            opt_state = state.held("opt_state")
            if state.sees_loss:
                opt_state = with_loss(opt_state, loss)
            update = self.update_of(done, tree.unflatten(self.spec, done.grads), opt_state, finite)
            return check_updated(strategy, strategy.update(update, states, self.info, self.pending), update, states)
