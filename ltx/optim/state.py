"""The state of a torch optimizer, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from ltx.tree import register_node
from ltx.typing import Tree


@dataclass(frozen=True)
class TorchState:
    """State of :func:`from_torch`'s optimizers: a pytree node for optree and for ``torch.func`` alike.

    Attributes:
        per_param: the tree of the parameters with, in place of each, a dict of that parameter's own state tensors under
            torch's names (``exp_avg``, ``exp_avg_sq``, ``step``, ...). Its structure is the same before and after
            every update.
        count: the number of updates done. A Python integer that belongs to the tree's structure, not to its leaves, so
            that a schedule can read it under every transformation.
    """

    per_param: Tree
    count: int = 0


register_node(
    TorchState,
    lambda state: ((state.per_param,), state.count),
    lambda children, count: TorchState(children[0], count),
    ("per_param",),
)
