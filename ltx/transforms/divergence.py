"""check_replicas: are the parts of a state that should be the same on every rank the same?

What makes ranks drift apart without a word: memory or links that flip bits, kernels that differ between machines,
parameters changed by hand on one rank. Gradients are averaged all the same, so nothing shows it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ltx import tree, wire
from ltx.axis import GroupBacking, VmapBacking
from ltx.errors import ReplicaDivergedError
from ltx.transforms.digests import digest, values
from ltx.transforms.replicas import with_ranks
from ltx.transforms.train_state import TrainState
from ltx.typing import Tree


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
    found = wire.resolve(axis)
    leaves = _replicated(state)
    match found.backing:
        case GroupBacking(line=line):
            by_rank = _on_processes(line, leaves)
        case VmapBacking(level=level):
            by_rank = _on_simulated_ranks(level, found.size, leaves)
        case _:
            return
    differ = [i for i, digests in enumerate(zip(*by_rank, strict=True)) if len(set(digests)) > 1]
    if differ:
        raise _diverged(found.name, [leaves[i] for i in differ], [[digests[i] for i in differ] for digests in by_rank])


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
    } | {"loss_scale"}
    return [(path, leaf) for path, leaf in found if path.partition(".")[0] in parts]


def _on_processes(line: wire.Line, leaves: Sequence[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Each rank's digests: one of all leaves, unless they differ."""
    mine = [digest(values(leaf)) for _, leaf in leaves]
    whole = hashlib.blake2b("".join(mine).encode(), digest_size=16).hexdigest()
    signature = wire.Signature.of("check_replicas", [path for path, _ in leaves], [leaf for _, leaf in leaves])
    if len(set(line.meet_aside(line.notes.begin(), signature, whole))) == 1:
        return [mine]
    return line.meet_aside(line.notes.begin(), signature, mine)


def _on_simulated_ranks(level: int, size: int, leaves: Sequence[tuple[str, torch.Tensor]]) -> list[list[str]]:
    by_rank: list[list[str]] = [[] for _ in range(size)]
    for _, leaf in leaves:
        value, dim = with_ranks(leaf, level)
        for rank, digests in enumerate(by_rank):
            digests.append("" if dim is None else digest(values(value.select(dim, rank))))
    return by_rank


def _diverged(
    axis_name: str, leaves: Sequence[tuple[str, torch.Tensor]], by_rank: Sequence[Sequence[str]]
) -> ReplicaDivergedError:
    """The error for `leaves` that differ, of which the ranks have these digests."""
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
        f"{than}.{more} Take the values of a rank that has the right ones: ltx.broadcast(params, src={right}), or "
        f"train.broadcast(state, src={right}) for all of a training state."
    )
