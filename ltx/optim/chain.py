"""Gradient transformations in sequence, ending in an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ltx.arguments import brief
from ltx.errors import OptimError
from ltx.optim.base import LeafPart, Optimizer
from ltx.tree import flatten
from ltx.typing import Tree


@dataclass(frozen=True, repr=False)
class Identity(Optimizer):
    """Passes gradients on; made by :func:`identity`."""

    @property
    def elementwise(self) -> bool:
        return True

    @property
    def leafwise(self) -> bool:
        return True

    def init(self, params: Tree) -> Tree:
        return ()

    def update(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        return grads, state

    def leaf_states(self, state: Tree, params: Tree) -> list[dict[str, Tensor]]:
        return [{} for _ in flatten(params)[0]]

    def transform_leaves(
        self, grads: list[Tensor], states: list[dict[str, Tensor]], params: list[Tensor], count: int
    ) -> list[Tensor]:
        return grads

    def advance(self, state: Tree) -> Tree:
        return state

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
    """Two or more transformations in sequence; made by :func:`chain`. Its state is the tuple of theirs."""

    members: tuple[Optimizer, ...]

    @property
    def elementwise(self) -> bool:
        return all(member.elementwise for member in self.members)

    @property
    def leafwise(self) -> bool:
        return all(member.leafwise for member in self.members)

    @property
    def moves_params(self) -> bool:
        return self.members[-1].moves_params

    @property
    def strategy(self) -> str | None:
        return next((name for member in self.members if (name := member.strategy) is not None), None)

    def init(self, params: Tree) -> tuple[Tree, ...]:
        return tuple(member.init(params) for member in self.members)

    def update(
        self, grads: Tree, state: tuple[Tree, ...], params: Tree, *, donate: bool = False
    ) -> tuple[Tree, tuple[Tree, ...]]:
        grads, front = self._transform(grads, state, params, donate)
        updates, last = self.members[-1].update(grads, state[-1], params, donate=donate)
        return updates, (*front, last)

    def apply(
        self, grads: Tree, state: tuple[Tree, ...], params: Tree, *, donate: bool = False
    ) -> tuple[Tree, tuple[Tree, ...]]:
        grads, front = self._transform(grads, state, params, donate)
        new_params, last = self.members[-1].apply(grads, state[-1], params, donate=donate)
        return new_params, (*front, last)

    def leaf_states(self, state: tuple[Tree, ...], params: Tree) -> list[dict[str, Tensor]]:
        self._check(state)
        each = [member.leaf_states(own, params) for member, own in zip(self.members, state, strict=True)]
        return [LeafPart(*parts) for parts in zip(*each, strict=True)]

    def apply_leaves(
        self, grads: list[Tensor], states: list[dict[str, Tensor]], params: list[Tensor], count: int
    ) -> None:
        *front, last = self._members_of(states)
        for member, own in front:
            grads = member.transform_leaves(grads, own, params, count)
        last[0].apply_leaves(grads, last[1], params, count)

    def transform_leaves(
        self, grads: list[Tensor], states: list[dict[str, Tensor]], params: list[Tensor], count: int
    ) -> list[Tensor]:
        for member, own in self._members_of(states):
            grads = member.transform_leaves(grads, own, params, count)
        return grads

    def advance(self, state: tuple[Tree, ...]) -> tuple[Tree, ...]:
        return tuple(member.advance(own) for member, own in zip(self.members, state, strict=True))

    def _members_of(self, states: list[dict[str, Tensor]]) -> list[tuple[Optimizer, list[dict[str, Tensor]]]]:
        """Each member with its own parts of the states of some leaves."""
        parts = cast(list[LeafPart], states)
        return [(member, [part.parts[i] for part in parts]) for i, member in enumerate(self.members)]

    def _check(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != len(self.members):
            raise OptimError(f"{self} expected a state of {len(self.members)} parts, one a member, got {brief(state)}.")

    def _transform(
        self, grads: Tree, state: tuple[Tree, ...], params: Tree, donate: bool
    ) -> tuple[Tree, tuple[Tree, ...]]:
        """Gradients as the last member gets them, and the new states of all members before it."""
        self._check(state)
        front = []
        for member, own in zip(self.members[:-1], state, strict=False):
            grads, own = member.update(grads, own, params, donate=donate)
            front.append(own)
        return grads, tuple(front)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.members))})"


def chain(*transforms: Optimizer) -> Optimizer:
    """`transforms` one after the other: each gets the gradients that the one before it returned.

    Chains are flattened and identities dropped, so ``chain(a, chain(b, c)) == chain(a, b, c)``,
    ``chain(a, identity()) == a`` and ``chain() == identity()``. ``apply`` updates in place when donated if the last
    member does. If all members work leaf by leaf, as ``overlap="update"`` needs it, so does their chain. The
    counterpart of ``optax.chain`` and ``torchopt.chain``.

    >>> import torch
    >>> from ltx.optim.clip import clip_by_global_norm
    >>> from ltx.optim.from_torch import from_torch
    >>> optimizer = chain(clip_by_global_norm(1.0), from_torch(torch.optim.SGD, lr=0.5))
    >>> optimizer
    chain(clip_by_global_norm(1.0), from_torch(torch.optim.SGD, lr=0.5))
    >>> params = {"w": torch.zeros(2)}
    >>> params, state = optimizer.apply({"w": torch.tensor([3.0, 4.0])}, optimizer.init(params), params)
    >>> params, state[0].norm
    ({'w': tensor([-0.3000, -0.4000])}, tensor(5.))

    Raises:
        ltx.errors.OptimError: if an argument isn't an optimizer or transformation, or one that moves parameters
            (:func:`from_torch`) isn't the last: its updates are differences of parameters, not gradients.
    """
    members: list[Optimizer] = []
    for position, transform in enumerate(transforms):
        if not isinstance(transform, Optimizer):
            raise OptimError(
                f"chain expected optimizers, but argument {position} is {brief(transform)}.{_hint(transform)}"
            )
        members += transform.members if isinstance(transform, Chain) else (transform,)
    members = [member for member in members if not isinstance(member, Identity)]
    for member in members[:-1]:
        if member.moves_params:
            raise OptimError(
                f"{member} must come last in a chain, before it only transformations of gradients: it updates the "
                f"parameters, so {members[-1]} after it would not get gradients."
            )
    return Identity() if not members else members[0] if len(members) == 1 else Chain(tuple(members))


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """What a chain is made of; of another optimizer itself."""
    return optimizer.members if isinstance(optimizer, Chain) else (optimizer,)


def with_members(optimizer: Optimizer, members: Sequence[Optimizer]) -> Optimizer:
    """`optimizer` made of `members`, one for each of :func:`members_of`."""
    return replace(optimizer, members=tuple(members)) if isinstance(optimizer, Chain) else members[0]


def _hint(transform: Any) -> str:
    cls = transform if isinstance(transform, type) else type(transform)
    return f" Wrap the class: from_torch({cls.__name__}, ...)." if issubclass(cls, torch.optim.Optimizer) else ""
