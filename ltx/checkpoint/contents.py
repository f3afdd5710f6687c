"""What of a train state a checkpoint holds, under which names, and which rank writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ltx import tree
from ltx.errors import UnsupportedError
from ltx.placements import is_dtensor
from ltx.strategies.shards import Shards
from ltx.strategies.state_layout import LeafLayout
from ltx.training.train_state import TrainState


@dataclass(frozen=True)
class Leaf:
    """A tensor of a state, and what it is a part of.

    Attributes:
        path: what errors call it, and the name under which it is saved if it is the same on every rank.
        tensor: this rank's.
        kind: how it relates across ranks.
        ranks: how many parts it has, if it is sharded.
        rank: which of them this is.
    """

    path: str
    tensor: torch.Tensor
    kind: LeafLayout = "replicated"
    ranks: int = 1
    rank: int = 0

    @property
    def size(self) -> torch.Size:
        """That of the whole, of which `tensor` is a part."""
        shape = self.tensor.shape
        return torch.Size((self.ranks * shape[0],)) if self.kind == "sharded" else shape

    @property
    def offsets(self) -> torch.Size:
        """Where in the whole `tensor` is."""
        shape = self.tensor.shape
        return torch.Size((self.rank * shape[0],) if self.kind == "sharded" else (0,) * len(shape))


def name_on(rank: int, path: str) -> str:
    """The name under which `rank`'s own value of the leaf at `path` is saved."""
    return f"rank_{rank}.{path}"


def leaves_of(state: TrainState) -> list[Leaf]:
    """The leaves of `state`, in the order of its flattening.

    Paths don't say which part of a sharded optimizer state this is, so that another number of ranks finds them.
    """
    shards = state.opt_state if isinstance(state.opt_state, Shards) else None
    if shards is not None and shards.rank is None:
        shards = None  # simulated ranks: all parts in one tensor
    layout, leaves = state.layout, []
    for path, tensor in zip(tree.leaf_paths(state), tree.flatten(state)[0], strict=True):
        if is_dtensor(tensor):
            raise UnsupportedError(
                f"ltx.checkpoint: leaf {path!r} is a DTensor, of which this format would keep one rank's part. Use "
                "torch's, which keeps each part once: torch.distributed.checkpoint.save({'state': state}, "
                "checkpoint_id=path), and load(...) the same."
            )
        part, _, rest = path.partition(".")
        if part == "opt_state" and shards is not None:
            path = f"opt_state.{rest.removeprefix(shards.name + '.')}"
            cut = tensor.ndim == 1  # others are counters
            leaves.append(Leaf(path, tensor, "sharded", shards.ranks, shards.rank or 0) if cut else Leaf(path, tensor))
        elif path in ("sync_state.uses", "sync_state.clock"):
            leaves.append(Leaf(path, tensor))  # guards, which are the same in every state that can be saved
        else:
            kind: LeafLayout = getattr(layout, part, "replicated")
            leaves.append(Leaf(path, tensor, "replicated" if kind == "sharded" else kind))
    return leaves


def shared_out(replicated: Sequence[tuple[str, int]], ranks: int) -> list[int]:
    """Which rank writes each of (name, bytes): about as many bytes on each; the same answer on all of them.

    >>> shared_out([("a", 4), ("b", 1), ("c", 3)], 2)
    [0, 1, 1]
    """
    loads, writers = [0] * ranks, [0] * len(replicated)
    for place in sorted(range(len(replicated)), key=lambda i: (-replicated[i][1], replicated[i][0])):
        rank = loads.index(min(loads))
        writers[place] = rank
        loads[rank] += replicated[place][1]
    return writers
