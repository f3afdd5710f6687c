"""Comparison of parameters between ranks at each call of a step, under ``ltx.debug_checks()``.

Ranks exchange a digest of each leaf. Only where these differ does data move: rank 0's leaf, which each rank compares
with its own to say by how much.
"""

from __future__ import annotations

import torch

from ltx import comm, tree
from ltx.axis import Axis
from ltx.backings import VmapBacking
from ltx.comm.debug import under_way
from ltx.errors import ReplicaDivergedError
from ltx.transforms.compare import with_ranks
from ltx.transforms.digests import bits, digest, values
from ltx.typing import Tree

_FIX = (
    "Fix: start from the same values on every rank (train.init(params), or ltx.broadcast(params)), and change them by "
    "synchronised steps alone."
)


def check_in_debug(axis: Axis, params: Tree) -> None:
    """Under ``ltx.debug_checks()``: raise ReplicaDivergedError on every rank unless `params` are the same on all."""
    if not under_way:
        return
    found = zip(tree.leaf_paths(params), tree.flatten(params)[0], strict=True)
    leaves = {path: leaf for path, leaf in found if isinstance(leaf, torch.Tensor)}
    # Transforms around the step must not see this.
    with torch._C._DisableFuncTorch(), torch.no_grad():
        if axis.comm:
            _check_processes(axis.comm, {path: values(leaf) for path, leaf in leaves.items()})
        elif axis.threads:
            _check_threads(axis.threads, {path: values(leaf) for path, leaf in leaves.items()})
        elif axis.simulated:
            _check_simulated(axis, axis.simulated, leaves)


def _check_processes(axis_comm: comm.AxisComm, leaves: dict[str, torch.Tensor]) -> None:
    signature = comm.Signature.of("the parameters of data_parallel", list(leaves), list(leaves.values()))
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
    raise _diverged(axis_comm.name, differ, mine, told, f" This is the step called at {posts[0].caller}.")


def _check_threads(threads: comm.ThreadComm, leaves: dict[str, torch.Tensor]) -> None:
    signature = comm.Signature.of("the parameters of data_parallel", list(leaves), list(leaves.values()))
    first, *others = threads.exchange(signature, leaves)
    found = {path: {r: _difference(x[path], first[path]) for r, x in enumerate(others, 1)} for path in leaves}
    if differ := [path for path, by_rank in found.items() if any(by_rank.values())]:
        told = {rank: text for rank, text in found[differ[0]].items() if text}
        raise _diverged(threads.name, differ, first[differ[0]], told, "")


def _check_simulated(axis: Axis, backing: VmapBacking, leaves: dict[str, torch.Tensor]) -> None:
    part = backing.part
    differ: dict[str, tuple[torch.Tensor, dict[int, str]]] = {}
    together = {tuple(range(axis.size))} if part is None else {tuple(part.members(r)) for r in range(part.world)}
    for path, leaf in leaves.items():
        value, dim = with_ranks(leaf, backing)
        if dim is None:
            continue  # one value that all simulated ranks share
        all_values = [values(x) for x in value.unbind(dim)]
        for members in sorted(together):
            first, *others = (all_values[rank] for rank in members)
            told = {rank: _difference(x, first) for rank, x in enumerate(others, 1) if digest(x) != digest(first)}
            if told and path not in differ:
                differ[path] = first, told
    if differ:
        raise _diverged(axis.name, list(differ), *next(iter(differ.values())), "")


def _diverged(
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
