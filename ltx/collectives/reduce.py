"""reduce and reduce_boolean_decision: reductions by the name of their operation, as Lightning has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ltx import comm, tree
from ltx.arguments import brief, checked
from ltx.collectives.extremum import pmax, pmin
from ltx.collectives.gather import all_gather
from ltx.collectives.psum import axis_size, pmean, psum
from ltx.comm.operations import SUMMED
from ltx.errors import AxisError, CollectiveError, InputError, TreeError, UnsupportedError
from ltx.typing import Tree


def _bitwise(op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    return lambda x, axis: functools.reduce(op, all_gather(x, axis).unbind(0))


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_BITWISE = {
    "band": _bitwise(torch.bitwise_and),
    "bor": _bitwise(torch.bitwise_or),
    "bxor": _bitwise(torch.bitwise_xor),
}

#: op -> (tensor, axis) -> the reduction. What has no collective of its own gathers, which is exact for every dtype.
OPS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "sum": psum,
    "mean": pmean,
    "avg": pmean,
    "min": pmin,
    "max": pmax,
    "product": lambda x, axis: all_gather(x, axis).prod(0, dtype=torch.int64 if x.dtype is torch.bool else x.dtype),
    **_BITWISE,
}


@checked("keep_dtype")
def reduce(value: Tree, op: str | None = "mean", axis: Any = None, keep_dtype: bool = False) -> Tree:
    """Reduce every tensor of a tree over the ranks by the operation called `op`.

    Args:
        value: a tree; what isn't a tensor passes through.
        op: "sum", "mean" or "avg", "min", "max", "product", "band", "bor", "bxor", in any case, or a
            ``torch.distributed.ReduceOp``; None is "sum".
        axis: as in :func:`ltx.psum`.
        keep_dtype: a mean of integers in their own dtype, truncated toward zero, as Lightning 2.1 and later and Horovod
            give it. By default it is a float: averaged counts that are truncated have hidden errors in metrics.

    Returns:
        What each rank sees: the same tree of new tensors, of the same dtypes, but that means of integers are floats and
        sums and products of booleans int64.

    Gradient:
        That of the operation: psum(ȳ) for sums, psum(ȳ) / n for means, shared among those that tie for extrema, the
        product of the other ranks' values for products. Bitwise operations have none.

    Raises:
        CollectiveError: an operation that isn't one of these.
        TreeError: a bitwise operation on floating tensors.
        UnsupportedError: the dtype has no such reduction (uint16, uint32 and uint64 have the bitwise ones alone).
        AxisError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.reduce)({"loss": torch.tensor([1.0, 2.0]), "count": torch.tensor([1, 2])})
        {'loss': tensor([1.5000, 1.5000]), 'count': tensor([1.5000, 1.5000])}

    Source: Lightning's ``Strategy.reduce`` and ``sync_ddp``; all their operations, pure.
    """
    name = "sum" if op is None else brief(op, str).removeprefix("RedOpType.").lower()
    if name not in OPS:
        raise CollectiveError(
            f"reduce: op must be one of {', '.join(sorted(OPS))} in any case, or None, got {brief(op)}."
        )

    leaves, spec = tree.flatten(value)
    tree.check_open(leaves, value, "reduce", "reduced")

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if name in _BITWISE and (x.is_floating_point() or x.is_complex()):
            path = next(p for p, leaf in zip(tree.leaf_paths(value), leaves, strict=True) if leaf is x)
            raise TreeError(
                f"reduce: leaf {path!r} is {tree.describe(x)}, and {name!r} works on integers and booleans. Cast it, "
                'or use "sum", "min", "max" or "product".'
            )
        if not (x.dtype in SUMMED or (name in _BITWISE and x.dtype in _UNSIGNED)):
            path = next(p for p, leaf in zip(tree.leaf_paths(value), leaves, strict=True) if leaf is x)
            raise UnsupportedError(f"reduce: leaf {path!r} is {tree.describe(x)}, which has no {name}. Cast it.")
        if OPS[name] is pmean and keep_dtype and not (x.is_floating_point() or x.is_complex()):
            return torch.div(psum(x, axis), axis_size(axis), rounding_mode="trunc").to(x.dtype)
        return OPS[name](x, axis)

    return tree.unflatten(spec, [one(x) for x in leaves])


@checked("decision", "all")
def reduce_boolean_decision(decision: bool | torch.Tensor, all: bool = True, axis: Any = None) -> bool:
    """One decision for all ranks: whether every rank (or with ``all=False`` any rank) says True.

    Args:
        decision: this rank's; a bool or a 0-dim tensor.
        all: every rank must say True; else one is enough.
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
    if found.simulated:
        raise AxisError(
            f"reduce_boolean_decision has no form under ltx.vmap: the ranks of axis {found.name!r} can't take "
            'different branches there. Use ltx.reduce(flag, "min") for all, "max" for any, and torch.where.'
        )
    if isinstance(decision, torch.Tensor) and (decision.numel() != 1 or decision.is_meta):
        raise InputError(f"reduce_boolean_decision: a decision is one value, got {tree.describe(decision)}.")
    said = torch.tensor(bool(decision))  # of the host, for the host
    return bool((pmin if all else pmax)(said, found))
