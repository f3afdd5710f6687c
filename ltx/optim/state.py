"""The state of a torch optimizer, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import optree

from ltx.tree import flatten, register_node
from ltx.typing import Tree

T = TypeVar("T")


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


def first_of(state: Tree, kind: type[T]) -> T | None:
    """The first node of a class in the state of an optimizer; not within a TorchState, which may hold hundreds."""
    try:
        nodes = optree.tree_leaves(state, is_leaf=lambda node: isinstance(node, kind | TorchState))
    except RecursionError:
        flatten(state)  # says so if it is the tree's fault
        raise
    return next((node for node in nodes if isinstance(node, kind)), None)
