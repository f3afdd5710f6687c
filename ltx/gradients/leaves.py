"""Which leaves of a tree have gradients, and in which order those are expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import _functorch

from ltx import tree
from ltx.typing import Tree


def arrival_order(params: Tree, wanted: Sequence[int]) -> list[int]:
    """The places among the `wanted` leaves of a tree in the order in which their gradients are expected."""
    place = {leaf: i for i, leaf in enumerate(wanted)}
    return [place[i] for i in reversed(tree.insertion_order(params)) if i in place]


def tracked(tensor: torch.Tensor) -> bool:
    """Whether a gradient with respect to `tensor` is wanted, by plain autograd or at any level of torch.func."""
    if not torch._C._are_functorch_transforms_active():
        return tensor.requires_grad and torch.is_grad_enabled()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    # At each level `requires_grad` speaks of that level alone.
    while not tensor.requires_grad:
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return True


def all_tracked(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The places of those that are :func:`tracked`."""
    if torch._C._are_functorch_transforms_active():
        return [i for i, x in enumerate(tensors) if tracked(x)]
    return [i for i, x in enumerate(tensors) if x.requires_grad] if torch.is_grad_enabled() else []


def differentiable(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The places of those that can have a gradient."""
    return [i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()]
