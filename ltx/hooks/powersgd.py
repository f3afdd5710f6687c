"""PowerSGD: gradients as products of two thin matrices, found by one step of power iteration.

    M = M_1 + ... + M_n   (shares with their residuals, each parameter as a matrix)
    P = orthonormalised(M Q),   Q' = M^T P,   M^ = P Q'^T,   e_r = M_r - M^ / n

Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithm 1 and 2. M Q and M^T P are sums over ranks, so two
all-reduces of thin matrices replace one of the gradient. P and Q are held transposed: it is fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isqrt, prod
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor

from ltx.extend import Bucket, BucketInput, CollectiveRequest, CommHook, LeafState, Packing, arguments, buffers
from ltx.hooks import noise
from ltx.hooks.lossy import Compression, CompressionResult, LossyHook, by_greatest
from ltx.hooks.plain import EXACT

Q = "q"
#: Below this many numbers, an accelerator takes less time for a matrix' product than for the call that starts it.
_SMALL = 1 << 20


@dataclass(frozen=True)
class PowerHook(LossyHook):
    """The base of PowerSGD and BatchedPowerSGD: their fields.

    Args:
        rank: the number of columns of the thin matrices.
        start_step: before this synchronised step the hook is the exact mean; by default for 1,000 steps, as in torch.
        warm_start: begin each power iteration with the last one's result; else with new random matrices.
        seed: the seed of the random matrices, which are the same on all ranks.
        error_feedback: keep what the low rank leaves out for the next step.
    """

    reads_step: ClassVar[bool] = True

    rank: int = 1
    start_step: int = 1000
    warm_start: bool = True
    seed: int = 0
    error_feedback: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "rank")
        arguments.check_whole(self, 0, "start_step")

    def at(self, step: int) -> CommHook:
        return EXACT if step < self.start_step else self

    @property
    def constant_after(self) -> int:
        return self.start_step

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*super().state_names, *((Q,) if self.warm_start else ()))

    def _random(self, r: int, length: int, dtype: torch.dtype, *place: int | Tensor, device: torch.device) -> Tensor:
        return noise.normal(noise.key_of(self.seed, *place, device=device), r * length, dtype).view(r, length)


@dataclass(frozen=True)
class PowerSGD(PowerHook):
    """Low-rank gradients: a parameter of two or more dimensions is a matrix ``(shape[0], the rest)``.

    Vectors, scalars and matrices that low rank wouldn't make smaller are sent uncompressed, with the first of the two
    sums. Buckets after the first hold four times the strategy's bytes, since far less than that is sent.

    Args:
        rank, start_step, warm_start, seed, error_feedback: as in :class:`PowerHook`.
        min_compression_rate: matrices that low rank makes smaller by less than this factor are sent uncompressed.
        iterations: the number of power iterations in a step, each of which sends both thin matrices. With error
            feedback and warm start one is nearly as good as the best approximation; without them more are better.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019; torch.distributed's powerSGD_hook for the fields.

    Example:
        >>> import ltx
        >>> ltx.hooks.PowerSGD(rank=4, start_step=10).at(9)
        AllReduce()
    """

    reach: ClassVar[str] = "parameter"

    min_compression_rate: float = 2.0
    iterations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "iterations")
        arguments.check_number(self, 0, "min_compression_rate", more=True)

    @property
    def phases(self) -> int:
        return 2 * self.iterations

    def init(self, param: Tensor, path: str = "") -> LeafState:
        thin = _thin(param.shape, self.rank, self.min_compression_rate)
        if thin is None:
            return {}
        state = super().init(param, path)
        if self.warm_start:
            _, columns, r = thin
            dtype = self.packing(param.dtype, 1).dtype
            state[Q] = self._random(r, columns, dtype, crc32(path.encode()), device=param.device)
        return state

    def _start(self, inputs: BucketInput, member: int, columns: int, r: int) -> Tensor:
        if self.warm_start:
            return inputs.states[member][Q]
        place = (inputs.step, inputs.bucket.members[member])
        return self._random(r, columns, inputs.flat.dtype, *place, device=inputs.flat.device)

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return super().packing(dtype, axis_size)._replace(bucket_factor=4)  # one matrix of a bucket gets worse by it

    def send(self, inputs: BucketInput) -> Compression:
        thin, whole = _layout(inputs.bucket, self.rank, self.min_compression_rate)
        parts, n = inputs.flat.split(inputs.bucket.sizes), inputs.axis_size
        matrices = [parts[m].view(rows, columns) for m, rows, columns, _ in thin]
        starts = [self._start(inputs, m, columns, r) for m, _, columns, r in thin]
        # This form of the product is BLAS' fastest, three times as fast as its transpose.
        firsts = multiply_all(matrices, [start.mT for start in starts])
        request = CollectiveRequest("psum", _joined([*firsts, *(parts[m] for m in whole)]))
        *firsts, whole_sums = _cut((yield request), firsts)
        for further in reversed(range(self.iterations if thin else 1)):
            firsts = orthonormal_all(firsts)
            seconds = multiply_all(firsts, matrices)
            if thin:
                *seconds, _ = _cut((yield CollectiveRequest("psum", _joined(seconds))), seconds)
            norms = row_norms(seconds)
            regular = buffers.is_plain(inputs.flat) and (not norms or bool(_regular(torch.cat(norms)).all()))
            if further or self.warm_start:
                # A row that is zero or not finite keeps the last start, or all further iterations would stay there.
                starts = [
                    second / norm if regular else torch.where(_regular(norm), second / norm, start)
                    for second, norm, start in zip(seconds, norms, starts, strict=True)
                ]
            if further:
                firsts = multiply_all(matrices, [start.mT for start in starts])
                *firsts, _ = _cut((yield CollectiveRequest("psum", _joined(firsts))), firsts)
        states = [dict(state) for state in inputs.states]
        if self.warm_start:
            for (m, *_), start in zip(thin, starts, strict=True):
                states[m][Q] = start
        products = {m: pair for (m, *_), pair in zip(thin, zip(firsts, seconds, strict=True), strict=True)}
        sums = dict(zip(whole, whole_sums.split([parts[m].numel() for m in whole]), strict=True))
        # 1/n of the total on each of n ranks adds up to the total.
        early = self.error_feedback and buffers.is_plain(inputs.flat)
        total = _assembled(parts, products, sums, 1 / n if early else None)

        def left() -> Tensor:
            if not early:
                inputs.flat.sub_(total, alpha=1 / n)
            # an inner hook has done the sums, so uncompressed parameters have a residual too
            if request.sent is not None:
                sent = _cut(request.sent(), firsts)[-1].split([parts[m].numel() for m in whole])
                unsent = buffers.unpack(inputs.flat, inputs.bucket, cast=False)
                for m, mine in zip(whole, sent, strict=True):
                    unsent[m].view(-1).add_(sums[m], alpha=1 / n).sub_(mine)
            return inputs.flat

        # NaN or inf in a matrix makes its whole second product NaN, so `regular` has found them.
        return CompressionResult(total, left, states, finite=regular and request.sent is None)


@dataclass(frozen=True)
class BatchedPowerSGD(PowerHook):
    """Low-rank gradients: a bucket as one matrix that is nearly square; the few numbers left over are uncompressed.

    It takes fewer and larger products than :class:`PowerSGD`, and approximates worse. The random matrices are new at
    every step: state belongs to a parameter, and a bucket has several.

    Args:
        rank, start_step, seed, error_feedback: as in :class:`PowerHook`.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019; torch.distributed's batched_powerSGD_hook.

    Example:
        >>> import ltx
        >>> ltx.hooks.BatchedPowerSGD(rank=2).state_names
        ('residual',)
    """

    phases: ClassVar[int] = 2

    warm_start: bool = field(default=False, init=False, repr=False)

    def send(self, inputs: BucketInput) -> Compression:
        numel, n = inputs.flat.numel(), inputs.axis_size
        side = isqrt(numel)
        matrix = inputs.flat[: numel // side * side].view(1, -1, side)
        place = (inputs.step, inputs.bucket.index)
        start = self._random(min(self.rank, side), side, matrix.dtype, *place, device=matrix.device)
        first = start @ matrix.mT
        first, rest = _cut((yield CollectiveRequest("psum", _joined([first, inputs.flat[matrix.numel() :]]))), [first])
        first = orthonormal(first)
        second = yield CollectiveRequest("psum", first @ matrix)
        total = _joined([first.mT @ second, rest])
        finite = buffers.is_plain(second) and bool(_joined([second, rest]).isfinite().all())  # as in PowerSGD.send
        return CompressionResult(total, lambda: inputs.flat.sub_(total, alpha=1 / n), inputs.states, finite)


def _thin(shape: torch.Size, rank: int, rate: float) -> tuple[int, int, int] | None:
    """(rows, columns, rank) of a parameter as a matrix; None if low rank doesn't make it `rate` times smaller."""
    if len(shape) < 2 or not prod(shape):
        return None
    rows, columns = shape[0], prod(shape[1:])
    r = min(rows, columns, rank)
    return (rows, columns, r) if (rows + columns) * r * rate < rows * columns else None


@lru_cache(maxsize=1024)
def _layout(bucket: Bucket, rank: int, rate: float) -> tuple[tuple[tuple[int, int, int, int], ...], tuple[int, ...]]:
    """((place, rows, columns, rank) of each matrix, places of the uncompressed parameters)."""
    found = [_thin(leaf.shape, rank, rate) for leaf in bucket.leaves]
    thin = tuple((place, *matrix) for place, matrix in enumerate(found) if matrix is not None)
    return thin, tuple(place for place, matrix in enumerate(found) if matrix is None)


def _regular(norms: Tensor) -> Tensor:
    return (norms > 0) & (norms < inf)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut `flat` into parts with the shapes of `like`, and the rest."""
    sizes = [t.numel() for t in like]
    parts = flat.split([*sizes, flat.numel() - sum(sizes)])
    return [*(part.view(t.shape) for part, t in zip(parts, like, strict=False)), parts[-1]]


def _assembled(
    parts: Sequence[Tensor], products: dict[int, tuple[Tensor, Tensor]], sums: dict[int, Tensor], less: float | None
) -> Tensor:
    """The flat total, of products of thin matrices and of `sums`. `less` times it is taken from `parts`."""
    if not buffers.is_plain(parts[0]):
        firsts, seconds = ([pair[place] for pair in products.values()] for place in range(2))
        made = dict(zip(products, multiply_all([first.mT for first in firsts], seconds), strict=True))
        return _joined([sums[m] if m in sums else made[m] for m in range(len(parts))])
    total = parts[0].new_empty(sum(part.numel() for part in parts))
    pieces = total.split([part.numel() for part in parts])
    for m, thin in products.items():
        multiply(*thin, out=pieces[m])
        if less is not None:
            parts[m].view(-1).sub_(pieces[m], alpha=less)
    if sums:
        torch._foreach_copy_([pieces[m] for m in sums], list(sums.values()))
        if less is not None:
            torch._foreach_sub_([parts[m].view(-1) for m in sums], list(sums.values()), alpha=less)
    return total


def multiply_all(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> list[Tensor]:
    """The product of each pair. On an accelerator, small products of equal shapes are one call."""
    results = [torch.empty(0, device="cpu")] * len(lefts)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        small = buffers.prefers_few_calls(left) and max(left.numel(), right.numel()) <= _SMALL
        alike.setdefault((left.shape, right.shape) if small else (place,), []).append(place)
    for places in alike.values():
        if len(places) == 1:
            results[places[0]] = lefts[places[0]] @ rights[places[0]]
            continue
        products = torch.stack([lefts[place] for place in places]) @ torch.stack([rights[place] for place in places])
        for place, product in zip(places, products, strict=True):
            results[place] = product
    return results


def row_norms(matrices: Sequence[Tensor]) -> list[Tensor]:
    if not matrices or not buffers.prefers_few_calls(matrices[0]):
        return [torch.linalg.vector_norm(x, dim=-1, keepdim=True) * most for x, most in map(by_greatest, matrices)]
    rows = [row for matrix in matrices for row in matrix]
    most = torch._foreach_norm(rows, inf)
    torch._foreach_clamp_min_(most, torch.finfo(matrices[0].dtype).tiny)
    norms = torch.stack(torch._foreach_norm(torch._foreach_div(rows, most))) * torch.stack(most)
    return list(norms[:, None].split([len(matrix) for matrix in matrices]))


def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """The product of ``left.mT`` and `right`, each of shape ``(r, length)``."""
    matrix = out.view(left.shape[1], right.shape[1])
    if len(left) > 2:
        torch.mm(left.mT, right, out=matrix)
        return
    # With an inner dimension of 1 or 2, elementwise products take half the time of a matrix product.
    columns, rows = left.unsqueeze(2).unbind(), right.unbind()
    torch.mul(columns[0], rows[0], out=matrix)
    for column, row in zip(columns[1:], rows[1:], strict=True):
        matrix.addcmul_(column, row)


def orthonormal_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The transposes of `matrices`, ``(length, r)``, with orthonormal rows: one :func:`orthonormal` of all, padded."""
    if not matrices:
        return []
    length, ranks = (max(matrix.shape[dim] for matrix in matrices) for dim in (0, 1))
    if buffers.prefers_few_calls(matrices[0]):
        stack = matrices[0].new_zeros(len(matrices), ranks, length)
        parts = [part[: matrix.shape[1], : matrix.shape[0]] for part, matrix in zip(stack, matrices, strict=True)]
        torch._foreach_copy_(parts, [matrix.mT for matrix in matrices])
    else:
        pads = [(0, length - matrix.shape[0], 0, ranks - matrix.shape[1]) for matrix in matrices]
        stack = torch.stack([torch.nn.functional.pad(x.mT, pad) for x, pad in zip(matrices, pads, strict=True)])
    done = orthonormal(stack)
    return [done[place, : matrix.shape[1], : matrix.shape[0]] for place, matrix in enumerate(matrices)]


def orthonormal(matrices: Tensor) -> Tensor:
    """Orthonormal rows that span those of `matrices`, ``(k, r, length)``; zeros for rows in earlier ones' span. By
    Gram-Schmidt with two projections ("twice is enough", Giraud, Langou and Rozložník, 2005).
    """
    matrices, _ = by_greatest(matrices)
    norms = torch.linalg.vector_norm(matrices, dim=-1, keepdim=True)
    limits = 8 * torch.finfo(matrices.dtype).eps * norms
    done = matrices[:, :0]
    for place, rest in enumerate(matrices.split(1, dim=1)):
        norm = norms[:, :1]
        if place:
            for _ in range(2):
                rest = torch.baddbmm(rest, rest.bmm(done.mT), done, alpha=-1)
            norm = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        row = torch.where(norm <= limits[:, place : place + 1], 0, rest / norm)  # a NaN stays, as it compares as false
        done = torch.cat([done, row], 1) if place else row
    return done
