"""Comparing tensors between ranks by their digests, through the store or, in one process, in place.

Parameters are compared at the first call of a step, and under ``ltx.debug_checks()`` at every call. Only where digests
differ does data move, and only under debug_checks: rank 0's leaf, which each rank compares with its own to say by how
much.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch._C import _functorch

from ltx.core import comm
from ltx.core.base import tree
from ltx.core.base.errors import ReplicaDivergedError
from ltx.core.base.placements import local
from ltx.core.comm.debug import under_way
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import VmapBacking
from ltx.core.transforms.sync_state import plain_values
from ltx.typing import Tree

_START = (
    "The mean of gradients at different parameters is no gradient. Fix: params = ltx.broadcast(params) before the "
    "first step gives every rank rank 0's values; or call torch.manual_seed alike on every rank. Ranks of ltx.vmap "
    "draw different numbers after one seed: make parameters outside of it, or with randomness='same'. "
    "Where ranks are meant to have parameters of their own, ltx.block_backward_sync(step) keeps gradients local."
)


def check_params_once(axis: Axis, params: Tree, fn: Any, key: Hashable, signature: comm.Signature | None) -> None:
    """Raise ReplicaDivergedError on every rank unless `params`, which step `fn` is given, are the same on all.

    Between processes and threads only the first call of `fn` with each `key` compares; all ranks must make it together.
    A peer that is elsewhere is told that this rank is at `signature`. Ranks of a vmap level that share one value have
    nothing to compare; others are compared at every call.
    """
    axis_comm = axis.comm or axis.threads
    if axis.size == 1 or not (axis_comm or axis.simulated):
        return
    if axis_comm is not None and axis_comm.compared.has(fn, key):
        return
    # No transform around the step may see this.
    with torch._C._DisableFuncTorch(), torch.no_grad():
        check_leaves(axis, tensors_by_path(params), _START, signature)
    if axis_comm is not None:
        axis_comm.compared.add(fn, key)


def tensors_by_path(value: Tree) -> list[tuple[str, torch.Tensor]]:
    """The tensors in `value`, each with its path."""
    found = zip(tree.leaf_paths(value), tree.flatten(value)[0], strict=True)
    return [(path, leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]


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
    if backing := axis.simulated:
        by_rank: list[list[str]] = [[] for _ in range(axis.size)]
        for value, dim in (with_ranks(leaf, backing) for _, leaf in leaves):
            for rank, digests in enumerate(by_rank):
                digests.append("" if dim is None else digest(values(value.select(dim, rank))))
        return by_rank
    if not (axis.comm or axis.threads):
        return [["" for _ in leaves]]
    mine = [digest(values(leaf)) for _, leaf in leaves]
    paths, tensors = [path for path, _ in leaves], [leaf for _, leaf in leaves]
    signature = signature or comm.Signature.of("check_replicas", paths, tensors)
    exchange = axis.threads.exchange if axis.threads else axis.comm.negotiation.exchange_values
    # Through the store one digest of all leaves, unless they differ.
    whole = hash_of(mine)
    if axis.comm and len(set(exchange(signature, whole))) == 1:
        return [mine]
    gathered: list[list[str]] = exchange(signature, mine)
    return gathered


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


_COLUMNS = 512
#: Below so many words of 8 bytes a cryptographic digest of everything costs as little.
_SMALL = 8 * _COLUMNS


def values(x: torch.Tensor) -> torch.Tensor:
    """`x` below all wrappers, its elements one after another in memory; of a DTensor this rank's part."""
    return plain_values(local(x)).resolve_conj().resolve_neg().contiguous()


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that :func:`values` gave."""
    return x.view(-1).view(torch.uint8)


def hash_of(digests: Iterable[str]) -> str:
    """One digest of several."""
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def digest(x: torch.Tensor) -> str:
    """Equal for equal bits, and different for others as good as always; "" for no elements.

    Sums of 64-bit words, modulo 2^64, over rows and over columns: changes that leave all of these as they were come by
    fours at least, at the corners of rectangles. (``torch.hash_tensor``, an exclusive or, is the same for elements in
    another order.)
    """
    data = bits(x)
    if not data.numel():
        return ""
    found, words = hashlib.blake2b(digest_size=16), data.numel() // (8 * _COLUMNS) * _COLUMNS
    if words >= _SMALL:
        head = data[: 8 * words]
        table = (head if head.storage_offset() % 8 == 0 else head.clone()).view(torch.int64).view(-1, _COLUMNS)
        found.update(_bytes(table.sum(1)))
        found.update(_bytes(table.sum(0)))
        data = data[8 * words :]
    if data.numel():
        found.update(_bytes(data))
    return found.hexdigest()


def _bytes(x: torch.Tensor) -> bytes:
    x = x.cpu()
    return ctypes.string_at(x.data_ptr(), x.numel() * x.itemsize)


_FIX = (
    "Fix: start from the same values on every rank (train.init(params), or ltx.broadcast(params)), and change them by "
    "synchronised steps alone."
)


def check_in_debug(axis: Axis, params: Tree) -> None:
    """Under ``ltx.debug_checks()``: raise ReplicaDivergedError on every rank unless `params` are the same on all."""
    if not under_way:
        return
    leaves = dict(tensors_by_path(params))
    # Transforms around the step must not see this.
    with torch._C._DisableFuncTorch(), torch.no_grad():
        if backing := axis.simulated:
            part = backing.part
            everyone = {tuple(range(axis.size))}
            together = everyone if part is None else {tuple(part.members(r)) for r in range(part.world)}
            split = {path: with_ranks(leaf, backing) for path, leaf in leaves.items()}
            # Where there is no dimension of ranks, all share one value.
            apart = [(path, x.unbind(dim)) for path, (x, dim) in split.items() if dim is not None]
            _check_here(axis.name, together, {path: list(map(values, of_ranks)) for path, of_ranks in apart})
            return
        own = {path: values(leaf) for path, leaf in leaves.items()}
        signature = comm.Signature.of("the parameters of data_parallel", list(own), list(own.values()))
        if axis.comm:
            _check_processes(axis.comm, signature, own)
        elif axis.threads:
            by_rank = axis.threads.exchange(signature, own)
            _check_here(axis.name, {tuple(range(axis.size))}, {path: [own[path] for own in by_rank] for path in own})


def _check_processes(axis_comm: comm.AxisComm, signature: comm.Signature, leaves: dict[str, torch.Tensor]) -> None:
    posts = under_way[-1].exchange(axis_comm, signature, [digest(leaf) for leaf in leaves.values()])
    by_leaf = zip(leaves, zip(*(post.value for post in posts), strict=True), strict=True)
    differ = [path for path, digests in by_leaf if len(set(digests)) > 1]
    if not differ:
        return
    mine = leaves[differ[0]]
    sent = bits(mine).to(axis_comm.device, copy=True)
    theirs = axis_comm.user.issue("broadcast", sent, "debug_checks", (0,)).wait().to(mine.device)
    found = _difference(mine, theirs.view(mine.dtype).view(mine.shape))
    by_rank = under_way[-1].exchange(axis_comm, comm.Signature(f"the difference in leaf {differ[0]!r}", ()), found)
    told = {rank: post.value for rank, post in enumerate(by_rank) if post.value}
    raise _diverged_in_debug(axis_comm.name, differ, mine, told, f" This is the step called at {posts[0].caller}.")


def _check_here(axis_name: str, together: set[tuple[int, ...]], by_rank: dict[str, list[torch.Tensor]]) -> None:
    """Compare the values of ranks of this process; those of `together` should be the same."""
    differ: dict[str, tuple[torch.Tensor, dict[int, str]]] = {}
    for path, of_ranks in by_rank.items():
        for members in sorted(together):
            first, *others = (of_ranks[rank] for rank in members)
            told = {rank: text for rank, x in enumerate(others, 1) if (text := _difference(x, first))}
            if told:
                differ.setdefault(path, (first, told))
    if differ:
        raise _diverged_in_debug(axis_name, list(differ), *next(iter(differ.values())), "")


def _diverged_in_debug(
    axis_name: str, paths: list[str], leaf: torch.Tensor, by_rank: dict[int, str], where: str
) -> ReplicaDivergedError:
    """The error for the leaves at `paths`, of which `leaf` is the first; `by_rank` tells how it differs."""
    more = f" {len(paths)} leaves differ: {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}."
    return ReplicaDivergedError(
        f"axis {axis_name!r}: parameters should be the same on every rank, but leaf {paths[0]!r} "
        f"({tree.describe(leaf)}) isn't rank 0's on {comm.list_values(by_rank)}.{more if len(paths) > 1 else ''}"
        f"{where} {_FIX}"
    )


def _difference(mine: torch.Tensor, theirs: torch.Tensor) -> str:
    """How `mine` differs from `theirs`, bit by bit; "" if it doesn't."""
    size = mine.element_size()
    differ = (bits(mine) != bits(theirs)).view(-1, size).any(1)
    count = int(differ.sum())
    if not count:
        return ""
    wide = torch.complex128 if mine.is_complex() else torch.float64
    a, b = mine.view(-1).to(wide), theirs.view(-1).to(wide)
    distance = torch.where(differ, (a - b).abs(), -1.0)
    worst = int(distance.argmax())  # NaN, if there is one
    at = [int(i) for i in torch.unravel_index(torch.tensor(worst), mine.shape)] if mine.ndim else []
    value, other = (t.view(-1)[worst].item() for t in (mine, theirs))
    by = f"by {float(distance[worst]):.6g} ({value!r} instead of {other!r})"
    return f"{count} of {differ.numel()} elements differ, most at {at}, {by}"
