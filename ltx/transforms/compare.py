"""Comparing tensors between ranks by their digests, through the store or, on simulated ranks, in place."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch._C import _functorch

from ltx import comm, tree
from ltx.axis import Axis
from ltx.backings import VmapBacking
from ltx.errors import ReplicaDivergedError
from ltx.transforms.digests import digest, values
from ltx.typing import Tree

_START = (
    "The mean of gradients at different parameters is no gradient. Fix: params = ltx.broadcast(params) before the "
    "first step gives every rank rank 0's values; or call torch.manual_seed alike on every rank. "
    "Where ranks are meant to have parameters of their own, ltx.block_backward_sync(step) keeps gradients local."
)


def check_params_once(axis: Axis, params: Tree, fn: Any, key: Hashable, signature: comm.Signature | None) -> None:
    """Raise ReplicaDivergedError on every rank unless `params`, which step `fn` is given, are the same on all.

    Between processes only the first call of `fn` with each `key` compares; all ranks must make it together. A peer that
    is elsewhere is told that this rank is at `signature`. Simulated ranks that share one value have nothing to compare;
    others are compared at every call.
    """
    axis_comm = axis.comm
    if axis.size == 1 or not (axis_comm or axis.simulated):
        return
    if axis_comm is not None and axis_comm.has_compared(fn, key):
        return
    found = zip(tree.leaf_paths(params), tree.flatten(params)[0], strict=True)
    # No transform around the step may see this.
    with torch._C._DisableFuncTorch(), torch.no_grad():
        leaves = [(path, leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]
        check_leaves(axis, leaves, _START, signature)
    if axis_comm is not None:
        axis_comm.count_as_compared(fn, key)


def check_leaves(
    axis: Axis, leaves: Sequence[tuple[str, torch.Tensor]], fix: str, signature: comm.Signature | None = None
) -> None:
    by_rank = digests_by_rank(axis, leaves, signature)
    if any(differs := [len(set(digests)) > 1 for digests in zip(*by_rank, strict=True)]):
        those = [[x for x, differ in zip(digests, differs, strict=True) if differ] for digests in by_rank]
        raise _diverged(axis.name, [leaf for leaf, differ in zip(leaves, differs, strict=True) if differ], those, fix)


def digests_by_rank(
    axis: Axis, leaves: Sequence[tuple[str, torch.Tensor]], signature: comm.Signature | None = None
) -> list[list[str]]:
    """Each rank's digests of `leaves`; where all are the same perhaps only this rank's."""
    if axis.comm:
        return _on_processes(axis.comm, leaves, signature)
    if axis.simulated:
        return _on_simulated_ranks(axis.simulated, axis.size, leaves)
    return [["" for _ in leaves]]


def _on_processes(
    axis_comm: comm.AxisComm, leaves: Sequence[tuple[str, torch.Tensor]], signature: comm.Signature | None
) -> list[list[str]]:
    """Each rank's digests: one of all leaves, unless they differ."""
    mine = [digest(values(leaf)) for _, leaf in leaves]
    whole = hashlib.blake2b("".join(mine).encode(), digest_size=16).hexdigest()
    if signature is None:
        signature = comm.Signature.of("check_replicas", [path for path, _ in leaves], [leaf for _, leaf in leaves])
    if len(set(axis_comm.exchange_values(signature, whole))) == 1:
        return [mine]
    return axis_comm.exchange_values(signature, mine)


def _on_simulated_ranks(backing: VmapBacking, size: int, leaves: Sequence[tuple[str, torch.Tensor]]) -> list[list[str]]:
    by_rank: list[list[str]] = [[] for _ in range(size)]
    for _, leaf in leaves:
        value, dim = with_ranks(leaf, backing)
        for rank, digests in enumerate(by_rank):
            digests.append("" if dim is None else digest(values(value.select(dim, rank))))
    return by_rank


def _diverged(
    axis_name: str, leaves: Sequence[tuple[str, torch.Tensor]], by_rank: Sequence[Sequence[str]], fix: str
) -> ReplicaDivergedError:
    """The error for `leaves` that differ, of which the ranks have these digests; `fix` says what to do."""
    size = len(by_rank)
    first = [digests[0] for digests in by_rank]
    most, count = Counter(first).most_common(1)[0]  # of several, rank 0's or the next
    odd = [rank for rank in range(size) if first[rank] != most]
    right = first.index(most)
    path, leaf = leaves[0]
    shape = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    those = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd[:8]))}{', ...' if len(odd) > 8 else ''}"
    than = f"what {count} of {size} ranks have" if 2 * count > size else f"rank {right} (no value has a majority)"
    names = ", ".join(repr(path) for path, _ in leaves[1:8])
    more = f" So do {len(leaves) - 1} more: {names}{', ...' if len(leaves) > 8 else '.'}" if len(leaves) > 1 else ""
    return ReplicaDivergedError(
        f"axis {axis_name!r}: leaf {path!r} ({shape}) should be the same on every rank, and differs on {those} from "
        f"{than}.{more} {fix.format(right=right)}"
    )


def with_ranks(x: torch.Tensor, backing: VmapBacking) -> tuple[torch.Tensor, int | None]:
    """`x` below all wrappers, and which dimension of that is the ranks'; None if they share one value."""
    if not backing.dims:
        return _with_level(x, backing.level)
    dims = [_with_level(x, level)[1] for level, _ in backing.dims]
    value = _with_level(x, backing.level)[0]
    here = [dim for dim in dims if dim is not None]
    if not here:
        return value, None
    value = value.movedim(here, list(range(len(here))))
    for place, (dim, (_, size)) in enumerate(zip(dims, backing.dims, strict=True)):
        if dim is None:
            value = value.unsqueeze(place)
            value = value.expand(*value.shape[:place], size, *value.shape[place + 1 :])
    return value.flatten(0, len(dims) - 1), 0


def _with_level(x: torch.Tensor, level: int) -> tuple[torch.Tensor, int | None]:
    """`x` below all wrappers, and which dimension of that is vmap's at `level`."""
    dim: int | None = None
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            here = _functorch.maybe_get_bdim(x)
            if _functorch.maybe_get_level(x) == level:
                dim = here
            elif dim is not None and here <= dim:
                dim += 1
        x = _functorch.get_unwrapped(x)
    return x.detach(), dim
