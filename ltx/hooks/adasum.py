"""Adasum: gradients are added up so that what ranks agree on counts once.

    adasum(a, b) = (1 - <a,b> / 2|a|^2) a + (1 - <a,b> / 2|b|^2) b, for each parameter, recursively over pairs of ranks

Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ltx.collectives.adasum import Halving, levels
from ltx.errors import StrategyError
from ltx.hooks.base import CommHook
from ltx.sync.reduction import Ask, Reduction, Share

_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Adasum(CommHook):
    """The adaptive sum of the ranks' gradients, parameter by parameter: :func:`ltx.adasum` in a step.

    Each rank sends 2(n-1)/n of a bucket, as for the mean, and at most 48 n bytes for each parameter in it. Between the
    sum and the mean, it is larger than the mean where ranks disagree; the paper keeps one worker's learning rate.

    What it gives isn't the gradient of any loss: derivatives of it raise :class:`ltx.errors.UnsupportedError`
    (:func:`ltx.adasum` has its own). Horovod takes the adaptive sum of the optimizers' updates instead of gradients:
    ``HorovodStrategy(op="adasum")``.

    Args:
        dtype: the floating dtype in which wider gradients travel and are combined; their own if None. Products and
            norms are float64's.

    Raises:
        AxisError: in a step on a number of ranks that isn't a power of two.
        StrategyError: `dtype` is something else; in a step whose gradients are complex.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.Adasum())
        >>> ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([[1., 2.],
                [1., 2.]])
    """

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    averages: ClassVar[bool] = False

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise StrategyError(f"Adasum.dtype must be a real floating dtype of torch or None, got {self.dtype!r}.")

    def phases_on(self, axis_size: int) -> int:
        return 2 * levels(axis_size) + 1

    def scale(self, axis_size: int) -> float:
        return 1.0

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype.is_complex:
            raise StrategyError(f"{self!r} combines real gradients, and a parameter is {dtype}.")
        return dtype if self.dtype is None or dtype.itemsize <= self.dtype.itemsize else self.dtype

    def reduce(self, share: Share) -> Reduction:
        flat = share.flat
        halving = Halving(share.bucket.sizes, share.axis_size, share.rank, flat.dtype)
        if halving.n == 1 or not flat.numel():
            return flat, share.states
        piece = halving.rows(flat)
        for level in range(halving.depth):
            given = halving.given(piece, level).contiguous()
            received = yield Ask("permute", given, arguments=halving.partners(level))
            a, b = halving.pair(piece, received, level)
            piece = halving.combined(a, b, (yield Ask("sum", halving.products(a, b, level))), level)
        rows = yield Ask("all_gather", piece[0])
        return halving.joined(rows), share.states
