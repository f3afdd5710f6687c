"""AllReduce, the exact mean: ḡ = sum_r g_r / n. Each share is a gradient divided by n; the mean is their sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
