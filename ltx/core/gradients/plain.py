"""AllReduce and Noop: the exact mean, and nothing at all.

AllReduce:  ḡ = sum_r g_r / n     (each share is a gradient divided by n; the mean is their sum)
Noop:       ḡ_r = g_r
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ltx.core.gradients.comm_hook import CommHook
from ltx.core.gradients.reduction import BucketInput, Reduction, sum_of_shares


@dataclass(frozen=True)
class AllReduce(CommHook):
    """The exact mean over ranks, by a ring all-reduce: each rank sends 2(n-1)/n of the bucket.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    Example:
        >>> import ltx
        >>> ltx.DDPStrategy(comm_hook=ltx.hooks.AllReduce()) == ltx.DDPStrategy(comm_hook="allreduce")
        True
    """

    elementwise: ClassVar[bool] = True

    def reduce(self, inputs: BucketInput) -> Reduction:
        return sum_of_shares(inputs)


EXACT = AllReduce()


@dataclass(frozen=True)
class Noop(CommHook):
    """No communication, to measure what a step would take if it cost nothing. Ranks go on with their own gradients.

    For training with local gradients use ``ltx.block_backward_sync``, whose derivatives are local too: of what isn't a
    mean over ranks they raise. ``noop_hook`` of torch.distributed.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.Noop())
        >>> ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(torch.tensor([1.0, 3.0]))
        tensor([1., 3.])
    """

    exact: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    sums: ClassVar[bool] = False

    def cast(self, dtype: torch.dtype) -> Noop:
        return self

    def scale(self, axis_size: int) -> float:
        return 1.0

    def reduce(self, inputs: BucketInput) -> Reduction:
        return inputs.flat, inputs.states
        yield  # a generator that asks for nothing
