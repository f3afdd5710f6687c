"""Noise on gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from ltx.arguments import brief, check_fields
from ltx.errors import OptimError, UnsupportedError
from ltx.hooks.noise import key_of, normal
from ltx.optim.base import LeafPart, Optimizer, TorchState
from ltx.tree import check_tensors, flatten, places_with_none
from ltx.typing import Tree


@dataclass(frozen=True, repr=False)
class AddNoise(Optimizer):
    """Made by :func:`add_noise`. Its state counts the updates."""

    std: float
    seed: int

    def __post_init__(self) -> None:
        check_fields(self, OptimError, "std", "seed")
        if not self.std >= 0:
            raise OptimError(f"add_noise: std must be >= 0, got {brief(self.std)}.")

    @property
    def leafwise(self) -> bool:
        return True

    def init(self, params: Tree) -> TorchState:
        return TorchState(())

    def update(self, grads: Tree, state: TorchState, params: Tree, *, donate: bool = False) -> tuple[Tree, TorchState]:
        check_tensors(grads, "grads")
        self._check(state)
        if torch.compiler.is_compiling():
            raise UnsupportedError("add_noise can't be traced: compile the loss instead of the whole training step.")
        leaves, spec = flatten(grads)
        noisy = [
            leaf + self._noise(leaf, state.count, place)
            for leaf, place in zip(leaves, places_with_none(grads), strict=True)
        ]
        return spec.unflatten(noisy), TorchState((), state.count + 1)

    def leaf_states(self, state: TorchState, params: Tree) -> list[dict[str, torch.Tensor]]:
        self._check(state)
        return [LeafPart(place=place) for place in places_with_none(params)]

    def transform_leaves(
        self,
        grads: list[torch.Tensor],
        states: list[dict[str, torch.Tensor]],
        params: list[torch.Tensor],
        count: int,
    ) -> list[torch.Tensor]:
        parts = cast(list[LeafPart], states)
        return [grad + self._noise(grad, count, part.place) for grad, part in zip(grads, parts, strict=True)]

    def advance(self, state: TorchState) -> TorchState:
        return replace(state, count=state.count + 1)

    def _check(self, state: Any) -> None:
        if not isinstance(state, TorchState):
            raise OptimError(f"{self} expected the state that its init(params) made, got {brief(state)}.")

    def _noise(self, like: torch.Tensor, count: int, place: int) -> torch.Tensor:
        key = key_of(self.seed, count, place, device=like.device)
        dtype = torch.float64 if like.dtype.to_real() is torch.float64 else torch.float32
        if like.is_complex():
            parts = normal(key, 2 * like.numel(), dtype) * (float(self.std) / math.sqrt(2.0))
            return torch.view_as_complex(parts.view(-1, 2)).view(like.shape).to(like.dtype)
        return (normal(key, like.numel(), dtype) * float(self.std)).view(like.shape).to(like.dtype)

    def __repr__(self) -> str:
        return f"add_noise({self.std}, {self.seed})"


def add_noise(std: float, seed: int) -> Optimizer:
    """Gaussian noise of standard deviation `std` on every number of the gradients: the same on all ranks.

    It is a function of the seed, the number of updates and the leaf's place, so that ranks with equal gradients stay
    equal, and a run that goes on from a checkpoint draws what it would have drawn. Places of None count, so the groups
    of a :func:`partition` draw different noise from one seed. Neelakantan et al.: Adding gradient
    noise improves learning for very deep networks (2015); Abadi et al.: Deep learning with differential privacy (2016),
    where the seed has to be secret and gradients of samples are clipped before.

    >>> import torch
    >>> noisy = add_noise(0.1, seed=0)
    >>> grads = {"w": torch.zeros(1000)}
    >>> first, state = noisy.update(grads, noisy.init(grads), grads)
    >>> round(first["w"].std().item(), 1), state.count
    (0.1, 1)

    Raises:
        ltx.errors.OptimError: `std` isn't a number >= 0, or `seed` no whole number.
        ltx.errors.UnsupportedError: in a compiled training step.
    """
    return AddNoise(std, seed)
