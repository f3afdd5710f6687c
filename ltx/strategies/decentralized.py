"""Decentralized, LowPrecisionDecentralized: ranks average weights instead of gradients, and weights differ.

    y_t^r = mean_s x_t^s   ("all")   or   (x_t^r + x_t^peer) / 2   ("shift_one")
    x_{t+1}^r = update(y_t^r, grad f_r(x_t^r))

D-PSGD: Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017, algorithm 1; the
pairs are those of Bagua (Gan et al., "BAGUA", VLDB 2022). As y doesn't depend on the step's gradients, weights are sent
during the forward and the backward pass, on the buckets' channels, which gradients don't need.

On a ring, ranks send differences of weights in eight bits, without error feedback (DCD-PSGD):

    z = x + L/3 + R/3 - 5/3 W          (= the mean of W, L, R, plus what the optimizer has done, less W)
    d = Q(z), sent to both neighbours
    L += d_left,  R += d_right,  x = W = W + d

Tang et al., "Communication compression for decentralized training", NeurIPS 2018, algorithm 1, in the form of Bagua's
"low_precision_decentralized". x are the weights after the optimizer, W are this rank's weights as its neighbours know
them, L and R are its copies of its neighbours' W. All copies of a W are equal to the bit: all add the same numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch

from ltx import extend
from ltx.errors import RankMismatchError, StrategyError
from ltx.extend import Axis, Bucket, Exchange, LeafState, Packing, Update, arguments, buffers, comm, exchange, tree
from ltx.hooks import AllReduce, BucketInput, ByteGrad, CollectiveRequest, CommHook, Reduction
from ltx.optim import Optimizer
from ltx.strategies import States, StepInfo, Updated
from ltx.strategies.ddp import APART
from ltx.strategies.nodes import ByNode, NodeHook, NodeStrategy, refuse_complex
from ltx.typing import Tree

_BITS = 20  # ranks compare their numbers of steps modulo 2 to this power
_CODEC = ByteGrad()


@dataclass(frozen=True, kw_only=True)
class GossipStrategy(NodeStrategy):
    """The base of the decentralized strategies. What each rank sees: its own parameters, optimizer state and loss. They
    need :func:`ltx.train_step`; a data-parallel step by itself gives local gradients.

    Args:
        communication_interval: ranks communicate at steps 0, `communication_interval`, and so on.
    """

    layout = APART

    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "communication_interval")

    def communicates(self, step: int) -> bool:
        """Whether ranks share weights in step `step`, counted from 0."""
        return step % self.communication_interval == 0

    @property
    def cycle(self) -> tuple[int, int]:
        return 0, self.communication_interval

    def hook(self, step: int) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Decentralized(GossipStrategy):
    """Decentralized training: weights are averaged with those of one peer or of all ranks, and gradients stay local.

    What each rank sees: as with every :class:`GossipStrategy`. Ranks that have taken different numbers of steps raise:
    40 extra numbers, sent with the weights, encode the number of steps.

    Args:
        peer_selection_mode: "all": the mean over all ranks, an all-reduce. "shift_one": ranks pair up, each of the
            lower half with one of the upper half, with a new peer at every communication; a rank sends each parameter
            once, and the number of ranks must be even.
        hierarchical, node_size: nodes of `node_size` ranks first average their weights, then nodes gossip as ranks
            would. The forward pass begins after the average within the node; each of its m ranks then sends an m-th.

    Raises:
        StrategyError: a field's value isn't allowed; in a step, "shift_one" has an odd number of ranks (nodes).
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

    def check(self, optimizer: Optimizer, axis: Axis | None = None) -> None:
        super().check(optimizer, axis)
        if axis is None:
            return
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
            return exchange(self, gossip, given, paths, info)
        given, _ = exchange(self, ByNode(self.node_size, steps=(1,)), given, paths, info).wait()
        return exchange(self, ByNode(self.node_size, gossip, (2,)), given, paths, info)

    def update(self, update: Update, states: States, info: StepInfo, pending: Exchange | None) -> Updated:
        if pending is None:
            return super().update(update, states, info, None)
        spec, paths = tree.flatten(update.params)[1], [*tree.leaf_paths(update.params), "number of steps"]
        reduced, _ = pending.wait()
        if self.node_size is not None:
            reduced, _ = exchange(self, ByNode(self.node_size, steps=(3,)), reduced, paths, info).wait()
        *reduced, tag = reduced
        if isinstance(info.axis.rank, int):
            self._check(info.axis.ranks.read(tag, "the number of steps"), info, info.axis.rank)
        y = tree.unflatten(spec, [mean.clone() for mean in reduced])  # the means are in a bucket's memory
        return super().update(replace(update, params=y), states, info, None)

    def _check(self, tag: torch.Tensor, info: StepInfo, rank: int) -> None:
        mine = step_tag(info.step, tag)
        if not bool(((mine == 0) & (tag != 0)).any()):
            return
        what = "others, which were at steps of their own"
        if self.peer_selection_mode == "shift_one" and not self.hierarchical:
            peer = peers(info.axis.size, info.step // self.communication_interval)[rank]
            bits = enumerate((2 * tag - mine)[:_BITS].ne(0).tolist())
            what = f"those of rank {peer}, which was at its step {sum(bit << place for place, bit in bits)}"
        raise RankMismatchError(
            f"rank {rank}: its parameters, at step {info.step}, were averaged with {what}. Ranks must take the same "
            "number of steps. The state is as before the step; go on from one checkpoint on all ranks."
        )


@lru_cache(maxsize=16)
def peers(n: int, k: int) -> tuple[int, ...]:
    """The peer of each of n ranks at communication k. Peers are mutual, and n/2 pairings take turns."""
    half = n // 2
    return tuple((k + r) % half + half if r < half else (r - half - k) % half for r in range(n))


@dataclass(frozen=True)
class ShiftOne(CommHook):
    """The mean of this rank's and its peer's values, at communication ``step // communication_interval``."""

    exact: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    reads_step: ClassVar[bool] = True

    communication_interval: int = 1

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        return Packing(dtype, 1.0, None)

    def reduce(self, inputs: BucketInput) -> Reduction:
        if inputs.axis_size == 1:
            return inputs.flat, inputs.states
        assert isinstance(inputs.step, int)  # no compiled graph has this hook, so `step` is an int
        mine = inputs.flat.clone()  # sending gives the buffer to the channel
        peer_of = peers(inputs.axis_size, inputs.step // self.communication_interval)
        pairs = tuple(rank for pair in enumerate(peer_of) for rank in pair)
        return (yield CollectiveRequest("ppermute", inputs.flat, arguments=pairs)).add_(mine).div_(2), inputs.states


def step_tag(step: int, like: torch.Tensor) -> torch.Tensor:
    """The bits of `step` and then their complements, each a 0 or a 1 of the dtype of `like`. The mean of tags shows
    whether all agree: a mean of zeros is exactly 0 in every dtype, one of zeros and a 1 isn't.
    """
    bits = [step >> place & 1 for place in range(_BITS)]
    tag = torch.tensor([*bits, *(1 - bit for bit in bits)], dtype=like.dtype, device="cpu")
    return comm.to_device(tag, like.device)


@dataclass(frozen=True, kw_only=True)
class LowPrecisionDecentralized(GossipStrategy):
    """Decentralized training on a ring: per step a rank sends two messages of eight bits a number, 1/4 of float32.

    What each rank sees: as with every :class:`GossipStrategy`. Its communication state has three tensors per parameter
    ("own", "left", "right"), in float32 at least. Ranks communicate after the optimizer's update; with
    ``overlap="update"`` bucket by bucket during the backward pass. Two ranks exchange one message.

    Args:
        hierarchical, node_size: nodes of `node_size` ranks are the places of the ring, and x is the mean over a node.
            Each of the m ranks sends an m-th of a message, with its own grid, and then has its node's weights.
        bucket_bytes: each bucket of parameters has one eight-bit grid, from its least to its greatest difference, so
            other sizes of buckets give slightly different numbers.

    Raises:
        StrategyError: a field's value isn't allowed; in ``init`` of a train step, a parameter is complex.
    """

    updates_in_buckets: ClassVar[bool] = True
    layout = replace(APART, copies_of="own")

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        known = param.detach().to(self._ring.packing(param.dtype, 1).dtype)
        return {name: known.clone(memory_format=torch.contiguous_format) for name in self._ring.state_names}

    @property
    def _ring(self) -> Ring:
        return Ring(self.together)

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: Axis) -> Tree:
        refuse_complex(self, params)  # the codec doesn't know complex numbers
        return super().init_optimizer(optimizer, params, axis)

    def communicates_after_update(self, step: int) -> bool:
        return self.communicates(step)

    def post_update_hook(self, step: int) -> Ring | None:
        return self._ring if self.communicates(step) else None

    def update(self, update: Update, states: States, info: StepInfo, pending: Any) -> Updated:
        params, opt_state = update.apply()
        if not self.communicates(info.step):
            return Updated(params, opt_state, states, pending)
        updated = extend.communicate_after_update(self, self._ring, update, params, opt_state, states, info)
        return replace(updated, pending=pending)


@dataclass(frozen=True)
class Ring(NodeHook, extend.PostUpdateHook):
    """A round: takes weights after the optimizer, returns {name of what messages are added to: a row for each mate}."""

    state_names: ClassVar[tuple[str, ...]] = ("own", "left", "right")

    exact: ClassVar[bool] = False
    reach: ClassVar[str] = "parameter"  # a grid depends on all numbers: ranks can't hold parts of a parameter

    @property
    def phases(self) -> int:
        return 2 if self.node_size == 1 else 4

    def packing(self, dtype: torch.dtype, axis_size: int) -> Packing:
        m = min(self.node_size, axis_size)

        def terms(state: LeafState) -> list[tuple[torch.Tensor, float]]:
            own, *others = (state[name] for name in self.known(axis_size))
            return [(own, -5 / 3 / m), *((other, 2 / 3 / len(others) / m) for other in others)]

        return Packing(torch.float32 if dtype.itemsize < 4 else dtype, 1.0 / m, None, terms)

    def known(self, axis_size: int) -> tuple[str, ...]:
        """The names of the separate copies. In a ring of two places left and right are the same, and have one copy."""
        return self.state_names[: 2 if axis_size == 2 * min(self.node_size, axis_size) else 3]

    def reduce(self, inputs: BucketInput) -> Reduction:
        if not inputs.flat.numel():
            return inputs.flat, ()
        mates, nodes = self.axes(inputs.axis)
        names = self.known(inputs.axis_size)
        z = yield from self.scattered(inputs)
        messages = [_CODEC.encode(z[None], None)[0]]
        for by in (1, -1)[: len(names) - 1]:
            message = messages[0]
            if nodes.size > 1:
                message = yield CollectiveRequest("ppermute", message.clone(), _shifted(nodes.size, by), nodes)
            messages.append(message)
        # The ranks of a node decode the same messages as the ranks of other nodes that hold copies of their weights.
        if mates.size > 1:
            arrived = list((yield from self.gathered(torch.stack(messages), inputs)).unbind(1))
        else:
            arrived = [message[None] for message in messages]
        return inputs.flat.new_empty(0), [dict(zip(names, arrived, strict=True))]

    def written(self, old: extend.Old) -> list[torch.Tensor]:
        return [*old.params, *(state[name] for state in old.states for name in self.known(old.axis_size))]

    def finish_bucket(self, bucket: Bucket, reduced: extend.Reduced, old: extend.Old) -> extend.PostUpdateResult:
        if not bucket.numel:
            return extend.PostUpdateResult(old.params, old.states)
        (messages, *_) = reduced[1]
        states, names, dtype = old.states, list(messages), self.packing(bucket.dtype, old.axis_size).dtype
        if old.may_overwrite and dtype is bucket.dtype:
            known = [{**state, "right": state[names[-1]]} for state in states]
            return extend.PostUpdateResult(old.params, known, partial(_move, messages, states, old.params))
        moved = []
        for name, rows in messages.items():
            width = -(-bucket.numel // len(rows))
            change = _CODEC.decode(rows, width, dtype).reshape(-1)[: bucket.numel]
            moved.append(_moved([state[name] for state in states], change, bucket))
        by_leaf = zip(*(buffers.unpack(x, bucket, cast=False) for x in (moved[0], moved[1], moved[-1])), strict=True)
        known = [dict(zip(self.state_names, leaf, strict=True)) for leaf in by_leaf]
        return extend.PostUpdateResult(buffers.unpack(moved[0], bucket), known)


def _moved(leaves: Sequence[torch.Tensor], change: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """The leaves, side by side, plus `change`. The sum is in the memory of `change` unless that is batched."""
    if not buffers.is_plain(change):  # vmap forbids to write a batched tensor into one that isn't
        return torch.cat([x.reshape(-1) for x in leaves]) + change
    for x, part in zip(leaves, buffers.unpack(change, bucket, cast=False), strict=True):
        part.add_(x)
    return change


def _move(messages: LeafState, states: Sequence[LeafState], params: Sequence[torch.Tensor]) -> None:
    """Decode the rows of messages, add them in place to their leaves, which follow one another, and move `params` to
    "own". The program may write to the weights, and neighbours don't hear of that: so "own" has memory of its own.
    """
    for name, rows in messages.items():
        leaves = [state[name] for state in states]
        ends = list(accumulate(x.numel() for x in leaves))
        width = -(-ends[-1] // len(rows))
        for place, row in enumerate(rows):
            for at, change in _CODEC.decoded_in_turn(row, width, leaves[0].dtype):
                offset = place * width + at.start
                start, stop = offset, min(offset + change.numel(), ends[-1])
                number = bisect_right(ends, start)
                while start < stop:
                    leaf, end = leaves[number].view(-1), min(stop, ends[number])
                    begin = ends[number] - leaf.numel()
                    leaf[start - begin : end - begin].add_(change[start - offset : end - offset])
                    start, number = end, number + 1
    torch._foreach_copy_([*params], [state["own"] for state in states])


@lru_cache(maxsize=16)
def _shifted(n: int, by: int) -> tuple[int, ...]:
    """The pairs of a ppermute in which every rank sends to the rank `by` places further."""
    return tuple(rank for source in range(n) for rank in (source, (source + by) % n))
