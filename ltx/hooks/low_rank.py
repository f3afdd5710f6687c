"""Arithmetic of many thin matrices at once, as :mod:`ltx.hooks.powersgd` needs it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch

from ltx.gradients.packing import prefers_few_calls

#: Numbers of a matrix whose products take less on an accelerator than the calls that start them.
_SMALL = 1 << 20


def multiply_all(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The product of each pair; on an accelerator those of equal shapes in one call, if they are small."""
    results = [torch.empty(0)] * len(lefts)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        small = prefers_few_calls(left) and max(left.numel(), right.numel()) <= _SMALL
        alike.setdefault((left.shape, right.shape) if small else (place,), []).append(place)
    for places in alike.values():
        if len(places) == 1:
            results[places[0]] = lefts[places[0]] @ rights[places[0]]
            continue
        products = torch.stack([lefts[place] for place in places]) @ torch.stack([rights[place] for place in places])
        for place, product in zip(places, products, strict=True):
            results[place] = product
    return results


def row_norms(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each row, as columns."""
    if not matrices or not prefers_few_calls(matrices[0]):
        return [torch.linalg.vector_norm(matrix, dim=-1, keepdim=True) for matrix in matrices]
    norms = torch.stack(torch._foreach_norm([row for matrix in matrices for row in matrix]))
    return list(norms[:, None].split([len(matrix) for matrix in matrices]))


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """The product of ``left.mT`` and `right`, each of shape ``(r, length)``."""
    matrix = out.view(left.shape[1], right.shape[1])
    if len(left) > 2:
        torch.mm(left.mT, right, out=matrix)
        return
    # Matrix products aren't made for an inner dimension of one or two: half the time without.
    columns, rows = left.unsqueeze(2).unbind(), right.unbind()
    torch.mul(columns[0], rows[0], out=matrix)
    for column, row in zip(columns[1:], rows[1:], strict=True):
        matrix.addcmul_(column, row)


def orthonormal_all(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The transposes of `matrices`, each of shape ``(length, r)``, with orthonormal rows: :func:`orthonormal` of all at
    once, padded with zeros, which change nothing.
    """
    if not matrices:
        return []
    length, ranks = (max(matrix.shape[dim] for matrix in matrices) for dim in (0, 1))
    if prefers_few_calls(matrices[0]):
        stack = matrices[0].new_zeros(len(matrices), ranks, length)
        parts = [part[: matrix.shape[1], : matrix.shape[0]] for part, matrix in zip(stack, matrices, strict=True)]
        torch._foreach_copy_(parts, [matrix.mT for matrix in matrices])
    else:
        pads = [(0, length - matrix.shape[0], 0, ranks - matrix.shape[1]) for matrix in matrices]
        stack = torch.stack([torch.nn.functional.pad(x.mT, pad) for x, pad in zip(matrices, pads, strict=True)])
    done = orthonormal(stack)
    return [done[place, : matrix.shape[1], : matrix.shape[0]] for place, matrix in enumerate(matrices)]


def orthonormal(matrices: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows with the span of the rows of `matrices`, of shape ``(k, r, length)``; in place of a row that
    depends on those before it, zeros.

    Gram and Schmidt, each row projected twice ("twice is enough", Giraud, Langou and Rozložník, 2005).
    """
    norms = torch.linalg.vector_norm(matrices, dim=-1, keepdim=True)
    limits = 8 * torch.finfo(matrices.dtype).eps * norms
    done = matrices[:, :0]
    for place, rest in enumerate(matrices.split(1, dim=1)):
        norm = norms[:, :1]
        if place:
            for _ in range(2):
                rest = torch.baddbmm(rest, rest.bmm(done.mT), done, alpha=-1)
            norm = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        # NaN is no smaller than anything, so it stays.
        row = torch.where(norm <= limits[:, place : place + 1], 0, rest / norm)
        done = torch.cat([done, row], 1) if place else row
    return done


def all_regular(norms: Sequence[torch.Tensor]) -> bool:
    """Whether all of them are positive and finite."""
    if not norms:
        return True
    least, greatest = torch.cat(list(norms)).aminmax()
    return least.item() > 0 and greatest.item() < inf


def next_start(second: torch.Tensor, norm: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The rows of `second`, normalised; those of `start` where they are zero or not finite, so that the next iteration
    isn't stuck with them.
    """
    return torch.where((norm > 0) & (norm < inf), second / norm, start)
