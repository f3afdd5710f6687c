"""Compare tensors between ranks by their digests: at the first call of a step, and under debug_checks() at each."""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import private, tree
from ltx.core.base.callers import caller
from ltx.core.base.errors import ReplicaDivergedError
from ltx.core.comm.peers import under_way
from ltx.core.ranks.axis import Axis
from ltx.core.transforms.sync_state import plain_values
from ltx.typing import Tree

_START = (
    "The mean of gradients at different parameters is no gradient. Fix: params = ltx.broadcast(params) before the "
    "first step gives every rank rank 0's values; or call torch.manual_seed alike on every rank. Ranks of ltx.vmap "
    "draw different numbers after one seed: make parameters outside of it, or with randomness='same'. "
    "Where ranks are meant to have parameters of their own, ltx.block_backward_sync(step) keeps gradients local."
)
_FIX = (
    "Fix: start from the same values on every rank (train.init(params), or ltx.broadcast(params)), and change them by "
    "synchronised steps alone."
)
_COLUMNS = 512
#: Below this many words of 8 bytes, a cryptographic hash of all bytes takes no longer.
_SMALL = 8 * _COLUMNS
#: Tensors with their paths.
Leaves = Sequence[tuple[str, torch.Tensor]]


def check_params_once(axis: Axis, params: Tree, fn: Any, key: Hashable, signature: comm.Signature | None) -> None:
    """Raise ReplicaDivergedError on every rank unless `params`, which step `fn` is given, are the same on all: between
    processes at the first call of `fn` with each `key`, on simulated ranks, which mostly share them, at each.
    """
    compared = axis.ranks.compared
    if axis.size == 1 or (compared is not None and compared.has(fn, key)):
        return
    check_leaves(axis, tensors_by_path(params), _START, signature or "check_replicas")
    if compared is not None:
        compared.add(fn, key)


def tensors_by_path(value: Tree) -> list[tuple[str, torch.Tensor]]:
    found = zip(tree.leaf_paths(value), tree.flatten(value)[0], strict=True)
    return [(path, leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]


def check_leaves(axis: Axis, leaves: Leaves, fix: str, said: comm.Signature | str = "check_replicas") -> None:
    """Raise ReplicaDivergedError on every rank unless `leaves` are the same on all; `fix` says what to do."""
    every = digests_by_rank(axis, leaves, said)
    differ = [place for place, digests in enumerate(zip(*every, strict=True)) if len(set(digests)) > 1]
    if not differ:
        return
    first, size = [digests[differ[0]] for digests in every], len(every)
    most, count = Counter(first).most_common(1)[0]  # of equally frequent values, this takes the one of the lowest rank
    odd, right = [rank for rank in range(size) if first[rank] != most], first.index(most)
    path, leaf = leaves[differ[0]]
    those = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd[:8]))}{', ...' if len(odd) > 8 else ''}"
    than = f"what {count} of {size} ranks have" if 2 * count > size else f"rank {right} (no value has a majority)"
    names = ", ".join(repr(leaves[place][0]) for place in differ[1:8])
    more = f" So do {len(differ) - 1} more: {names}{', ...' if len(differ) > 8 else '.'}" if len(differ) > 1 else ""
    raise ReplicaDivergedError(
        f"axis {axis.name!r}: leaf {path!r} ({tree.describe(leaf)}) should be the same on every rank, and differs on "
        f"{those} from {than}.{more} {fix.format(right=right)}"
    )


def digests_by_rank(axis: Axis, leaves: Leaves, said: comm.Signature | str = "check_replicas") -> list[list[str]]:
    """Each rank's digests of `leaves`, "" for one that ranks share. `said`: the call or its name, for other peers."""
    paths, tensors = [path for path, _ in leaves], [leaf for _, leaf in leaves]
    signature = comm.Signature.of(said, paths, tensors) if isinstance(said, str) else said
    with private.below_transforms(), torch.no_grad():  # a transform around the step doesn't record the comparison
        return axis.ranks.by_rank(
            signature,
            lambda mine, apart: [digest(values(x)) if differs else "" for x, differs in zip(mine, apart, strict=True)],
            tensors,
        )


def values(x: torch.Tensor) -> torch.Tensor:
    """`x` without wrappers, and contiguous."""
    return plain_values(x).resolve_conj().resolve_neg().contiguous()


def hash_of(digests: Iterable[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def digest(x: torch.Tensor) -> str:
    """A digest, "" for an empty tensor. It hashes sums of 64-bit words, modulo 2^64, over rows and over columns: a
    change that keeps all of them needs four words, at the corners of a rectangle.
    """
    data = x.view(-1).view(torch.uint8)
    if not data.numel():
        return ""
    found, words = hashlib.blake2b(digest_size=16), data.numel() // (8 * _COLUMNS) * _COLUMNS
    if words >= _SMALL:
        head = data[: 8 * words]
        table = (head if head.storage_offset() % 8 == 0 else head.clone()).view(torch.int64).view(-1, _COLUMNS)
        found.update(bytes_of(table.sum(1)))
        found.update(bytes_of(table.sum(0)))
        data = data[8 * words :]
    if data.numel():
        found.update(bytes_of(data))
    return found.hexdigest()


def bytes_of(x: torch.Tensor) -> bytes:
    """The bytes of a tensor that :func:`values` returned, without NumPy."""
    x = x.cpu()
    return ctypes.string_at(x.data_ptr(), x.numel() * x.itemsize)


def check_in_debug(axis: Axis, params: Tree) -> None:
    """Under ``ltx.debug_checks()``: raise ReplicaDivergedError on every rank unless `params` are the same on all."""
    if not under_way:
        return
    where = f"This is the step called at {caller()}. " if axis.ranks.overlaps else ""
    check_leaves(axis, tensors_by_path(params), where + _FIX, "the parameters of data_parallel")
