"""Adasum in delta form: parameters go by the adaptive sum of what each rank's optimizer would add.

Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ltx import hooks, tree
from ltx.optim import Optimizer
from ltx.optim.chain import Chain
from ltx.optim.from_torch import TorchOptimizer
from ltx.strategies.base import Strategy
from ltx.strategies.late import may_be_written_to
from ltx.strategies.update import Moment, States, Update, Updated
from ltx.sync.reduction import LeafState, Reduction, Share

#: Where a parameter was before its move.
START = "start"


@dataclass(frozen=True)
class _AdasumOfWaysBack(hooks.Adasum):
    """The adaptive sum of the ways back: from parameters to where their states say that they were.

    It is that of the moves negated, to the bit, and packing takes one pass over both.
    """

    @property
    def state_names(self) -> tuple[str, ...]:
        return (START,)

    def carried(self, state: LeafState, axis_size: int) -> torch.Tensor:
        return state[START]

    def scale(self, axis_size: int) -> float:
        return -1.0

    def reduce(self, share: Share) -> Reduction:
        total, _ = yield from super().reduce(share)
        return total, ()


def _gives_differences(optimizer: Optimizer) -> bool:
    """Whether its updates are differences of the parameters that it gives."""
    return isinstance(optimizer.members[-1] if isinstance(optimizer, Chain) else optimizer, TorchOptimizer)


def moved_together(
    strategy: Strategy, short: torch.dtype | None, update: Update, states: States, at: Moment
) -> Updated:
    """Parameters moved by the adaptive sum of what this rank's optimizer would add, and its next state.

    `short`: the dtype that moves travel in, if not their own; `states`: the next communication state.
    """
    if at.axis.size == 1 or update.finite is False:
        return Updated(*update.apply(), states)
    starts, spec = tree.flatten(update.params)
    if _gives_differences(update.optimizer):
        # The differences are formed while they are packed.
        given, opt_state = update.optimizer.apply(update.grads, update.opt_state, update.params)
        combine: hooks.CommHook = _AdasumOfWaysBack(short)
        begun: list[LeafState] = [{START: start} for start in starts]
        sign = -1
    else:
        given, opt_state = update.optimizer.update(update.grads, update.opt_state, update.params)
        combine, begun, sign = hooks.Adasum(short), [], 1
    paths = tree.leaf_paths(update.params)
    moves, _ = strategy.exchange(combine, tree.flatten(given)[0], paths, at, begun).land()
    if update.gives and may_be_written_to(starts, (opt_state, states)):

        def finish() -> None:
            with torch.no_grad():
                torch._foreach_add_(starts, moves, alpha=sign)

        return Updated(update.params, opt_state, states, finish=finish)
    moved = tree.unflatten(spec, [torch.add(p, move, alpha=sign) for p, move in zip(starts, moves, strict=True)])
    return Updated(*update.if_finite((moved, opt_state), (update.params, update.opt_state)), states)
