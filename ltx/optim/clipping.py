"""Clipping of gradients, by global norm or by value, and measuring the global norm.

g ← g · min(1, max_norm / (‖g‖ + eps)), where ‖g‖ is the Euclidean norm of all leaves together.

Pascanu, Mikolov, Bengio: On the difficulty of training recurrent neural networks (2013), section 3.2, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from ltx.errors import OptimError
from ltx.extend import arguments, brief, optimizers, tree
from ltx.optim.combine import LeafTransform
from ltx.typing import Tree


@dataclass(frozen=True, repr=False)
class ClipByGlobalNorm(optimizers.Optimizer):
    """Made by :func:`clip_by_global_norm`, and by :func:`measure_global_norm`, where `max_norm` is infinite."""

    moves_params: ClassVar[bool] = False

    max_norm: float
    eps: float = 1e-6
    #: The norm of all gradients; a strategy replaces it where each rank holds a part of the gradients.
    norm: Callable[[Sequence[Tensor]], Tensor] = optimizers.global_norm

    def __post_init__(self) -> None:
        arguments.check_fields(self, OptimError, "max_norm")
        if not self.max_norm > 0:
            raise OptimError(f"clip_by_global_norm: max_norm must be > 0, got {brief(self.max_norm)}.")
        arguments.number("clip_by_global_norm: eps", self.eps, 0, OptimError)

    @property
    def takes_parts(self) -> bool:
        """Whether the norm can be computed from the norms of parts of the gradients, as the Euclidean norm can."""
        return getattr(self.norm, "takes_parts", self.norm is optimizers.global_norm)

    def init(self, params: Tree) -> optimizers.ClipState:
        leaves, _ = tree.flatten(params)
        dtypes = [leaf.dtype.to_real() for leaf in leaves]
        dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        return optimizers.ClipState(torch.zeros((), dtype=dtype, device=leaves[0].device if leaves else None))

    def update(
        self, grads: Tree, state: optimizers.ClipState, params: Tree, *, donate: bool = False
    ) -> tuple[Tree, optimizers.ClipState]:
        tree.check_tensors(grads, "grads")
        leaves, spec = tree.flatten(grads)
        norm = self.norm(leaves)
        if self.max_norm == math.inf:
            return grads, optimizers.ClipState(norm)
        factor = torch.clamp(float(self.max_norm) / (norm + float(self.eps)), max=1.0)
        factors = {device: factor.to(device) for device in {leaf.device for leaf in leaves}}
        if len(factors) == 1 and not optimizers.differentiated(leaves):
            scaled: Sequence[Tensor] = torch._foreach_mul(leaves, factor)
        else:  # foreach has no vmap rules and no derivative for the factor
            scaled = [leaf * factors[leaf.device] for leaf in leaves]
        # A 0-dim gradient times a factor of another dtype may change its dtype, so cast back.
        clipped = [new.to(old.dtype) for new, old in zip(scaled, leaves, strict=True)]
        return spec.unflatten(clipped), optimizers.ClipState(norm)

    def __repr__(self) -> str:
        if self.max_norm == math.inf:
            return "measure_global_norm()"
        norm = "" if self.takes_parts else f", norm={arguments.name_of(self.norm)}"
        return f"clip_by_global_norm({self.max_norm}{'' if self.eps == 1e-6 else f', eps={self.eps}'}{norm})"


def clip_by_global_norm(max_norm: float, *, eps: float = 1e-6) -> optimizers.Optimizer:
    """Scale gradients down so that their global norm is at most `max_norm`, exactly as ``clip_grad_norm_`` does.

    >>> import torch
    >>> clip = clip_by_global_norm(1.0)
    >>> params = {"w": torch.zeros(2)}
    >>> grads, state = clip.update({"w": torch.tensor([3.0, 4.0])}, clip.init(params), params)
    >>> grads, state.norm
    ({'w': tensor([0.6000, 0.8000])}, tensor(5.))

    Gradients keep their dtypes and devices; leaves of ``None`` stay. A NaN norm makes every gradient NaN and an
    infinite one makes them 0 and NaN, as in torch: whether to skip such a step is the guard's decision. The norm of
    float32 gradients of 1e20 is infinite, as their squares are: they become 0. Differentiable. Nothing is communicated:
    a train step's gradients are already reduced, so every rank computes the same norm.

    Args:
        max_norm: a number > 0.
        eps: added to the norm before dividing by it.

    Raises:
        ltx.errors.OptimError: for a `max_norm` or `eps` out of range.
    """
    return ClipByGlobalNorm(max_norm, eps)


def measure_global_norm() -> optimizers.Optimizer:
    """Measure the gradients' global norm and pass them on unchanged: :func:`clip_by_global_norm` without a limit.

    In a train step's chain it gives ``metrics.grad_norm``: the Euclidean norm of all gradients as the optimizer gets
    them, reduced and without the loss scale. All ranks get the same norm, even if each holds only a part of the
    gradients (:class:`ltx.ZeroStrategy`). With a strategy that doesn't reduce gradients each rank gets the norm of its
    own. It costs one pass over the gradients. The norm needs all gradients first, so ``overlap="update"`` refuses it.

    >>> import torch, ltx
    >>> optimizer = ltx.optim.chain(measure_global_norm(), ltx.optim.from_torch(torch.optim.SGD, lr=0.5))
    >>> train = ltx.train_step(ltx.data_parallel(lambda p, x: (p["w"] * x).sum()), optimizer)
    >>> state, metrics = train(train.init({"w": torch.zeros(2)}), torch.tensor([3.0, 4.0]))
    >>> metrics.grad_norm, state.params["w"]
    (tensor(5.), tensor([-1.5000, -2.0000]))

    A NaN or infinite norm is measured as such. Differentiable.
    """
    return ClipByGlobalNorm(math.inf)


@dataclass(frozen=True, repr=False)
class ClipByValue(LeafTransform):
    """Made by :func:`clip_by_value`."""

    elementwise: ClassVar[bool] = True

    limit: float

    def __post_init__(self) -> None:
        arguments.check_fields(self, OptimError, "limit")
        if not self.limit > 0:
            raise OptimError(f"clip_by_value: limit must be > 0, got {brief(self.limit)}.")

    def update(self, grads: Tree, state: Tree, params: Tree, *, donate: bool = False) -> tuple[Tree, Tree]:
        tree.check_tensors(grads, "grads")
        leaves, spec = tree.flatten(grads)
        return spec.unflatten(self._clipped(leaves, grads)), state

    def update_leaves(self, grads: list[Tensor], states: Any, params: list[Tensor], state: Tree) -> list[Tensor]:
        return self._clipped(grads, None)

    def _clipped(self, leaves: list[Tensor], given: Tree) -> list[Tensor]:
        for index, leaf in enumerate(leaves):
            if leaf.is_complex():
                which = optimizers.leaf_name(given, index)
                raise OptimError(
                    f"clip_by_value: the gradient of {which} is complex, and complex numbers have no order. Use "
                    "clip_by_global_norm."
                )
        return [leaf.clamp(-float(self.limit), float(self.limit)) for leaf in leaves]

    def __repr__(self) -> str:
        return f"clip_by_value({self.limit})"


def clip_by_value(limit: float) -> optimizers.Optimizer:
    """Clamp every number of the gradients to ``-limit`` .. ``limit``, as ``clip_grad_value_`` does. NaN stays NaN.

    >>> import torch
    >>> clip = clip_by_value(1.0)
    >>> clip.update({"w": torch.tensor([-3.0, 0.5])}, (), {"w": torch.zeros(2)})[0]
    {'w': tensor([-1.0000,  0.5000])}

    Raises:
        ltx.errors.OptimError: `limit` isn't a number > 0, or a gradient is complex.
    """
    return ClipByValue(limit)
