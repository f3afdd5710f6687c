"""Communication state as a value: what a stateful hook carries from one step to the next.

The gradient with respect to the state is its next value, so every transform of torch.func passes it on. Of two hidden
leaves `uses`, whose cotangent is 1 for each use, detects a state that was used twice; `clock`, whose cotangent is
itself plus 1, counts steps where the structure can't.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch

from ltx.core.base import traced, tree
from ltx.core.base.arguments import shown
from ltx.core.base.errors import SyncStateError
from ltx.core.base.private import unwrapped
from ltx.core.gradients.comm_hook import CommHook, states_of
from ltx.core.gradients.planning import Plan, tracked
from ltx.core.gradients.reduction import LeafState
from ltx.typing import Tree


@dataclass(frozen=True, eq=False)
class SyncState:
    """The state of a strategy's communication: a pytree node that the caller holds.

    Attributes:
        leaves: floating tensors by parameter path and name; so the state may be saved, restored and re-bucketed.
        uses: hidden guard, 0-dim; 1 in a state that may be used.
        clock: hidden count of steps since `step` was set, of shape (1,): counts the steps of a compiled graph.
        step: the number of synchronised steps so far, a Python int and part of the structure.
    """

    leaves: dict[str, LeafState]
    uses: torch.Tensor = field(repr=False)
    clock: torch.Tensor = field(repr=False)
    step: int = 0

    @staticmethod
    def new(leaves: dict[str, LeafState]) -> SyncState:
        """A new state. Its guards stay on the CPU, where every step reads them."""
        # Float64 counts to 2^53. It isn't 0-dim: Dynamo traces a graph twice that has such a float64 tensor on the CPU.
        return SyncState(leaves, torch.ones((), device="cpu"), torch.zeros(1, dtype=torch.float64, device="cpu"))

    def checked_step(self) -> int:
        """The number of synchronised steps so far; raises unless the state was used exactly once."""
        if traced.recording():
            return operator.index(self.step)  # a constant, since Dynamo takes a number that has changed for a variable
        uses, clock = _numbers(self.uses), _numbers(self.clock)
        if {*uses} != {1.0}:
            raise SyncStateError(
                f"this communication state was used {max(uses):g} times in one loss, or its gradients were "
                "accumulated. Its next value is its gradient, so it must go through exactly one call of the step; for "
                "several backward passes take the state that each one gives (ltx.grad_and_value), or set .grad to "
                "None between them."
            )
        return self.step + int(max(clock))

    def clock_read(self) -> SyncState:
        """This state, with the steps of the clock moved to the structure's count."""
        return replace(self, step=self.step + int(max(_numbers(self.clock))), clock=torch.zeros_like(self.clock))

    def advanced(self, leaves: dict[str, LeafState] | None = None) -> SyncState:
        """The state after one more step, with other `leaves`, if given."""
        leaves = self.leaves if leaves is None else leaves
        return SyncState(leaves, self.uses, torch.zeros_like(self.clock), self.checked_step() + 1)


def check_state(state: Any) -> None:
    if not isinstance(state, SyncState):
        raise SyncStateError(f"sync_state must be what step.init(params) or the last step gave, got {shown(state)}.")


def plain_values(x: torch.Tensor) -> torch.Tensor:
    """`x`, detached and without the wrappers of torch.func's levels."""
    return unwrapped(x).detach()


def _numbers(x: torch.Tensor) -> list[float]:
    return plain_values(x).flatten().tolist()


tree.register_node(
    SyncState,
    lambda s: ((s.leaves, s.uses, s.clock), (s.step,)),
    lambda parts, static: SyncState(*parts, *static),
    names=("leaves", "uses", "clock"),
)


class Synced(NamedTuple):
    """Parameters together with the communication state, which a step accepts in place of its parameters.

    ``torch.func.grad(step)(ltx.Synced(params, state), batch)`` returns ``Synced(gradients, next state)``. Most code
    uses :func:`ltx.grad_and_value` or :func:`ltx.train_step`, which do this inside.

    Attributes:
        params: the parameters.
        sync_state: from ``step.init(params)`` or from the step before.
    """

    params: Tree
    sync_state: Any


def states_of_leaves(
    state: SyncState | None, paths: Callable[[], Sequence[str]], wanted: list[int], hook: CommHook, returned: bool
) -> list[LeafState]:
    """The hook's part of each wanted leaf's state. `returned`: the next state isn't returned as a cotangent."""
    if not hook.state_names:
        return [{}] * len(wanted)
    assert state is not None
    found = [(path, states_of(hook, state.leaves.get(path, {}))) for path in map(paths().__getitem__, wanted)]
    for path, own in () if returned else found:
        if lost := [name for name, tensor in own.items() if not tracked(tensor)]:
            raise SyncStateError(
                f"leaf {path!r}: its communication state {lost[0]!r} isn't differentiated, so its next value "
                "would be lost. Differentiate with respect to ltx.Synced(params, state) as a whole, or use "
                "ltx.grad_and_value(step)(params, batch, sync_state=state)."
            )
    return [own for _, own in found]


def kept_beside(
    state: SyncState | None, wanted: set[str], names: tuple[str, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tensor, next value) for the state's tensors that aren't in a bucket; buckets have `names` of `wanted` paths."""
    if state is None:
        return []
    rest = [
        (tensor, tensor.detach())
        for path, entries in state.leaves.items()
        for name, tensor in entries.items()
        if path not in wanted or name not in names
    ]
    return [(state.uses, torch.ones_like(state.uses)), (state.clock, state.clock.detach() + 1), *rest]


def states_after(
    plan: Plan, states: dict[int, LeafState], before: dict[str, LeafState], params: Tree
) -> dict[str, LeafState]:
    """The next communication state by path: `states` of the plan's leaves, and the rest unchanged from `before`."""
    entries = {path: dict(entry) for path, entry in before.items()}
    if plan.keeps:
        paths = tree.leaf_paths(params)
        for member, state in states.items():
            if state:
                entries[paths[member]].update(state)
    return cast(dict[str, LeafState], tree.detached(entries)) if entries else {}
