"""check_replicas: are the parts of a state that should be the same on every rank the same? sync_params: make them so.

What makes ranks drift apart without a word: memory or links that flip bits, kernels that differ between machines,
parameters changed by hand on one rank. Gradients are averaged all the same, so nothing shows it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar, cast

import torch

from ltx import collectives, tree, wire
from ltx.arguments import checked
from ltx.axis import Axis, GroupBacking, VmapBacking
from ltx.errors import ReplicaDivergedError
from ltx.transforms.digests import digest, values
from ltx.transforms.replicas import with_ranks
from ltx.transforms.train_state import TrainState
from ltx.typing import Tree

State = TypeVar("State")

_REPAIR = (
    "Take the values of a rank that has the right ones: ltx.sync_params(state, src={right}), or "
    "train.broadcast(state, src={right}) for all of a training state, what is each rank's own included."
)
_START = (
    "The mean of gradients at different parameters is no gradient. Fix: params = ltx.broadcast(params) before the "
    "first step gives every rank rank 0's values; or call torch.manual_seed alike on every rank. "
    "Where ranks are meant to have parameters of their own, ltx.block_backward_sync(step) keeps gradients local."
)


def check_replicas(state: TrainState | Tree, axis: Any = None) -> None:
    """Raise unless all ranks have the same bits where they should. Every rank calls it.

    Digests of all leaves are compared through the store: a few milliseconds, and nothing is sent that training waits
    for. ``train_step(..., check_every=k)`` does so before every k-th step.

    Args:
        state: a training state, of which those parts are compared that its strategy keeps the same on all ranks
            (``state.kinds``); or a tree of tensors, all of them.
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
    _check_leaves(wire.resolve(axis), _replicated(state), _REPAIR)


def check_params_once(axis: Axis, params: Tree, fn: Any, key: Hashable, signature: wire.Signature | None) -> None:
    """Raise ReplicaDivergedError on every rank unless `params`, which step `fn` is given, are the same on all.

    Between processes only the first call of `fn` with each `key` compares; all ranks must make it together. A peer that
    is elsewhere is told that this rank is at `signature`. Simulated ranks that share one value have nothing to compare;
    others are compared at every call.
    """
    line = axis.backing.line if isinstance(axis.backing, GroupBacking) else None
    if axis.size == 1 or not isinstance(axis.backing, GroupBacking | VmapBacking):
        return
    if line is not None and line.has_compared(fn, key):
        return
    found = zip(tree.leaf_paths(params), tree.flatten(params)[0], strict=True)
    # No transform around the step may see this.
    with torch._C._DisableFuncTorch(), torch.no_grad():
        leaves = [(path, leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]
        _check_leaves(axis, leaves, _START, signature)
    if line is not None:
        line.count_as_compared(fn, key)


def _check_leaves(
    axis: Axis, leaves: Sequence[tuple[str, torch.Tensor]], fix: str, signature: wire.Signature | None = None
) -> None:
    by_rank = _digests(axis, leaves, signature)
    if any(differs := [len(set(digests)) > 1 for digests in zip(*by_rank, strict=True)]):
        those = [[x for x, differ in zip(digests, differs, strict=True) if differ] for digests in by_rank]
        raise _diverged(axis.name, [leaf for leaf, differ in zip(leaves, differs, strict=True) if differ], those, fix)


@checked("src")
def sync_params(state: State, src: int | None = None, axis: Any = None) -> State:
    """`state` with the same values on every rank where ranks should have the same: repairs what has drifted apart.

    Args:
        state: as for :func:`check_replicas`; the same structure, shapes and dtypes on every rank.
        src: whose values are taken. None: those that most ranks have, in all leaves.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: `src`'s values, in tensors of its own; `state` itself where nothing differs and `src` is
        None. What a strategy keeps for each rank alone stays as it is. Not part of a graph: no gradient flows back.

    Raises:
        ReplicaDivergedError: on every rank: `src` is None, and no value is that of more than half of the ranks.
        RankMismatchError: ranks come with different structures, shapes or dtypes.
        AxisError: `src` isn't on the axis.

    Example:
        >>> import torch, ltx
        >>> ltx.vmap(ltx.sync_params)(torch.tensor([1.0, 3.0, 1.0]))
        tensor([1., 1., 1.])
    """
    found = wire.resolve(axis)
    leaves = _replicated(state)
    if src is None:
        by_rank = _digests(found, leaves)
        if not any(len(set(digests)) > 1 for digests in zip(*by_rank, strict=True)):
            return state
        most, count = Counter(map(tuple, by_rank)).most_common(1)[0]
        if 2 * count <= found.size:
            check_replicas(state, axis)
        src = list(map(tuple, by_rank)).index(most)
    same = collectives.broadcast([leaf for _, leaf in leaves], src, axis)
    by_path = {path: leaf.detach() for (path, _), leaf in zip(leaves, same, strict=True)}
    everything, spec = tree.flatten(state)
    return cast(
        State,
        tree.unflatten(
            spec, [by_path.get(path, x) for path, x in zip(tree.leaf_paths(state), everything, strict=True)]
        ),
    )


def _digests(
    axis: Axis, leaves: Sequence[tuple[str, torch.Tensor]], signature: wire.Signature | None = None
) -> list[list[str]]:
    """Each rank's digests of `leaves`; where all are the same perhaps only this rank's."""
    match axis.backing:
        case GroupBacking(line=line):
            return _on_processes(line, leaves, signature)
        case VmapBacking() as backing:
            return _on_simulated_ranks(backing, axis.size, leaves)
        case _:
            return [["" for _ in leaves]]


def fingerprint(state: TrainState) -> str:
    """Equal on ranks whose replicated parts have the same bits. Asks nobody."""
    digests = "".join(f"{path} {digest(values(leaf))}" for path, leaf in _replicated(state))
    return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()


def _replicated(state: Tree) -> list[tuple[str, torch.Tensor]]:
    """(path, tensor) of what should be the same on every rank."""
    found = zip(tree.leaf_paths(state), tree.flatten(state)[0], strict=True)
    if not isinstance(state, TrainState):
        return [(path, leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]
    state.check_owned()
    parts = {
        part for part in ("params", "buffers", "opt_state", "sync_state") if getattr(state.kinds, part) == "replicated"
    } | {"loss_scale", "frozen"}
    return [(path, leaf) for path, leaf in found if path.partition(".")[0] in parts]


def _on_processes(
    line: wire.Line, leaves: Sequence[tuple[str, torch.Tensor]], signature: wire.Signature | None
) -> list[list[str]]:
    """Each rank's digests: one of all leaves, unless they differ."""
    mine = [digest(values(leaf)) for _, leaf in leaves]
    whole = hashlib.blake2b("".join(mine).encode(), digest_size=16).hexdigest()
    if signature is None:
        signature = wire.Signature.of("check_replicas", [path for path, _ in leaves], [leaf for _, leaf in leaves])
    if len(set(line.meet_aside(line.notes.begin(), signature, whole))) == 1:
        return [mine]
    return line.meet_aside(line.notes.begin(), signature, mine)


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
