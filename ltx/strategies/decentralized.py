"""Decentralized: ranks share weights instead of gradients, and each has its own (D-PSGD).

    y_t^r = mean_s x_t^s   ("all")   or   (x_t^r + x_t^peer) / 2   ("shift_one")
    x_{t+1}^r = update(y_t^r, grad f_r(x_t^r))

Lian et al., "Can decentralized algorithms outperform centralized algorithms? A case study for decentralized parallel
stochastic gradient descent", NeurIPS 2017, algorithm 1; the pairs are those of Bagua (Gan et al., "BAGUA: Scaling up
distributed learning with system relaxations", VLDB 2022). As y needs nothing of the step's own gradients, weights are
exchanged in the background of the forward and the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from ltx import tree
from ltx.axis import Axis, GroupBacking
from ltx.errors import RankMismatchError, StrategyError
from ltx.hooks import AllReduce, CommHook
from ltx.hooks.base import check_whole
from ltx.strategies.base import Kinds, Moment, States, Strategy, Update, Updated
from ltx.sync.exchange import Exchange
from ltx.sync.reduction import Ask, Reduction, Share
from ltx.typing import Tree

# Numbers of steps are told apart modulo this power of two.
_BITS = 20


@dataclass(frozen=True, kw_only=True)
class Decentralized(Strategy):
    """Decentralized training: weights are averaged with one peer's or with everybody's, gradients stay local.

    What each rank sees: parameters and optimizer state of its own, and the loss of its own batch. Ranks that have
    failed apart are told: the number of steps travels with the weights.

    Args:
        peer_selection_mode: "all": the mean over all ranks, an all-reduce. "shift_one": ranks pair up, each of the
            lower half with one of the upper half, another at every communication; it sends each parameter once, and
            needs an even number of ranks.
        communication_interval: ranks communicate at every such step, the first included; others are local.

    Raises:
        StrategyError: a field's value isn't allowed; in a step, that "shift_one" has an odd number of ranks.

    Example:
        >>> from ltx.strategies.decentralized import peers
        >>> [peers(4, k) for k in range(3)]  # by communication, then by rank
        [(2, 3, 0, 1), (3, 2, 1, 0), (2, 3, 0, 1)]
    """

    peer_selection_mode: Literal["all", "shift_one"] = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.peer_selection_mode not in ("all", "shift_one"):
            raise StrategyError(
                f'Decentralized.peer_selection_mode must be "all" or "shift_one", got {self.peer_selection_mode!r}.'
            )
        check_whole(self, 1, "communication_interval")

    @property
    def kinds(self) -> Kinds:
        return Kinds(params="per_rank", opt_state="per_rank")

    def hook(self, step: int) -> None:
        return None

    def check_axis(self, axis: Axis) -> None:
        if self.peer_selection_mode == "shift_one" and axis.size % 2 and axis.size > 1:
            raise StrategyError(
                f'Decentralized.peer_selection_mode "shift_one" pairs ranks, and axis {axis.name!r} has {axis.size} of '
                'them. Use an even number of ranks, or peer_selection_mode="all".'
            )

    def begin(self, params: Tree, states: States, at: Moment, pending: object) -> Exchange | None:
        leaves = tree.flatten(params)[0]
        if at.step % self.communication_interval or at.axis.size == 1 or not leaves:
            return None
        paths = [*tree.leaf_paths(params), "number of steps"]
        return self.exchange(self._exchanged, [*leaves, step_tag(at.step, leaves[0])], paths, at, background=True)

    @property
    def _exchanged(self) -> CommHook:
        return AllReduce() if self.peer_selection_mode == "all" else ShiftOne(self.communication_interval)

    def update(self, update: Update, states: States, at: Moment, pending: Exchange | None) -> Updated:
        if pending is None:
            return super().update(update, states, at, None)
        x, spec = tree.flatten(update.params)
        *landed, tag = pending.land()[0]
        if self.peer_selection_mode == "all":
            _check_all(tag, at)
            y = [mean.clone() for mean in landed]  # in memory of its own, rather than a bucket's
        else:
            _check_peer(tag, at, self.communication_interval)
            y = [(mine + theirs) / 2 for mine, theirs in zip(x, landed, strict=True)]
        return super().update(replace(update, params=tree.unflatten(spec, y)), states, at, None)


def peers(n: int, k: int) -> tuple[int, ...]:
    """Each of n ranks' peer at communication k: the peer's peer is the rank itself, and n/2 pairings take turns."""
    half = n // 2
    return tuple((k + r) % half + half if r < half else (r - half - k) % half for r in range(n))


@dataclass(frozen=True)
class ShiftOne(CommHook):
    """What the peer has given, at communication ``step // communication_interval``."""

    exact: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    reads_step: ClassVar[bool] = True

    communication_interval: int = 1

    def scale(self, axis_size: int) -> float:
        return 1.0

    def reduce(self, share: Share) -> Reduction:
        pairs = enumerate(peers(share.axis_size, share.step // self.communication_interval))
        theirs = yield Ask("permute", share.flat, arguments=tuple(rank for pair in pairs for rank in pair))
        return theirs, share.states


# --- the number of steps, sent along -----------------------------------------------------------------------------------


def step_tag(step: int, like: torch.Tensor) -> torch.Tensor:
    """The bits of `step` and then their complements, each a 0 or a 1 of the dtype of `like`.

    Zeros are exact in every dtype, and under a mean of zeros only if all are: so whoever differs shows in a sum too.
    """
    bits = [step >> place & 1 for place in range(_BITS)]
    return torch.tensor([*bits, *(1 - bit for bit in bits)], dtype=like.dtype, device=like.device)


def _check_peer(tag: torch.Tensor, at: Moment, interval: int) -> None:
    if not isinstance(at.axis.backing, GroupBacking):
        return
    rank, theirs = at.axis.backing.rank, _step_of(tag)
    if theirs != at.step % (1 << _BITS):
        peer = peers(at.axis.size, at.step // interval)[rank]
        raise RankMismatchError(
            f"rank {rank}: its step {at.step} was to take the parameters of rank {peer}, which has sent those of its "
            f"own step {theirs}. Ranks must take the same number of steps. The state is as before the step; go on from "
            "one checkpoint on all ranks."
        )


def _check_all(tag: torch.Tensor, at: Moment) -> None:
    if not isinstance(at.axis.backing, GroupBacking):
        return
    mine = step_tag(at.step, tag)
    if bool(((mine == 0) & (tag != 0)).any()):
        raise RankMismatchError(
            f"rank {at.axis.backing.rank}: parameters were averaged at its step {at.step}, to which other ranks came "
            "at another step of theirs. Ranks must take the same number of steps. The state is as before the step; go "
            "on from one checkpoint on all ranks."
        )


def _step_of(tag: torch.Tensor) -> int:
    return sum(1 << place for place, bit in enumerate((tag[:_BITS] != 0).tolist()) if bit)
