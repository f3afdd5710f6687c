"""An optimizer that changes nothing, for steps on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ltx import tree
from ltx.errors import LtxError
from ltx.optim import Optimizer
from ltx.strategies import Strategy
from ltx.typing import Tree


@dataclass(frozen=True)
class Still(Optimizer):
    """An optimizer that leaves everything as it is: on shapes, what any other does."""

    @property
    def elementwise(self) -> bool:
        return True

    @property
    def leafwise(self) -> bool:
        return True

    def init(self, params: Tree) -> Tree:
        return {}

    def update(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        return tree.map(torch.zeros_like, params), state

    def apply(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        return params, state

    def leaf_states(self, state: Tree, params: Tree) -> list[dict[str, torch.Tensor]]:
        return [{} for _ in tree.flatten(params)[0]]

    def apply_leaves(self, grads: Any, states: Any, params: Any, count: int) -> None:
        pass

    def advance(self, state: Tree) -> Tree:
        return state


def stand_in(strategy: Strategy, optimizer: Optimizer) -> Optimizer:
    """:class:`Still` for `optimizer`, unless the strategy insists on one that it knows."""
    try:
        strategy.check_optimizer(Still())
    except LtxError:
        return optimizer
    return Still()
