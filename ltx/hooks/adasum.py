"""Adasum: an adaptive sum, in which the component that ranks' gradients have in common counts once.

    adasum(a, b) = (1 - <a,b> / 2|a|^2) a + (1 - <a,b> / 2|b|^2) b, for each parameter, recursively over pairs of ranks

Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from ltx.errors import StrategyError
from ltx.extend import BucketInput, CollectiveRequest, CommHook, Packing, Reduction, brief, buffers, collectives

_PIECE = 1 << 16
_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Adasum(CommHook):
    """The adaptive sum of the ranks' gradients, parameter by parameter: :func:`ltx.adasum` in a step.

    Each rank sends 2(n-1)/n of a bucket, as for the mean, and at most 48 n bytes for each parameter in it. The adaptive
    sum lies between mean and sum, nearer to the sum the more ranks disagree; the paper keeps one worker's rate.

    The result isn't the gradient of any loss: its derivatives raise :class:`ltx.errors.UnsupportedError`
    (:func:`ltx.adasum` is differentiable). Horovod takes that of optimizers' updates: ``HorovodStrategy(op="adasum")``.

    Args:
        dtype: the floating dtype in which wider gradients are sent and combined (None: their own); norms in float64.

    Raises:
        AxisError: in a step, the number of ranks isn't a power of two.
        StrategyError: `dtype` isn't one of these; in a step, gradients are complex.

    Example:
        >>> import torch, ltx
        >>> strategy = ltx.DDPStrategy(comm_hook=ltx.hooks.Adasum())
        >>> ltx.vmap(lambda g: ltx.sync_gradients(g, strategy)[0])(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([[1., 2.],
                [1., 2.]])
    """

    exact: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    reach: ClassVar[str] = "parameter"

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in _DTYPES:
            raise StrategyError(f"Adasum.dtype must be a real floating dtype or None, got {brief(self.dtype)}.")

    def phases(self, axis_size: int) -> int:
        return 2 * collectives.Halving.levels(axis_size) + 1

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        if dtype.is_complex:
            raise StrategyError(f"{self!r} combines real gradients, a parameter is {dtype}: see torch.view_as_real.")
        narrow = dtype if self.dtype is None or dtype.itemsize <= self.dtype.itemsize else self.dtype
        return Packing(narrow, 1.0, None)

    def reduce(self, inputs: BucketInput) -> Reduction:
        flat = inputs.flat
        halving = collectives.Halving(inputs.bucket.sizes, inputs.axis_size, inputs.rank, flat.dtype)
        if halving.n == 1 or not flat.numel():
            return flat, inputs.states
        piece = halving.rows(flat)
        for level in range(halving.depth):
            given = halving.given(piece, level).contiguous()
            received = yield CollectiveRequest("ppermute", given, arguments=halving.partners(level))
            a, b = halving.pair(piece, received, level)
            plain = buffers.is_plain(a)
            products = _products(halving, a, b, level) if plain else halving.products(a, b, level)
            summed = yield CollectiveRequest("psum", products)
            piece = _combined(halving, a, b, summed, level) if plain else halving.combined(a, b, summed, level)
        return halving.joined((yield CollectiveRequest("all_gather", piece[0]))), inputs.states


def _products(halving: collectives.Halving, a: torch.Tensor, b: torch.Tensor, level: int) -> torch.Tensor:
    """As :meth:`Halving.products`, on the CPU, eagerly: in pieces that stay in the cache."""
    sums = [[0.0, 0.0, 0.0] for _ in halving.sizes]
    a, b = a.view(-1), b.view(-1)
    memory = torch.empty((2, min(_PIECE, a.numel())), dtype=torch.float64, device="cpu")
    for part, at in _pieces(halving, level):
        x, y = (row[: at.stop - at.start].copy_(given[at]) for row, given in zip(memory, (a, b), strict=True))
        for place, (u, v) in enumerate(((x, y), (x, x), (y, y))):
            sums[part][place] += torch.dot(u, v).item()
    by_product = torch.tensor(sums, dtype=torch.float64, device="cpu").T.contiguous()
    return torch.where(halving.here(level, a.device), by_product, 0.0)


def _combined(
    halving: collectives.Halving, a: torch.Tensor, b: torch.Tensor, summed: torch.Tensor, level: int
) -> torch.Tensor:
    """As :meth:`Halving.combined`, piece by piece, in the memory of `a`, which only this rank uses."""
    weights = list(zip(*(w.tolist() for w in halving.weights(summed, level)), strict=True))
    flat, other = a.view(-1), b.view(-1)
    memory = torch.empty(min(_PIECE, flat.numel()), dtype=torch.float64, device="cpu")
    for part, at in _pieces(halving, level):
        weight_a, weight_b = weights[part]
        flat[at].copy_(memory[: at.stop - at.start].copy_(flat[at]).mul_(weight_a).add_(other[at], alpha=weight_b))
    return a


def _pieces(halving: collectives.Halving, level: int) -> Iterator[tuple[int, slice]]:
    """Yields (index of the part, slice); a slice fits into the cache as float64."""
    for part, segment in enumerate(halving.segments(level)):
        for start in range(segment.start, segment.stop, _PIECE):
            yield part, slice(start, min(start + _PIECE, segment.stop))
