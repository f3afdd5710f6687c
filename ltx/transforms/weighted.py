"""Weighted: a sum and its weight, so that means over unequal batches are exact.

value = sum_r total_r / sum_r weight_r
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ltx.arguments import brief, is_number
from ltx.comm import to_device
from ltx.errors import StepError


class Weighted(NamedTuple):
    """What a step returns instead of a mean: a sum over its samples or tokens, and their count.

    The value and gradient of the wrapped step are then the sum of the totals divided by the sum of the weights, over
    ranks and micro-batches, exactly; ranks may have unequal batches, and a rank without data contributes weight 0.

    Attributes:
        total: 0-dim floating tensor: the sum of the losses.
        weight: 0-dim tensor or number: how many there were. It counts as a constant: no gradient flows through it.

    Raises:
        StrategyError: (from a train step) the strategy averages parameters or updates of ranks that take steps of their
            own (local SGD, DiLoCo, gossip, asynchronous averaging, Adasum): every rank counts alike there.
        WeightError: (from the step) the weights of all ranks add up to 0. In a compiled graph, where values can't be
            looked at, the result is NaN.

    Example:
        >>> import torch, ltx
        >>> @ltx.data_parallel
        ... def step(w, x, keep):
        ...     return ltx.Weighted(((w * x) * keep).sum(), keep.sum())
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> keep = torch.tensor([[1.0, 1.0], [1.0, 0.0]])  # the second rank has one sample
        >>> ltx.vmap(torch.func.grad(step), in_dims=(None, 0, 0))(torch.tensor(1.0), x, keep)
        tensor([2., 2.])
    """

    total: torch.Tensor
    weight: torch.Tensor | float

    def checked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Total and weight as 0-dim tensors of one dtype and device; the weight without gradient."""
        total = self.total
        if not isinstance(total, torch.Tensor) or total.ndim != 0 or not total.is_floating_point():
            got = f"shape {list(total.shape)}, {total.dtype}" if isinstance(total, torch.Tensor) else brief(total)
            raise StepError(f"Weighted.total must be a 0-dim floating tensor, got {got}. Sum it.")
        if not isinstance(self.weight, torch.Tensor) and not is_number(self.weight):
            raise StepError(f"Weighted.weight must be a 0-dim tensor or a number, got {brief(self.weight)}.")
        if isinstance(self.weight, torch.Tensor) and self.weight.is_meta and not total.is_meta:
            raise StepError("Weighted.weight is a tensor on the meta device, which holds no value.")
        if isinstance(self.weight, torch.Tensor):
            weight = to_device(self.weight, total.device)
        else:
            weight = torch.full((), float(self.weight), dtype=total.dtype, device=total.device)
        if weight.ndim != 0:
            raise StepError(f"Weighted.weight must be 0-dim, got shape {list(weight.shape)}. Sum it.")
        return total, weight.to(total.dtype).detach()
