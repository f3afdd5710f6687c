"""The contract of a communication hook: what is done to a bucket of gradients on its way over the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ltx.sync.reduction import LeafState, Reduction, Share


@dataclass(frozen=True)
class CommHook:
    """A pure reduction of buckets, with explicit state.

    A hook is a value: it compares, hashes, pickles and prints. :meth:`reduce` is a generator written with
    :class:`ltx.sync.reduction.Ask`, so that the same lines run asynchronously between processes, on simulated ranks and
    in compiled graphs.

    Attributes:
        exact: the result is the mean up to rounding in the gradients' own dtype. Others count as the exact mean under
            second derivatives.
        elementwise: each element's result depends on that element alone.
        state_names: the tensors of one parameter's state; empty for a stateless hook.
        phases: the most asks that :meth:`reduce` yields for a bucket. Each has a channel of its own, which ranks open
            together when they meet a plan; in the backward pass they couldn't, as they arrive in any order.
    """

    exact: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ()
    phases: ClassVar[int] = 1

    def init(self, param: torch.Tensor) -> LeafState:
        """The state of one parameter before the first step: floating tensors by the names in `state_names`."""
        return {}

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which shares of gradients of `dtype` are packed and handed to :meth:`reduce`."""
        return dtype

    def reduce(self, share: Share) -> Reduction:
        """Yield asks, return (the sum of all ranks' shares, the next states)."""
        raise NotImplementedError(f"{type(self).__name__} must define reduce(share)")
