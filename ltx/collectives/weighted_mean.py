"""weighted_mean: the mean over ranks that don't count alike.

m = sum_r w_r x_r / W,   W = sum_r w_r
x̄_r = w_r / W · sum_s ȳ_s,   w̄_r = <x_r - m, sum_s ȳ_s> / W
"""

from __future__ import annotations

from typing import Any

import torch

from ltx import comm, tree
from ltx.arguments import checked
from ltx.backings import unwrapped
from ltx.collectives.calls import check_dense, check_sums, tensors_of
from ltx.collectives.psum import axis_size, psum
from ltx.collectives.ranks import axis_index
from ltx.errors import WeightError
from ltx.typing import Tree

# What has no sums has means: they are taken in floating dtypes.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_NOTHING = torch.empty(0)


@checked("weight")
def weighted_mean(value: Tree, weight: torch.Tensor | float, axis: Any = None) -> Tree:
    """The mean over ranks of every tensor of a tree, in which rank r counts with its weight: sum w_r x_r / sum w_r.

    Args:
        value: tree of tensors or numbers, the same structure, shapes and dtypes on every rank: this rank's means, say.
        weight: this rank's weight, a 0-dim tensor or a number, not negative: the number of its samples, say. Where it
            is 0, the rank's values count for nothing, even if they are NaN or infinite.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: the same tree of new tensors with the means, shapes and dtypes as given; integers and
        booleans give the default float dtype. Sums are taken in float32 at least, all of them in one psum.

    Gradient:
        That of the formula, with respect to both, to any order: ``w_r / W * psum(ȳ)`` for the value, which is exactly 0
        where the weight is, and ``sum((x_r - m) * psum(ȳ)) / W`` for the weight. A value that is not finite where the
        weight is 0 counts as 0 in the latter. What lies before the value may still make NaN of a gradient of 0 (the
        derivative of ``sqrt`` at 0 times 0 is NaN): there give it harmless inputs.

    Raises:
        WeightError: on every rank, if the weights add up to 0 or one is negative; on the rank alone, if its weight
            isn't 0-dim. In a compiled graph, where values can't be looked at, the result is NaN.
        AxisError, TreeError, RankMismatchError: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> means, counts = torch.tensor([1.0, 4.0, torch.nan]), torch.tensor([3, 1, 0])
        >>> ltx.vmap(ltx.weighted_mean)(means, counts)
        tensor([1.7500, 1.7500, 1.7500])
    """
    value = tensors_of(value, axis)
    leaves, spec = tree.flatten(value)
    if not torch.compiler.is_compiling():
        tree.check_leaves(leaves, value, "weighted_mean: its value")
        check_dense("weighted_mean", leaves, value)
        check_sums("weighted_mean", [x if x.dtype not in _UNSIGNED else _NOTHING for x in leaves], value)
        tree.check_values(leaves, value, "weighted_mean")
    dtypes = [_sum_dtype(x.dtype) for x in leaves]
    w = _as_tensor(weight, leaves, dtypes)
    terms = [_term(x.to(dtype), w.to(x.device, _real(dtype))) for x, dtype in zip(leaves, dtypes, strict=True)]
    # The number of negative weights travels with their sum, so that all ranks raise or none. Added, not stacked: where
    # one has no tangent, torch 2.13 stacks one without memory for it, which what Inductor compiles reads (SIGSEGV).
    negatives = (w < 0).to(w.dtype)
    counted = torch.nn.functional.pad(w.unsqueeze(0), (0, 1)) + torch.nn.functional.pad(negatives.unsqueeze(0), (1, 0))
    sums = psum({"value": tree.unflatten(spec, terms), "weight": counted}, axis)
    whole, negative = sums["weight"].unbind()
    if not torch.compiler.is_compiling():
        _check(w, whole, negative, axis)
    whole = torch.where(negative > 0, torch.nan, whole)
    means = [
        (total / whole.to(total.device, _real(total.dtype))).to(_mean_dtype(x.dtype))
        for x, total in zip(leaves, tree.flatten(sums["value"])[0], strict=True)
    ]
    return tree.unflatten(spec, means)


def _mean_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    # In float16 the sum of 4000 tokens' losses overflows.
    return torch.promote_types(_mean_dtype(dtype), torch.float32)


def _real(sum_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if sum_dtype in (torch.float64, torch.complex128) else torch.float32


def _as_tensor(weight: torch.Tensor | float, leaves: list[torch.Tensor], dtypes: list[torch.dtype]) -> torch.Tensor:
    """The weight in the widest dtype of the sums, which is the same on every rank whatever each gave."""
    wide = torch.float64 if torch.float64 in map(_real, dtypes) else torch.float32
    if not isinstance(weight, torch.Tensor):
        return torch.full((), float(weight), dtype=wide, device=leaves[0].device if leaves else None)
    if weight.ndim != 0:
        raise WeightError(
            f"weighted_mean: the weight must be a number or a 0-dim tensor, got shape {list(weight.shape)}. Sum it."
        )
    return weight.to(dtype=wide, device=leaves[0].device if leaves else None)


def _term(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    nothing = torch.zeros((), dtype=x.dtype, device=x.device)
    # Finite values stay: the weight's gradient needs them.
    return torch.where((w == 0) & ~torch.isfinite(x), nothing, x) * w


def _check(w: torch.Tensor, whole: torch.Tensor, negative: torch.Tensor, axis: Any) -> None:
    axis_comm: comm.AxisComm | None = comm.resolve(axis).comm

    def on_host(x: torch.Tensor) -> torch.Tensor:
        return x if axis_comm is None else axis_comm.read(x, "weighted_mean")

    count = int(on_host(unwrapped(negative).max()))
    if count:
        rank, mine = unwrapped(axis_index(axis)), unwrapped(w)
        here = f"that of rank {rank} is {mine:g}" if mine.ndim == 0 and rank.ndim == 0 else f"they are {mine.tolist()}"
        raise WeightError(
            f"weighted_mean: {count} of the {axis_size(axis)} ranks' weights {'is' if count == 1 else 'are'} negative; "
            f"{here}. Weights count samples: give 0 to a rank whose value is to count for nothing."
        )
    if bool(on_host((unwrapped(whole) == 0).any())):
        raise WeightError(
            "weighted_mean: the weights of all ranks add up to 0, so there is no mean. Give at least one rank a "
            "weight, or leave the call out on all of them."
        )
