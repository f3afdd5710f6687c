"""Optimizers made of others: chains, and transformations of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ltx.errors import OptimError
from ltx.extend import LeafState, Optimizer, OptimizerOffers, brief, optimizers, tree
from ltx.typing import Tree

States = tuple[Tree, ...]
Tensors = list[Tensor]


class LeafPart(dict[str, Tensor]):
    """A leaf's part of the state of an optimizer that wraps others, with the inner optimizers' parts of this leaf."""

    def __init__(self, *parts: dict[str, Tensor], label: str = "") -> None:
        super().__init__({name: x for part in parts for name, x in part.items()})
        self.parts = parts  # the inner optimizers' parts; they share this dict's tensors
        self.label = label  # in a partition: the label of the leaf's optimizer


class LeafTransform(Optimizer):
    """A gradient transformation. A subclass writes :meth:`update_leaves`, and :meth:`init` if it has state."""

    leafwise: ClassVar[bool] = True
    moves_params: ClassVar[bool] = False

    def init(self, params: Tree) -> Tree:
        return ()

    def update(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        tree.check_tensors(grads, "grads")
        leaves, spec = tree.flatten(grads)
        updates = self.update_leaves(leaves, self.leaf_states(state, grads), leaves, state)
        return spec.unflatten(updates), optimizers.advanced(state)

    def leaf_states(self, state: Tree, params: Tree) -> list[LeafState]:
        return [{} for _ in tree.flatten(params)[0]]


@dataclass(frozen=True, repr=False)
class Identity(LeafTransform):
    """Passes gradients on; made by :func:`identity`."""

    elementwise: ClassVar[bool] = True

    def update_leaves(self, grads: Tensors, states: list[LeafState], params: Tensors, state: Tree) -> Tensors:
        return grads

    def __repr__(self) -> str:
        return "identity()"


def identity() -> Optimizer:
    """The transformation that passes gradients on unchanged: the unit of :func:`chain`.

    >>> identity()
    identity()
    """
    return Identity()


@dataclass(frozen=True, repr=False)
class Chain(Optimizer):
    """Two or more transformations in sequence; made by :func:`chain`. Its state is the tuple of its members' states."""

    members: tuple[Optimizer, ...]

    @property
    def offers(self) -> OptimizerOffers:
        each = [member.offers for member in self.members]
        return OptimizerOffers(
            all(one.elementwise for one in each),
            all(one.leafwise for one in each),
            each[-1].moves_params,
            next((one.strategy for one in each if one.strategy is not None), None),
        )

    def init(self, params: Tree) -> States:
        return tuple(member.init(params) for member in self.members)

    def update(self, grads: Tree, state: States, params: Tree, *, donate: bool = False) -> tuple[Tree, States]:
        return self._run("update", grads, state, params, donate)

    def apply(self, grads: Tree, state: States, params: Tree, *, donate: bool = False) -> tuple[Tree, States]:
        return self._run("apply", grads, state, params, donate)

    def evaluated(self, params: Tree, state: States) -> Tree:
        self._check(state)
        for member, own in zip(self.members, state, strict=True):
            params = member.evaluated(params, own)
        return params

    def _times_lr(self, factor: float) -> Chain | None:
        last = optimizers.times_lr(self.members[-1], factor)
        return None if last is None else Chain((*self.members[:-1], last))

    def _rates(self, state: Tree) -> Any:
        return self.members[-1]._rates(state[-1]) if isinstance(state, tuple) and state else None

    def _unless(self, skip: Tensor, params: Sequence[Tensor]) -> Chain:
        return Chain(tuple(optimizers.unless(member, skip, params) for member in self.members))

    def leaf_states(self, state: States, params: Tree) -> list[LeafState]:
        self._check(state)
        each = [member.leaf_states(own, params) for member, own in zip(self.members, state, strict=True)]
        return [LeafPart(*parts) for parts in zip(*each, strict=True)]

    def update_leaves(self, grads: Tensors, states: list[LeafState], params: Tensors, state: States) -> Tensors | None:
        updates: Tensors | None = grads
        for i, member in enumerate(self.members):
            assert updates is not None  # only the last member may return None
            own = [part.parts[i] for part in cast(list[LeafPart], states)]
            updates = member.update_leaves(updates, own, params, state[i])
        return updates

    def _check(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != len(self.members):
            raise OptimError(f"{self} expected a state of {len(self.members)} parts, one a member, got {brief(state)}.")

    def _run(self, method: str, grads: Tree, state: States, params: Tree, donate: bool) -> tuple[Tree, States]:
        """Pass the gradients through all members but the last, then call `method` of the last member."""
        self._check(state)
        front = []
        for member, own in zip(self.members[:-1], state, strict=False):
            grads, own = member.update(grads, own, params, donate=donate)
            front.append(own)
        result, last = getattr(self.members[-1], method)(grads, state[-1], params, donate=donate)
        return result, (*front, last)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.members))})"


def chain(*transforms: Optimizer) -> Optimizer:
    """`transforms` one after the other: each gets the gradients that the previous one returned.

    Chains are flattened and identities dropped, so ``chain(a, chain(b, c)) == chain(a, b, c)``, ``chain(a, identity())
    == a`` and ``chain() == identity()``. With ``donate=True`` ``apply`` updates in place if the last member does. The
    chain works leaf by leaf, which ``overlap="update"`` needs, if all members do. It is the counterpart of
    ``optax.chain`` and ``torchopt.chain``.

    >>> import torch, ltx
    >>> optimizer = chain(ltx.optim.clip_by_global_norm(1.0), ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
    >>> optimizer
    chain(clip_by_global_norm(1.0), from_torch(torch.optim.SGD, lr=0.5))
    >>> params = {"w": torch.zeros(2)}
    >>> params, state = optimizer.apply({"w": torch.tensor([3.0, 4.0])}, optimizer.init(params), params)
    >>> params, state[0].norm
    ({'w': tensor([-0.3000, -0.4000])}, tensor(5.))

    Raises:
        ltx.errors.OptimError: if an argument isn't an optimizer or transformation, or if an optimizer that updates
            parameters (:func:`from_torch`) isn't the last one: a transformation after it would get no gradients.
    """
    members: list[Optimizer] = []
    for position, transform in enumerate(transforms):
        if not isinstance(transform, Optimizer):
            cls = transform if isinstance(transform, type) else type(transform)
            wrap = f" Wrap the class: from_torch({cls.__name__}, ...)."
            hint = wrap if issubclass(cls, torch.optim.Optimizer) else ""
            raise OptimError(f"chain expected optimizers, but argument {position} is {brief(transform)}.{hint}")
        members += transform.members if isinstance(transform, Chain) else (transform,)
    members = [member for member in members if not isinstance(member, Identity)]
    for member in members[:-1]:
        if member.offers.moves_params:
            raise OptimError(
                f"{member} must come last in a chain, before it only transformations of gradients: it updates the "
                f"parameters, so {members[-1]} after it would not get gradients."
            )
    return Identity() if not members else members[0] if len(members) == 1 else Chain(tuple(members))


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The members of a chain; any other optimizer is its own only member."""
    return optimizer.members if isinstance(optimizer, Chain) else (optimizer,)


def with_members(optimizer: Optimizer, members: Sequence[Optimizer]) -> Optimizer:
    """`optimizer` with other members, as many as :func:`members_of` returns."""
    return replace(optimizer, members=tuple(members)) if isinstance(optimizer, Chain) else members[0]
