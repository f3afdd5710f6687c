"""Reductions other than sums: extrema, `reduce` by an operation's name, boolean decisions, the weighted mean.

pmax:           y_r = max_s x_s      x̄_r = m_r · (sum_s ȳ_s) / (sum_s m_s),   m_r = (x_r == y_r)
weighted_mean:  m = sum_r w_r x_r / W,   W = sum_r w_r
                x̄_r = w_r / W · sum_s ȳ_s,   w̄_r = <x_r - m, sum_s ȳ_s> / W
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import brief
from ltx.core.base.errors import CollectiveError, InputError, TreeError, WeightError, no_mean
from ltx.core.collectives.calls import check_dense, check_sums, collective, grouped, public, refuse_leaves, tensors_of
from ltx.core.collectives.gather import all_gather
from ltx.core.collectives.linear import Static, add_rule
from ltx.core.collectives.psum import NARROW, axis_size, countable, pmean, psum
from ltx.core.collectives.ranks import axis_index
from ltx.core.comm.operations import SUMMED
from ltx.typing import Tree


def _add_extremum(name: str, stacked: Callable[[torch.Tensor], torch.Tensor], sign: int) -> None:
    """Add the rule of pmax (`sign` 1) or pmin (`sign` -1)."""

    def coded(x: torch.Tensor) -> torch.Tensor:
        """Floats as integers of the same order, in which every NaN comes after (for pmin: before) all numbers: gloo and
        NCCL keep or drop a NaN depending on the order in which they read, and extrema of integers are unique.
        """
        if not x.is_floating_point():
            return x
        wide = x if x.itemsize >= 4 else x.float()
        bits = wide.view(torch.int64 if wide.itemsize == 8 else torch.int32)
        return _turned(bits) - sign * _nans(wide.dtype)

    def after(result: torch.Tensor, x: torch.Tensor, rank: int, n: int, static: Static) -> torch.Tensor:
        if result.dtype == x.dtype:
            return result
        dtype = torch.float64 if result.itemsize == 8 else torch.float32
        return _turned(result + sign * _nans(dtype)).view(dtype).to(x.dtype)

    add_rule(
        name=name,
        coded=coded,
        after=after,
        stacked=lambda xs, n, static: (stacked(xs), False),
        weights=lambda x, y: (x == y).to(x.dtype),
    )


def _turned(bits: torch.Tensor) -> torch.Tensor:
    """Turn sign and magnitude, as in a float's bits, into two's complement; the function is its own inverse."""
    return bits ^ (bits >> (8 * bits.itemsize - 1) & torch.iinfo(bits.dtype).max)


def _nans(dtype: torch.dtype) -> int:
    """The number of NaN of each sign. Moved by it, NaN at the wrong end of the integers overflow to the other end."""
    return int(1 / torch.finfo(dtype).eps) - 1


_add_extremum("pmax", lambda xs: xs.amax(0), 1)
_add_extremum("pmin", lambda xs: xs.amin(0), -1)


def _extremum(name: str, value: Tree, axis: Any) -> Tree:
    for kind in comm.kinds_of(axis):
        value = collective(name, value, kind)
    return value


@public("axis_index_groups")
def pmax(value: Tree, axis: Any = None, *, axis_index_groups: Sequence[Sequence[int]] | None = None) -> Tree:
    """The maximum over ranks of every element of a tree.

    Args:
        value: tree of real or boolean tensors, the same structure, shapes and dtypes on every rank; any strides.
        axis, axis_index_groups: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: the same tree of new tensors, shapes and dtypes as given. NaN on any rank gives NaN.

    Gradient:
        m · psum(ȳ) / psum(m) with m = (x == y): tied ranks share it equally. Integers and booleans have none.

    Raises:
        UnsupportedError: a tensor is complex, or torch has no maximum for its dtype: uint16, uint32, uint64, float8.
        AxisError, TreeError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.pmax)(torch.tensor([[1.0, 4.0], [3.0, 2.0]]))
        tensor([[3., 4.],
                [3., 4.]])
    """
    return _extremum("pmax", value, grouped(axis, axis_index_groups))


@public("axis_index_groups")
def pmin(value: Tree, axis: Any = None, *, axis_index_groups: Sequence[Sequence[int]] | None = None) -> Tree:
    """The minimum over ranks of every element of a tree. The rest is as in :func:`pmax`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.pmin)(torch.tensor([[1.0, 4.0], [3.0, 2.0]]))
        tensor([[1., 2.],
                [1., 2.]])
    """
    return _extremum("pmin", value, grouped(axis, axis_index_groups))


def _gathered(reduced: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tree, Any], Tree]:
    """A reduction by ``reduced(gathered values)``, for operations without a collective. Exact for every dtype."""
    return lambda value, axis: tree.map(reduced, all_gather(value, axis))


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_BITWISE = {
    "band": _gathered(lambda xs: functools.reduce(torch.bitwise_and, xs.unbind(0))),
    "bor": _gathered(lambda xs: functools.reduce(torch.bitwise_or, xs.unbind(0))),
    "bxor": _gathered(lambda xs: functools.reduce(torch.bitwise_xor, xs.unbind(0))),
}

#: The reduction for each op, a function of (tree, axis). Ranks compare whole trees before anything is sent.
OPS: dict[str, Callable[[Tree, Any], Tree]] = {"sum": psum, "mean": pmean, "avg": pmean, "min": pmin, "max": pmax}
OPS |= _BITWISE | {"product": _gathered(lambda x: x.prod(0, dtype=torch.int64 if x.dtype is torch.bool else x.dtype))}


@public("keep_dtype")
def reduce(value: Tree, op: str | None = "mean", axis: Any = None, keep_dtype: bool = False) -> Tree:
    """Reduce every tensor of a tree over the ranks by the operation called `op`.

    Args:
        value: a tree; leaves that aren't tensors are returned unchanged.
        op: "sum", "mean" or "avg", "min", "max", "product", "band", "bor", "bxor", in any case, or a
            ``torch.distributed.ReduceOp``; None is "sum".
        axis: as in :func:`ltx.psum`.
        keep_dtype: if True, a mean of integers keeps their dtype and is truncated toward zero, as in Lightning 2.1 and
            Horovod. By default it is a float, since truncated means of counts falsify metrics.

    Returns:
        What each rank sees: the same tree of new tensors, of the same dtypes; but means of integers are floats, and
        sums and products of booleans are int64.

    Gradient:
        That of the operation: psum(ȳ) for sums, psum(ȳ) / n for means, shared among tied ranks for extrema, the product
        of the other ranks' values for products. Bitwise operations have none.

    Raises:
        CollectiveError: `op` isn't one of these operations.
        TreeError: the operation is bitwise, and a tensor isn't an integer or boolean tensor.
        UnsupportedError: the dtype has no such reduction (uint16, uint32 and uint64 have only the bitwise ones).
        AxisError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.reduce)({"loss": torch.tensor([1.0, 2.0]), "count": torch.tensor([1, 2])})
        {'loss': tensor([1.5000, 1.5000]), 'count': tensor([1.5000, 1.5000])}

    Source: Lightning's ``Strategy.reduce`` and ``sync_ddp``, with all their operations, as a pure function.
    """
    name = "sum" if op is None else brief(op, str).removeprefix("RedOpType.").lower()
    if name not in OPS:
        raise CollectiveError(
            f"reduce: op must be one of {', '.join(sorted(OPS))} in any case, or None, got {brief(op)}."
        )
    leaves, spec = tree.flatten(value)
    tree.check_open(leaves, value, "reduce", "reduced")
    known = {*SUMMED, *(_UNSIGNED if name in _BITWISE else ())}
    if name in _BITWISE:
        only = f'and {name!r} works on integers and booleans. Cast it, or use "sum", "min", "max" or "product".'
        refuse_leaves("reduce", leaves, value, lambda x: x.is_floating_point() or x.is_complex(), only, TreeError)
    refuse_leaves("reduce", leaves, value, lambda x: x.dtype not in known, f"which has no {name}. Cast it.")
    tensors = tree.unflatten(spec, [x if isinstance(x, torch.Tensor) else None for x in leaves])
    if OPS[name] is pmean and keep_dtype:
        n = axis_size(axis)

        def mean(total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            whole = not (like.is_floating_point() or like.is_complex())
            return torch.div(total, n, rounding_mode="trunc").to(like.dtype) if whole else total / n

        reduced = tree.map(mean, psum(countable(tensors, NARROW), axis), tensors)
    else:
        reduced = OPS[name](tensors, axis)
    return tree.filled(reduced, value)


@public("decision", "all")
def reduce_boolean_decision(decision: bool | torch.Tensor, all: bool = True, axis: Any = None) -> bool:
    """One decision for all ranks: whether every rank (with ``all=False`` any rank) says True.

    Args:
        decision: this rank's decision, a bool or a 0-dim tensor. all: whether every rank must say True, or one.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: the same Python bool.

    Raises:
        AxisError: `axis` isn't in scope or is one of ``ltx.vmap``.

    Example:
        >>> import ltx
        >>> ltx.reduce_boolean_decision(True)  # a world of one
        True

    Source: Lightning's ``Strategy.reduce_boolean_decision``.
    """
    found = comm.resolve(axis)
    found.ranks.need(
        "objects",
        f"reduce_boolean_decision has no form under ltx.vmap: the ranks of axis {found.name!r} can't take "
        'different branches there. Use ltx.reduce(flag, "min") for all, "max" for any, and torch.where.',
    )
    if isinstance(decision, torch.Tensor) and (decision.numel() != 1 or decision.is_meta):
        raise InputError(f"reduce_boolean_decision: a decision is one value, got {tree.describe(decision)}.")
    said = torch.tensor(bool(decision), device="cpu")  # on the CPU, since the host needs the result
    return bool((pmin if all else pmax)(said, found))


@public("weight")
def weighted_mean(value: Tree, weight: torch.Tensor | float, axis: Any = None) -> Tree:
    """The mean over ranks of every tensor of a tree, weighted by rank: sum w_r x_r / sum w_r.

    Args:
        value: tree of tensors or numbers, such as a rank's means; the same structure, shapes and dtypes on all.
        weight: this rank's weight, such as its number of samples: a 0-dim tensor or a number, not negative. A value of
            weight 0 has no influence, even if it is NaN or infinite.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: the same tree of new tensors with the means, shapes and dtypes as given; the means of
        integers and booleans have the default float dtype. Sums are taken in float32 at least, in one psum.

    Gradient:
        That of the formula, for both arguments, to any order: ``w_r / W * psum(ȳ)`` for the value, exactly 0 if the
        weight is 0; and ``sum((x_r - m) * psum(ȳ)) / W`` for the weight, in which a value that isn't finite counts as 0
        if its weight is 0. The code that computes the value may still turn a gradient of 0 into NaN, as ``sqrt`` does
        at 0: give it harmless inputs.

    Raises:
        WeightError: on every rank, if the weights add up to 0 or one is negative; on one rank only, if its weight isn't
            0-dim. In a compiled graph, which can't read values, the result is NaN instead.
        AxisError, TreeError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> means, counts = torch.tensor([1.0, 4.0, torch.nan]), torch.tensor([3, 1, 0])
        >>> ltx.vmap(ltx.weighted_mean)(means, counts)
        tensor([1.7500, 1.7500, 1.7500])
    """
    value = tensors_of(value, axis)
    leaves, spec = tree.flatten(value)
    if not traced.recording():
        check_dense("weighted_mean", leaves, value)
        # Unsigned integers, which have no sums, do have means, which are computed in a floating dtype.
        check_sums("weighted_mean", [None if x.dtype in _UNSIGNED else x for x in leaves], value)
        tree.check_values(leaves, value, "weighted_mean")
    dtypes = [wide(_mean_dtype(x.dtype)) for x in leaves]
    # The weight is in the widest dtype of the sums, so that its dtype is the same on every rank.
    widest = torch.float64 if torch.float64 in map(_real, dtypes) else torch.float32
    device = leaves[0].device if leaves else None
    w = weight if isinstance(weight, torch.Tensor) else torch.full((), float(weight), dtype=widest, device=device)
    if w.ndim != 0:
        raise WeightError(
            f"weighted_mean: the weight must be a number or a 0-dim tensor, got shape {list(w.shape)}. Sum it."
        )
    w, terms = w.to(dtype=widest, device=device), []
    for x, dtype in zip(leaves, dtypes, strict=True):
        x, own = x.to(dtype), w.to(x.device, _real(dtype))
        # Finite values aren't replaced, since the weight's gradient needs them.
        terms.append(torch.where((own == 0) & ~torch.isfinite(x), 0.0, x) * own)
    # The number of negative weights is summed too, so that all ranks raise or none does. Not by torch.stack: if one has
    # no tangent, torch 2.13 stacks one without memory, and what Inductor compiled crashes when it reads it (SIGSEGV).
    negatives = (w < 0).to(w.dtype)
    counted = torch.nn.functional.pad(w.unsqueeze(0), (0, 1)) + torch.nn.functional.pad(negatives.unsqueeze(0), (1, 0))
    sums = psum({"value": tree.unflatten(spec, terms), "weight": counted}, axis)
    whole, negative = sums["weight"].unbind()
    if not traced.recording():
        ranks = comm.resolve(axis).ranks
        if count := int(ranks.read(private.unwrapped(negative).max(), "weighted_mean")):
            rank, mine = private.unwrapped(axis_index(axis)), private.unwrapped(w)
            alone = mine.ndim == 0 and rank.ndim == 0
            here = f"that of rank {rank} is {mine:g}" if alone else f"they are {mine.tolist()}"
            raise WeightError(
                f"weighted_mean: {count} of the {axis_size(axis)} ranks' weights {'is' if count == 1 else 'are'} "
                f"negative; {here}. Weights count samples: give 0 to a rank whose value is to count for nothing."
            )
        if bool(ranks.read((private.unwrapped(whole) == 0).any(), "weighted_mean")):
            raise no_mean("weighted_mean: the weights of all ranks add up to 0")
    whole = torch.where(negative > 0, torch.nan, whole)
    means = [
        (total / whole.to(total.device, _real(total.dtype))).to(_mean_dtype(x.dtype))
        for x, total in zip(leaves, tree.flatten(sums["value"])[0], strict=True)
    ]
    return tree.unflatten(spec, means)


def _mean_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and averages: `dtype`, float32 at least. In 16 bits long sums stop growing, or overflow."""
    return torch.promote_types(dtype, torch.float32)


def unusable(weight: torch.Tensor) -> torch.Tensor:
    """What is wrong with sums of weights, 0-dim: 0 if nothing is, 1 if one is 0, 2 if one is no count."""
    return ((weight == 0) + 2 * ~(weight < math.inf)).max()


def _real(sum_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if sum_dtype in (torch.float64, torch.complex128) else torch.float32
