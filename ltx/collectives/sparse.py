"""Sums of sparse tensors: the ranks' entries are gathered, and those at the same place added up."""

from __future__ import annotations

from typing import Any

import torch

from ltx import comm
from ltx.collectives.uneven import gather_all_tensors, told
from ltx.errors import RankMismatchError, UnsupportedError


def is_sparse(x: Any) -> bool:
    """Whether `x` is a tensor of torch's COO layout, as gradients of sparse embeddings are."""
    return isinstance(x, torch.Tensor) and x.layout is torch.sparse_coo


def psum_sparse(x: torch.Tensor, axis: Any) -> torch.Tensor:
    """The sum over ranks of a COO tensor, coalesced; each rank may have entries at other places.

    Moves n - 1 times this rank's entries, so it pays as long as few of them are set. Differentiable with respect to
    the values.
    """
    found = comm.resolve(axis)
    if found.simulated or torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "psum of a sparse tensor works outside of torch.func transforms; use x.to_dense() there."
        )
    mine = x.coalesce()
    kinds = told("psum of sparse tensors", [x.sparse_dim(), x.ndim, *x.shape, *(0 for _ in range(30 - x.ndim))], found)
    if any(kind != kinds[0] for kind in kinds):
        each = "; ".join(f"rank {rank}: {kind[2 : 2 + kind[1]]}" for rank, kind in enumerate(kinds))
        raise RankMismatchError(f"axis {found.name!r}: ranks disagree on the shape of a sparse psum: {each}.")
    indices = torch.cat(gather_all_tensors(mine.indices(), found), dim=1)
    values = torch.cat(gather_all_tensors(mine.values(), found))
    return torch.sparse_coo_tensor(indices, values, x.shape, check_invariants=False).coalesce()
