"""How steps overlap their communication: when a step's buckets are applied, and what the next step begins with.

Each value of ``train_step(overlap=...)`` is a row of :data:`OVERLAP_POLICIES`. Where they differ a step asks its row,
so another way to overlap is another row, and what it does is said here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ltx import tree
from ltx.arguments import brief
from ltx.errors import StrategyError, UnsupportedError
from ltx.optim import Optimizer
from ltx.training.completion import CollectGradients, Completion, UpdateBuckets, scale_of
from ltx.training.pending_step import PendingStep
from ltx.transforms.data_parallel import DataParallel
from ltx.transforms.sync_state import SyncState

if TYPE_CHECKING:
    import torch

    from ltx.gradients.process_schedule import ProcessSchedule
    from ltx.training.backward import Backward
    from ltx.training.train_state import TrainState


@dataclass(frozen=True)
class StepStart:
    """What a step begins with: the state's parameters and communication state, or stand-ins for them.

    Attributes:
        leaves, spec: the parameters.
        sync: the communication state; with a pending step, its leaves are those of a step before.
        pending_step: what `leaves` wait for; None if they are all there.
    """

    leaves: list[torch.Tensor]
    spec: Any
    sync: SyncState
    pending_step: PendingStep | None


@dataclass(frozen=True)
class OverlapPolicy:
    """One way to overlap: a step asks it where the ways differ.

    Attributes:
        name: what the user says.
        by_bucket: the optimizer runs on each bucket as soon as that is complete. So a step doesn't commit whole.
        next_forward: the step returns when its backward pass is over, and buckets complete where the next forward pass
            first uses their parameters.
    """

    name: str
    by_bucket: bool
    next_forward: bool

    def check(self, step: DataParallel, optimizer: Optimizer, guard: str) -> None:
        """Raise unless a step of these pieces can overlap its communication this far."""
        if not self.by_bucket:
            return
        strategy, said = step.strategy, f'overlap="{self.name}" applies the optimizer bucket by bucket'
        if not strategy.updates_in_buckets:
            raise StrategyError(
                f"{said}, and {type(strategy).__name__} does its part on all parameters together. Use "
                'overlap="backward".'
            )
        if self.next_forward and strategy.communicates_besides:
            raise StrategyError(
                f"{said}, during the next step, and {type(strategy).__name__} does something with the parameters in "
                'between. Use overlap="update".'
            )
        if not optimizer.leafwise:
            raise StrategyError(
                f'{said}, before other gradients are complete; {optimizer!r} needs all of them. Use overlap="backward".'
            )
        asks = None if step.precision is None else step.precision.dynamic
        asked = f'guard="{guard}"' if guard != "off" else repr(asks) if asks is not None else ""
        if asked:
            raise StrategyError(
                f"{said}, before it is known whether all gradients are finite, which {asked} asks. Use "
                'overlap="backward".'
            )

    def check_graph(self) -> None:
        """Raise unless a compiled graph can hold the whole step."""
        if self.next_forward:
            raise UnsupportedError(
                f'overlap="{self.name}" leaves reductions under way between two steps, which a compiled graph can\'t '
                "hold. Compile the step inside: ltx.data_parallel(torch.compile(f), strategy)."
            )

    def check_placed(self) -> None:
        """Raise unless parameters may be DTensors."""
        if self.next_forward:
            raise UnsupportedError(
                f'train_step: overlap="{self.name}" completes parameters where they are first used, and parameters '
                "that are DTensors are used when they are put together, before the step begins. Use "
                'overlap="update".'
            )

    def start(self, state: TrainState, fn: Any) -> StepStart:
        """The start of a step `fn` on `state`: stand-ins where buckets may complete in `fn`, else complete tensors."""
        pending_step = cast("PendingStep | None", state.pending_step)
        if pending_step is not None and self.next_forward and pending_step.may_complete_in(fn):
            return StepStart(pending_step.stand_ins(), pending_step.spec, pending_step.sync, pending_step)
        leaves, spec = tree.flatten(state.trained)
        return StepStart(leaves, spec, state.sync_state, None)

    def completion(self, work: Backward, schedule: ProcessSchedule, weighted: bool) -> Completion | None:
        """What is done with the buckets before the step returns; None if they stay pending."""
        if self.next_forward and schedule.progresses_alone:
            return None
        scale = scale_of(work, schedule, weighted)
        return UpdateBuckets(work, schedule, scale) if self.by_bucket else CollectGradients(work, schedule, scale)


OVERLAP_POLICIES = {
    policy.name: policy
    for policy in (
        OverlapPolicy("backward", by_bucket=False, next_forward=False),
        OverlapPolicy("update", by_bucket=True, next_forward=False),
        OverlapPolicy("step", by_bucket=True, next_forward=True),
    )
}


def policy_called(name: Any) -> OverlapPolicy:
    """The row of a name.

    Raises:
        StrategyError: there is none.
    """
    if not isinstance(name, str) or name not in OVERLAP_POLICIES:
        raise StrategyError(f'overlap must be "backward", "update" or "step", got {brief(name)}.')
    return OVERLAP_POLICIES[name]
