"""The norm of all gradients, in an optimizer's state and of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ltx.core.optim.base import all_of, differentiated
from ltx.typing import Tree


class ClipState(NamedTuple):
    """State of :func:`ltx.optim.clip_by_global_norm` and :func:`ltx.optim.measure_global_norm`.

    Attributes:
        norm: 0-dim tensor on the first leaf's device: the norm of the last gradients before clipping, 0 at the start.
    """

    norm: Tensor


def global_norm(leaves: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all `leaves` as one vector: a 0-dim tensor on the first leaf's device; 0 for no leaves."""
    if not leaves:
        return torch.tensor(0.0, device="cpu")
    if not differentiated(leaves):
        return torch.nn.utils.get_total_norm(leaves)  # one foreach pass; it has no derivative
    norms = [torch.linalg.vector_norm(leaf).to(leaves[0].device) for leaf in leaves]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def grad_norm(state: Tree) -> Tensor | None:
    """The gradient norm in an optimizer's `state`, from clipping or :func:`ltx.optim.measure_global_norm`; else None.

    If each group of a :func:`ltx.optim.partition` has measured its norm, the norm of all groups together; None if only
    some groups have.

    >>> import torch
    >>> grad_norm((ClipState(torch.tensor(5.0)), ()))
    tensor(5.)
    >>> grad_norm({"matrices": ClipState(torch.tensor(3.0)), "rest": (ClipState(torch.tensor(4.0)), ())})
    tensor(5.)
    """
    first = next((node for node in all_of(state, ClipState, dict) if all_of(node, ClipState)), None)
    if first is None or isinstance(first, ClipState):
        return first and first.norm
    norms = [grad_norm(group) for group in first.values()]
    return None if any(norm is None for norm in norms) else global_norm([norm for norm in norms if norm is not None])
