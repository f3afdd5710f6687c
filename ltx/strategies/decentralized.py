"""Decentralized: ranks share weights instead of gradients, and each has its own (D-PSGD).

    y_t^r = mean_s x_t^s   ("all")   or   (x_t^r + x_t^peer) / 2   ("shift_one")
    x_{t+1}^r = update(y_t^r, grad f_r(x_t^r))

Lian et al., "Can decentralized algorithms outperform centralized algorithms? A case study for decentralized parallel
stochastic gradient descent", NeurIPS 2017, algorithm 1; the pairs are those of Bagua (Gan et al., "BAGUA: Scaling up
distributed learning with system relaxations", VLDB 2022). As y needs nothing of the step's own gradients, weights are
on their way during the forward and the backward pass. They go by the buckets' channels, which gradients leave to them:
through shared memory, where nothing moves meanwhile, that still is less work for a core than sockets are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

import torch

from ltx.errors import RankMismatchError, StrategyError
from ltx.extend import (
    Axis,
    BucketInput,
    CollectiveRequest,
    Exchange,
    Reduction,
    StateLayout,
    States,
    StepInfo,
    Update,
    Updated,
    arguments,
    comm,
    tree,
)
from ltx.hooks import AllReduce, CommHook
from ltx.strategies.nodes import AmongNodes, FromParts, NodeStrategy, ToParts
from ltx.typing import Tree


@dataclass(frozen=True, kw_only=True)
class GossipStrategy(NodeStrategy):
    """What decentralized strategies have in common; not a strategy by itself.

    What each rank sees: parameters and optimizer state of its own, and the loss of its own batch. All of it is work of
    :func:`ltx.train_step`; a data-parallel step by itself gives local gradients.

    Args:
        communication_interval: ranks communicate at every such step, the first included; others are local.
    """

    layout: ClassVar[StateLayout] = StateLayout(params="per_rank", opt_state="per_rank")

    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "communication_interval")

    def communicates(self, step: int) -> bool:
        """Whether ranks share weights in the step after `step` others."""
        return step % self.communication_interval == 0

    @property
    def cycle(self) -> tuple[int, int]:
        return 0, self.communication_interval

    def hook(self, step: int) -> None:
        return None


# Numbers of steps are told apart modulo this power of two.
_BITS = 20


@dataclass(frozen=True, kw_only=True)
class Decentralized(GossipStrategy):
    """Decentralized training: weights are averaged with one peer's or with everybody's, gradients stay local.

    What each rank sees: as with every :class:`GossipStrategy`, parameters, optimizer state and loss of its own. Ranks
    that have taken different numbers of steps are told: the number travels with the weights, in 40 numbers more.

    Args:
        peer_selection_mode: "all": the mean over all ranks, an all-reduce. "shift_one": ranks pair up, each of the
            lower half with one of the upper half, another at every communication; it sends each parameter once, and
            needs an even number of ranks.
        communication_interval: as in :class:`GossipStrategy`.
        hierarchical, node_size: nodes of that many ranks begin with the mean of their weights, and gossip as ranks
            would. What is within a node doesn't wait for the forward pass; each of m ranks sends a part of an m-th of
            the parameters to other nodes.

    Raises:
        StrategyError: a field's value isn't allowed; in a step, that "shift_one" has an odd number of ranks (nodes).
        RankMismatchError: in a step, before the update: a peer is at another step.

    Example:
        >>> from ltx.strategies.decentralized import peers
        >>> [peers(4, k) for k in range(3)]  # by communication, then by rank
        [(2, 3, 0, 1), (3, 2, 1, 0), (2, 3, 0, 1)]
    """

    peer_selection_mode: Literal["all", "shift_one"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_fields(self, StrategyError, "peer_selection_mode")

    def check_axis(self, axis: Axis) -> None:
        super().check_axis(axis)
        count = axis.size // self.together
        if self.peer_selection_mode == "shift_one" and count % 2 and count > 1:
            what = "nodes" if self.hierarchical else "ranks"
            raise StrategyError(
                f'Decentralized.peer_selection_mode "shift_one" pairs {what}, and axis {axis.name!r} has {count} of '
                f'them. Use an even number of {what}, or peer_selection_mode="all".'
            )

    def begin(self, params: Tree, states: States, info: StepInfo, pending: object) -> Exchange | None:
        given = tree.flatten(params)[0]
        if not self.communicates(info.step) or info.axis.size == 1 or not given:
            return None
        paths = [*tree.leaf_paths(params), "number of steps"]
        given = [*given, step_tag(info.step, given[0])]
        gossip = AllReduce() if self.peer_selection_mode == "all" else ShiftOne(self.communication_interval)
        if self.node_size is None:
            return self.exchange(gossip, given, paths, info)
        given, _ = self.exchange(ToParts(self.node_size), given, paths, info, midway=True).wait()
        return self.exchange(AmongNodes(self.node_size, gossip), given, paths, info, midway=True)

    def update(self, update: Update, states: States, info: StepInfo, pending: Exchange | None) -> Updated:
        if pending is None:
            return super().update(update, states, info, None)
        spec, paths = tree.flatten(update.params)[1], [*tree.leaf_paths(update.params), "number of steps"]
        reduced, _ = pending.wait()
        if self.node_size is not None:
            reduced, _ = self.exchange(FromParts(self.node_size), reduced, paths, info).wait()
        *reduced, tag = reduced
        if info.axis.comm is not None:
            self._check(info.axis.comm.read(tag, "the number of steps"), info, info.axis.comm.rank)
        elif info.axis.threads is not None:
            self._check(tag, info, info.axis.threads.rank)
        # In memory of their own, rather than a bucket's.
        y = tree.unflatten(spec, [mean.clone() for mean in reduced])
        return super().update(replace(update, params=y), states, info, None)

    def _check(self, tag: torch.Tensor, info: StepInfo, rank: int) -> None:
        mine = step_tag(info.step, tag)
        if not bool(((mine == 0) & (tag != 0)).any()):
            return
        what = "others, which were at steps of their own"
        if self.peer_selection_mode == "shift_one" and not self.hierarchical:
            peer = peers(info.axis.size, info.step // self.communication_interval)[rank]
            what = f"those of rank {peer}, which was at its step {_step_of(2 * tag - mine)}"
        raise RankMismatchError(
            f"rank {rank}: its parameters, at step {info.step}, were averaged with {what}. Ranks must take the same "
            "number of steps. The state is as before the step; go on from one checkpoint on all ranks."
        )


@lru_cache(maxsize=16)
def peers(n: int, k: int) -> tuple[int, ...]:
    """Each of n ranks' peer at communication k: the peer's peer is the rank itself, and n/2 pairings take turns."""
    half = n // 2
    return tuple((k + r) % half + half if r < half else (r - half - k) % half for r in range(n))


@lru_cache(maxsize=16)
def pairing(n: int, k: int) -> tuple[int, ...]:
    """The same as a permutation: source, destination, source, ..."""
    return tuple(rank for pair in enumerate(peers(n, k)) for rank in pair)


@dataclass(frozen=True)
class ShiftOne(CommHook):
    """The mean of what this rank and its peer give, at communication ``step // communication_interval``."""

    exact: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    reads_step: ClassVar[bool] = True

    communication_interval: int = 1

    def scale(self, axis_size: int) -> float:
        return 1.0

    def reduce(self, inputs: BucketInput) -> Reduction:
        if inputs.axis_size == 1:
            return inputs.flat, inputs.states
        assert isinstance(inputs.step, int)  # no graph holds this hook
        mine = inputs.flat.clone()  # a buffer belongs to the channel once it is sent
        pairs = pairing(inputs.axis_size, inputs.step // self.communication_interval)
        theirs = yield CollectiveRequest("ppermute", inputs.flat, arguments=pairs)
        return theirs.add_(mine).div_(2), inputs.states


# --- the number of steps, sent along ----------------------------------------------------------------------------------


def step_tag(step: int, like: torch.Tensor) -> torch.Tensor:
    """The bits of `step` and then their complements, each a 0 or a 1 of the dtype of `like`.

    A mean of zeros is 0 to the last bit in every dtype, and one with a 1 among them isn't: so a mean of tags shows
    whether all were the same.
    """
    bits = [step >> place & 1 for place in range(_BITS)]
    return comm.to_device(torch.tensor([*bits, *(1 - bit for bit in bits)], dtype=like.dtype), like.device)


def _step_of(tag: torch.Tensor) -> int:
    return sum(1 << place for place, bit in enumerate((tag[:_BITS] != 0).tolist()) if bit)
