"""Noise that is added to gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ltx.errors import OptimError, UnsupportedError
from ltx.extend import LeafState, Optimizer, arguments, noise, optimizers, recording, tree
from ltx.typing import Tree


@dataclass(frozen=True, repr=False)
class AddNoise(optimizers.LeafTransform):
    """Made by :func:`add_noise`. Its state counts the updates."""

    std: float
    seed: int

    def __post_init__(self) -> None:
        arguments.check_fields(self, OptimError, "seed")
        arguments.number("add_noise: std", self.std, 0, OptimError)

    def init(self, params: Tree) -> optimizers.TorchState:
        return optimizers.TorchState(())

    def leaf_states(self, state: optimizers.TorchState, params: Tree) -> list[LeafState]:
        there: list[bool] = []
        tree.map(lambda leaf: there.append(leaf is not None), params, none_is_leaf=True)
        return [optimizers.LeafPart(place=place) for place, is_leaf in enumerate(there) if is_leaf]

    def update_leaves(
        self, grads: list[Tensor], states: list[LeafState], params: list[Tensor], state: optimizers.TorchState
    ) -> list[Tensor]:
        optimizers.check_state(self, state, optimizers.TorchState)
        if recording():
            raise UnsupportedError("add_noise can't be traced: compile the loss instead of the whole training step.")
        parts = cast(list[optimizers.LeafPart], states)
        return [grad + self._noise(grad, state.count, part.place) for grad, part in zip(grads, parts, strict=True)]

    def _noise(self, like: Tensor, count: int, place: int) -> Tensor:
        key = noise.key_of(self.seed, count, place, device=like.device)
        dtype = torch.float64 if like.dtype.to_real() is torch.float64 else torch.float32
        parts = 2 if like.is_complex() else 1
        drawn = noise.normal(key, parts * like.numel(), dtype) * (float(self.std) / math.sqrt(parts))
        return (drawn if parts == 1 else torch.view_as_complex(drawn.view(-1, 2))).view(like.shape).to(like.dtype)

    def __repr__(self) -> str:
        return f"add_noise({self.std}, {self.seed})"


def add_noise(std: float, seed: int) -> Optimizer:
    """Add Gaussian noise of standard deviation `std` to every number of the gradients, the same on all ranks.

    The noise is a function of the seed, the number of updates and the leaf's place, so that ranks with equal gradients
    stay equal, and a run continued from a checkpoint draws the same noise. Leaves that are None have a place too, so
    the groups of a :func:`partition` draw different noise from one seed. Neelakantan et al.: Adding gradient noise
    improves learning for very deep networks (2015); Abadi et al.: Deep learning with differential privacy (2016), which
    also needs a secret seed and per-sample clipped gradients.

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
