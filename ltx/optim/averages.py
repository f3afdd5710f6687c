"""A moving average of the parameters, around an optimizer and in its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor

from ltx.errors import OptimError
from ltx.extend import LeafState, Optimizer, OptimizerOffers, arguments, brief, collectives, optimizers, tree
from ltx.typing import Tree


class EmaState(NamedTuple):
    """State of :func:`ema`.

    Attributes:
        inner: the state of the optimizer whose parameters are averaged.
        average: the tree of the parameters, with their averages.
    """

    inner: Tree
    average: Tree


@dataclass(frozen=True, repr=False)
class Ema(Optimizer):
    """Made by :func:`ema`."""

    optimizer: Optimizer
    decay: float
    # set for one update by `unless`: if it is true, the average stays
    _skip: Tensor | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        arguments.check_fields(self, OptimError, "decay")
        if not 0 <= self.decay <= 1:
            raise OptimError(f"ema: decay must be from 0 to 1, got {brief(self.decay)}.")

    @property
    def offers(self) -> OptimizerOffers:
        # a transform after it would change what was averaged
        return replace(self.optimizer.offers, elementwise=False, moves_params=True)

    def init(self, params: Tree) -> EmaState:
        tree.check_tensors(params, "params")
        wide = collectives.wide
        return EmaState(self.optimizer.init(params), tree.map(lambda p: p.to(wide(p.dtype), copy=True), params))

    def update(self, grads: Tree, state: EmaState, params: Tree, *, donate: bool = False) -> tuple[Tree, EmaState]:
        optimizers.check_state(self, state, EmaState)
        updates, inner = self.optimizer.update(grads, state.inner, params, donate=donate)
        new_params = optimizers.apply_updates(params, updates)
        return updates, EmaState(inner, self._averaged(state.average, new_params, donate))

    def apply(self, grads: Tree, state: EmaState, params: Tree, *, donate: bool = False) -> tuple[Tree, EmaState]:
        optimizers.check_state(self, state, EmaState)
        new_params, inner = self.optimizer.apply(grads, state.inner, params, donate=donate)
        return new_params, EmaState(inner, self._averaged(state.average, new_params, donate))

    def _rates(self, state: EmaState) -> Any:
        return self.optimizer._rates(state.inner) if isinstance(state, EmaState) else None

    def _unless(self, skip: Tensor, params: Sequence[Tensor]) -> Ema:
        conditional = Ema(optimizers.unless(self.optimizer, skip, params), self.decay)
        object.__setattr__(conditional, "_skip", skip)
        return conditional

    def leaf_states(self, state: EmaState, params: Tree) -> list[LeafState]:
        averages = optimizers.leaves_like(tree.flatten(params)[1], state.average, "the average")
        inner = self.optimizer.leaf_states(state.inner, params)
        return [optimizers.LeafPart(part, average=average) for part, average in zip(inner, averages, strict=True)]

    def update_leaves(
        self, grads: list[Tensor], states: list[LeafState], params: list[Tensor], state: EmaState
    ) -> None:
        inner = [part.inner for part in cast(list[optimizers.LeafPart], states)]
        optimizers.apply_leaves(self.optimizer, grads, inner, params, state.inner)
        self._average_in_place([own["average"] for own in states], params)

    def _averaged(self, average: Tree, params: Tree, donate: bool) -> Tree:
        leaves, spec = tree.flatten(average)
        others = optimizers.leaves_like(spec, params, "params")
        if donate and optimizers.donated(others):
            self._average_in_place(leaves, others)
            return average
        return spec.unflatten([self._next(old, new) for old, new in zip(leaves, others, strict=True)])

    @torch.no_grad()
    def _average_in_place(self, averages: list[Tensor], params: list[Tensor]) -> None:
        if self._skip is None:
            torch._foreach_lerp_(
                averages, [p.to(a.dtype) for a, p in zip(averages, params, strict=True)], 1 - self.decay
            )
            return
        for average, param in zip(averages, params, strict=True):
            average.copy_(self._next(average, param))

    def _next(self, average: Tensor, param: Tensor) -> Tensor:
        moved = average.lerp(param.to(average.dtype), 1 - self.decay)
        # In a skipped update the parameter stays, but `lerp` would still move the average towards it.
        return moved if self._skip is None else torch.where(self._skip.to(average.device), average, moved)

    def __repr__(self) -> str:
        return f"ema({self.optimizer!r}, {self.decay})"


def ema(optimizer: Optimizer, decay: float) -> Optimizer:
    """`optimizer`, with an exponential moving average of the parameters in its state.

    After each update ``average <- decay * average + (1 - decay) * params``; it begins as a copy of the parameters that
    `init` gets. torch's ``AveragedModel`` with ``get_ema_multi_avg_fn`` computes the same if its ``update_parameters``,
    which at first copies, is called before the first step too. :func:`averaged` reads it. Averages are in float32 or
    wider, as 16 bits would round such small changes away. Nothing is communicated: where ranks have the same
    parameters, they have the same averages. ``overlap="update"`` works if it works with `optimizer`.

    >>> import torch, ltx
    >>> sgd = ema(ltx.optim.from_torch(torch.optim.SGD, lr=1.0), 0.75)
    >>> params = {"w": torch.zeros(1)}
    >>> params, state = sgd.apply({"w": torch.tensor([-4.0])}, sgd.init(params), params)
    >>> params, averaged(state)
    ({'w': tensor([4.])}, {'w': tensor([1.])})

    Args:
        optimizer: the whole optimizer, clipping included: ``ema(chain(clip_by_global_norm(1.0), adamw), 0.999)``.
        decay: from 0 (the last parameters) to 1 (the first parameters).

    Raises:
        ltx.errors.OptimError: for arguments out of range. :class:`ltx.ZeroStrategy` raises it too: its ranks have no
            whole parameters to average.
    """
    if not isinstance(optimizer, Optimizer):
        raise OptimError(f"ema expected an optimizer, got {brief(optimizer)}.")
    return Ema(optimizer, decay)


def averaged(state: Tree) -> Tree:
    """The averaged parameters in an optimizer's state (``train_state.opt_state``) that :func:`ema` has made.

    The tensors are the state's own, which the next donated step overwrites: copy them, for example into a module with
    ``ltx.to_module(module, averaged(...))``. If each group of a :func:`ltx.optim.partition` has its own average, they
    are joined to one tree, with None for frozen parameters.

    Raises:
        ltx.errors.OptimError: `state` has no average, or some groups of a partition have none.

    Example:
        >>> import torch, ltx
        >>> ltx.optim.averaged(ltx.optim.ema(ltx.optim.from_torch(torch.optim.SGD), decay=0.9).init(torch.ones(2)))
        tensor([1., 1.])
    """
    first, *others = [node.average for node in optimizers.all_of(state, EmaState)] or [None]
    if first is None:
        raise OptimError("averaged: this state holds no average. Train with ltx.optim.ema(optimizer, decay).")
    try:
        whole = reduce(tree.filled, others, first)
    except ValueError as error:
        raise OptimError(
            f"averaged: this state holds {1 + len(others)} averages, which aren't of groups of one tree: {error} Give "
            "the part of the state that holds the one that is wanted."
        ) from None
    if tree.leaf_paths(whole) != tree.leaf_paths(whole, with_none=True) and (without := _groups_without(state)):
        raise OptimError(
            f"averaged: the parameters of {' and '.join(map(repr, without))} have no average, while those of other "
            "groups do. Train with ema(partition(...), decay), which averages all, or with ema in each group; "
            "averaged(state[label]) is the average of one group, with None in the places of the others'."
        )
    return whole


def _groups_without(state: Tree) -> list[str]:
    """The labels of a partition's groups without an average, if other groups have one."""

    def labels(node: Any) -> list[str]:
        groups = node if type(node) is dict else {}
        absent = [key for key, part in groups.items() if not optimizers.all_of(part, EmaState)]
        return absent if len(absent) < len(groups) else []

    def is_leaf(node: Any) -> bool:
        return isinstance(node, EmaState | optimizers.TorchState) or bool(labels(node))

    nodes = optree.tree_leaves(state, is_leaf=is_leaf)
    return [label for node in nodes for label in labels(node)]
