"""check_replicas compares the values that should be the same on all ranks; sync_params makes them the same.

Ranks silently drift apart if bits flip, kernels differ, or a program changes parameters on one rank; nothing shows it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, TypeVar, cast

import torch

from ltx.core import collectives, comm
from ltx.core.base import private, tree
from ltx.core.base.arguments import checked
from ltx.core.base.errors import EqualBatchesWarning
from ltx.core.ranks.axis import Axis
from ltx.core.training.train_state import TrainState, counted, counts_of
from ltx.core.transforms.compare import check_leaves, digest, digests_by_rank, hash_of, tensors_by_path, values
from ltx.typing import Tree

State = TypeVar("State")

_REPAIR = (
    "Take the values of a rank that has the right ones: ltx.sync_params(state, src={right}), or "
    "train.broadcast(state, src={right}) for a whole training state, also parts that differ between ranks."
)


def check_replicas(state: TrainState | Tree, axis: Any = None) -> None:
    """Raise unless ranks have the same bits in all values that should be the same on every rank. Every rank calls it.

    Ranks compare digests of all leaves through the store. That takes a few milliseconds, and training doesn't wait for
    its messages. ``train_step(..., check_every=k)`` does so before every k-th step.

    Args:
        state: a training state: the parts that its strategy keeps equal on all ranks (``state.layout``) are compared,
            and if parameters are equal, so are the counts of steps and of optimizer updates. Or any tree of tensors.
        axis: as in :func:`ltx.psum`.

    Raises:
        ReplicaDivergedError: on every rank; names the leaves, and the ranks that differ from most others.

    Example:
        >>> import torch, ltx
        >>> def on_a_rank(x):
        ...     ltx.check_replicas({"w": x})
        ...     return x
        >>> ltx.vmap(on_a_rank)(torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 3.0]]))
        Traceback (most recent call last):
        ...
        ltx.errors.ReplicaDivergedError: axis 'data': leaf 'w' (float32[2]) should be the same on every rank, ...
    """
    leaves, counts = _alike(state)
    check_leaves(comm.resolve(axis), [*leaves, *counts], _REPAIR)


@checked("src")
def sync_params(state: State, src: int | None = None, axis: Any = None) -> State:
    """Repair a drift: `state` with the same values on every rank in all parts that should be the same.

    Args:
        state: as for :func:`check_replicas`; the same structure, shapes and dtypes on every rank.
        src: the rank whose values all ranks get. If None, all get the values that most ranks have in all leaves.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: `src`'s values, in its own tensors; `state` itself if nothing differs and `src` is None.
        Tensors that a strategy keeps for each rank alone don't change. No gradient flows back.

    Raises:
        ReplicaDivergedError: on every rank: `src` is None, and no more than half of the ranks agree.
        RankMismatchError: structures, shapes or dtypes differ between ranks.
        AxisError: `src` isn't on the axis.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.sync_params)(torch.tensor([1.0, 3.0, 1.0]))
        tensor([1., 1., 1.])
    """
    found = comm.resolve(axis)
    leaves, counts = _alike(state)
    if src is None:
        by_rank = digests_by_rank(found, [*leaves, *counts])
        most, count = Counter(map(tuple, by_rank)).most_common(1)[0]
        if count == found.size:
            return state
        if 2 * count <= found.size:
            check_replicas(state, axis)
        src = by_rank.index([*most])
    same = collectives.broadcast([leaf for _, leaf in leaves], src, axis)
    by_path = {path: leaf.detach() for (path, _), leaf in zip(leaves, same, strict=True)}
    everything, spec = tree.flatten(state)
    filled = [by_path.get(path, x) for path, x in zip(tree.leaf_paths(state), everything, strict=True)]
    synced = tree.unflatten(spec, filled)
    if counts:
        synced = counted(synced, *collectives.broadcast_object([int(count) for _, count in counts], src, axis))
    return cast(State, synced)


def warn_of_equal_batches(batch: Tree, axis: Axis) -> None:
    """Warn, on rank 0, if all ranks have the same bits in a batch's tensors; those without dimensions don't count."""
    found = [x for x in tree.flatten(batch)[0] if isinstance(x, torch.Tensor) and x.ndim]
    plain = all(type(x) is torch.Tensor and x.layout is torch.strided and not x.is_meta for x in found)
    mine = hash_of(f"{x.dtype}{[*x.shape]}{digest(values(x))}" for x in found) if plain and found else ""
    by_rank = axis.ranks.by_rank(comm.Signature("train_step's first batch", ()), lambda *_: mine)
    if mine and axis.rank == 0 and axis.size == by_rank.count(mine) > 1:
        text = (
            f"train_step: all {axis.size} ranks of axis {axis.name!r} have the same batch in the first step, so each "
            "computes what the others do. Cut a batch that all ranks load: train(state, ltx.shard(batch)). Or load "
            "each rank's own: DataLoader(data, sampler=DistributedSampler(data, ltx.world().size, ltx.world().rank))."
        )
        warnings.warn(text, EqualBatchesWarning, stacklevel=1)


def _alike(state: Tree) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
    """(path, tensor) of what should be the same on every rank: of a tree's tensors, and of a train state's counts."""
    tree.refuse_dtensors(tree.flatten(state)[0], state, "values that are compared")
    if not isinstance(state, TrainState):
        return tensors_by_path(state), []
    state.check_owned()
    said = vars(state.layout)  # nothing of parts that are always the same
    same = [x for x in tensors_by_path(state) if said.get(x[0].partition(".")[0], "replicated") == "replicated"]
    # Where parameters differ, so may the counts of steps; simulated ranks share the structure with the counts.
    counted_alike = state.layout.params == "replicated" and not private.in_transform()
    return same, [*counts_of(state).items()] if counted_alike else []
