"""What makes ranks differ: their index, their random keys, and their part of a batch."""

from __future__ import annotations

from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import traced, tree
from ltx.core.base.arguments import checked
from ltx.core.base.errors import AxisError, UnsupportedError
from ltx.core.collectives.batches import Records, cells, is_records, opened
from ltx.core.collectives.calls import in_graph_index, prepare_trace, traced_rank
from ltx.core.collectives.psum import axis_size
from ltx.typing import Tree


@checked()
def axis_index(axis: Any = None) -> torch.Tensor:
    """This rank's position on an axis: a 0-dim int64 tensor on every backing, on this rank's device.

    Args:
        axis: as in :func:`ltx.psum`.

    Example:
        >>> import torch, ltx
        >>> ltx.axis_index()
        tensor(0)
        >>> ltx.vmap(lambda x: x * ltx.axis_index())(torch.ones(3))
        tensor([0., 1., 2.])
    """
    if traced.recording():
        return in_graph_index(prepare_trace(axis))
    found = comm.resolve(axis)
    if found.comm is None:
        return found.index()
    return torch.full((), found.comm.rank, dtype=torch.int64, device=found.comm.device)


@checked("seed")
def rank_seed(seed: int, axis: Any = None) -> int:
    """A seed of this rank's own, made from one that all share: for ``torch.Generator.manual_seed`` and the like.

    Args:
        seed: any Python int, the same on every rank.
        axis: as in :func:`ltx.psum`. Simulated ranks are one process: there draw with ``ltx.vmap(...,
            randomness="different")`` instead.

    Returns:
        An int of 63 bits; different ranks and different seeds give unrelated ones (SplitMix64).

    Example:
        >>> import ltx
        >>> ltx.rank_seed(0) == ltx.rank_seed(0), ltx.rank_seed(0) == ltx.rank_seed(1)
        (True, False)

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    found = comm.resolve(axis)
    rank = found.rank
    if not isinstance(rank, int):
        raise AxisError(
            f"rank_seed: the simulated ranks of axis {found.name!r} share one generator. They draw different numbers "
            'under ltx.vmap(f, randomness="different"), the default.'
        )
    z = (seed + (rank + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1


@checked("dim")
def shard(value: Tree, axis: Any = None, dim: int = 0) -> Tree:
    """This rank's part of a batch that every rank holds.

    Args:
        value: tree (:mod:`ltx.tree` says which containers are: dicts, lists, tuples, and any mapping or dataclass, such
            as a ``BatchEncoding``). Every tensor with dimensions is split along `dim` into as many equal parts as there
            are ranks, other leaves are passed on: numbers, strings, a list of strings. Along dim 0 all tensors have one
            length, with an entry a sample. A list or tuple of containers of one structure (dicts with the same keys)
            that is as long is split between them, as it holds records, one a sample.
        axis: as in :func:`ltx.psum`.
        dim: the dimension to split.

    Returns:
        What each rank sees: part ``axis_index`` of every tensor, a view where the axis isn't simulated.

    Gradient:
        That of indexing: the cotangent in this rank's part, 0 elsewhere.

    Raises:
        AxisError: a tensor doesn't divide evenly.
        TreeError: tensors have unequal lengths along dim 0; a list may be one of records or of fields; a leaf isn't a
            tensor and holds some (PackedSequence, graphs), or is a NumPy array, or a nested or sparse tensor.
        UnsupportedError: under ``ltx.vmap``, records that differ in shapes, or in what isn't a tensor.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(lambda x: ltx.shard(x), in_dims=None, axis_size=2)(torch.tensor([1, 2, 3, 4]))
        tensor([[1, 2],
                [3, 4]])
    """
    size = axis_size(axis)
    if traced.recording():
        rank, name = traced_rank(prepare_trace(axis)), axis
    else:
        found = comm.resolve(axis)
        name = found.name
        rank = found.rank if isinstance(found.rank, int) else None

    def mine(stacked: torch.Tensor) -> torch.Tensor:
        return stacked.index_select(0, axis_index(axis).reshape(1)).squeeze(0)

    def part(path: str, x: Any) -> Any:
        if isinstance(x, Records):
            if len(x.items) % size:
                raise AxisError(
                    f"shard: {path!r} is a list of {len(x.items)} records, which can't be split into {size} equal "
                    f"parts, one for each rank of axis {name!r}. Drop the remainder."
                )
            length = len(x.items) // size
            parts = [x.items[start : start + length] for start in range(0, len(x.items), length or 1)]
            return parts[rank] if rank is not None else tree.map(chosen, *parts)
        if not isinstance(x, torch.Tensor) or x.ndim == 0:
            return x
        if not -x.ndim <= dim < x.ndim or x.shape[dim] % size:
            raise AxisError(
                f"shard: leaf {path!r} of shape {list(x.shape)} can't be split along dim {dim} into {size} equal "
                f"parts, one for each rank of axis {name!r}. Drop or pad the remainder, or return ltx.Weighted from "
                "the step."
            )
        if not traced.recording():
            tree.check_dense([x], x, f"shard: {path}")
        at, length = dim % x.ndim, x.shape[dim] // size
        if rank is not None:
            return x.narrow(at, rank * length, length)
        return mine(x.unflatten(at, (size, length)).movedim(at, 0))

    def chosen(*parts: Any) -> Any:
        """This rank's part, where ranks are simulated."""
        if all(isinstance(x, torch.Tensor) and x.shape == parts[0].shape for x in parts):
            return mine(torch.stack(parts))
        if any(isinstance(x, torch.Tensor) for x in parts) or any(x != parts[0] for x in parts):
            raise UnsupportedError(
                "shard: the ranks of ltx.vmap have equal shapes and share all objects, and these records differ. Use "
                "ltx.simulate."
            )
        return parts[0]

    value, _ = opened(value, "shard", dim)
    parts, spec = cells(value)
    paths = [""] * len(parts) if traced.recording() else tree.leaf_paths(value, is_leaf=is_records)
    return tree.unflatten(spec, [part(path, x) for path, x in zip(paths, parts, strict=True)])
