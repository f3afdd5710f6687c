"""Decentralized, LowPrecisionDecentralized: ranks share weights instead of gradients, and each has weights of its own.

    y_t^r = mean_s x_t^s   ("all")   or   (x_t^r + x_t^peer) / 2   ("shift_one")
    x_{t+1}^r = update(y_t^r, grad f_r(x_t^r))

D-PSGD: Lian et al., "Can decentralized algorithms outperform centralized algorithms? A case study for decentralized
parallel stochastic gradient descent", NeurIPS 2017, algorithm 1; the pairs are those of Bagua (Gan et al., "BAGUA:
Scaling up distributed learning with system relaxations", VLDB 2022). As y doesn't depend on the step's gradients,
weights travel during the forward and the backward pass. They use the buckets' channels, which gradients don't need:
shared memory, in which nothing moves meanwhile, is less work for a core than sockets.

In eight bits, by differences of weights around a ring, without error feedback (DCD-PSGD):

    z = x + L/3 + R/3 - 5/3 W          (= the mean of W, L, R, plus what the optimizer has done, less W)
    d = Q(z), sent to both neighbours
    L += d_left,  R += d_right,  x = W = W + d

Tang et al., "Communication compression for decentralized training", NeurIPS 2018, algorithm 1, in the form of Bagua's
"low_precision_decentralized". x are the weights after the optimizer, W this rank's, L and R its neighbours' as they
know them of each other: all copies of a W are equal bit for bit, as all add the same decoded numbers to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch

from ltx.errors import RankMismatchError, StrategyError
from ltx.extend import (
    Axis,
    Bucket,
    BucketInput,
    CollectiveRequest,
    Exchange,
    LeafState,
    Old,
    Optimizer,
    PostUpdateHook,
    PostUpdateResult,
    Reduced,
    Reduction,
    StateLayout,
    States,
    StepInfo,
    Terms,
    Update,
    Updated,
    arguments,
    comm,
    communicate_after_update,
    is_plain,
    tree,
    unpack,
)
from ltx.hooks import AllReduce, ByteGrad, CommHook
from ltx.strategies.nodes import (
    AmongNodes,
    FromParts,
    NodeHook,
    NodeStrategy,
    ToParts,
    across,
    gathered,
    node,
    scattered,
)
from ltx.typing import Tree


@dataclass(frozen=True, kw_only=True)
class GossipStrategy(NodeStrategy):
    """The common base of decentralized strategies; not a strategy by itself.

    What each rank sees: parameters and optimizer state of its own, and the loss of its own batch. This needs
    :func:`ltx.train_step`; a data-parallel step by itself gives local gradients.

    Args:
        communication_interval: ranks communicate at every step whose number it divides (the first is 0).
    """

    layout: ClassVar[StateLayout] = StateLayout(params="per_rank", opt_state="per_rank")

    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_whole(self, 1, "communication_interval")

    def communicates(self, step: int) -> bool:
        """Whether ranks share weights in the step that follows `step` steps."""
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
    """Decentralized training: weights are averaged with those of one peer or of all ranks, and gradients stay local.

    What each rank sees: as with every :class:`GossipStrategy`, parameters, optimizer state and loss of its own. If
    ranks have taken different numbers of steps, they raise: the number travels with the weights, in 40 more numbers.

    Args:
        peer_selection_mode: "all": the mean over all ranks, an all-reduce. "shift_one": ranks pair up, each of the
            lower half with one of the upper half, another at every communication; it sends each parameter once, and
            needs an even number of ranks.
        communication_interval: as in :class:`GossipStrategy`.
        hierarchical, node_size: nodes of that many ranks begin with the mean of their weights, and gossip as ranks
            would. The mean within a node doesn't wait for the forward pass; each of m ranks sends a part of an m-th of
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
        if isinstance(info.axis.rank, int) and not tag.is_meta:
            self._check(info.axis.ranks.read(tag, "the number of steps"), info, info.axis.rank)
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
            bits = enumerate((2 * tag - mine)[:_BITS].ne(0).tolist())
            what = f"those of rank {peer}, which was at its step {sum(bit << place for place, bit in bits)}"
        raise RankMismatchError(
            f"rank {rank}: its parameters, at step {info.step}, were averaged with {what}. Ranks must take the same "
            "number of steps. The state is as before the step; go on from one checkpoint on all ranks."
        )


@lru_cache(maxsize=16)
def peers(n: int, k: int) -> tuple[int, ...]:
    """Each of n ranks' peer at communication k: the peer's peer is the rank itself, and n/2 pairings take turns."""
    half = n // 2
    return tuple((k + r) % half + half if r < half else (r - half - k) % half for r in range(n))


@dataclass(frozen=True)
class ShiftOne(CommHook):
    """The mean of this rank's and its peer's values, at communication ``step // communication_interval``."""

    exact: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    reads_step: ClassVar[bool] = True

    communication_interval: int = 1

    def scale(self, axis_size: int) -> float:
        return 1.0

    def reduce(self, inputs: BucketInput) -> Reduction:
        if inputs.axis_size == 1:
            return inputs.flat, inputs.states
        assert isinstance(inputs.step, int)  # no compiled graph holds this hook
        mine = inputs.flat.clone()  # a buffer belongs to the channel once it is sent
        peer_of = peers(inputs.axis_size, inputs.step // self.communication_interval)
        pairs = tuple(rank for pair in enumerate(peer_of) for rank in pair)
        theirs = yield CollectiveRequest("ppermute", inputs.flat, arguments=pairs)
        return theirs.add_(mine).div_(2), inputs.states


# --- the number of steps, sent along ----------------------------------------------------------------------------------


def step_tag(step: int, like: torch.Tensor) -> torch.Tensor:
    """The bits of `step` and then their complements, each a 0 or a 1 of the dtype of `like`.

    A mean of zeros is 0 to the last bit in every dtype, and a mean with a 1 among zeros isn't: so a mean of tags shows
    whether all were the same.
    """
    bits = [step >> place & 1 for place in range(_BITS)]
    return comm.to_device(torch.tensor([*bits, *(1 - bit for bit in bits)], dtype=like.dtype), like.device)


# --- in eight bits, around a ring -------------------------------------------------------------------------------------

_CODEC = ByteGrad()


@dataclass(frozen=True, kw_only=True)
class LowPrecisionDecentralized(GossipStrategy):
    """Decentralized training on a ring in eight bits a number: two messages of a quarter of float32's bytes a step.

    What each rank sees: as with every :class:`GossipStrategy`, parameters, optimizer state and loss of its own. Its
    communication state holds three tensors a parameter ("own", "left", "right"), in float32 for parameters in half
    precision. Ranks communicate after the optimizer; with ``overlap="update"`` bucket by bucket in the backward pass.
    Two ranks exchange one message, as left and right are the same rank.

    Args:
        communication_interval: as in :class:`GossipStrategy`.
        hierarchical, node_size: nodes of that many ranks are the ring's places, and x is the mean over a node. Each of
            m ranks sends an m-th of the messages to other nodes, with its own grid, and then has the same weights as
            its node.
        bucket_bytes: a bucket of parameters has one eight-bit grid, from its least difference to its greatest. So
            another size of buckets gives slightly different numbers.

    Raises:
        StrategyError: a field's value isn't allowed; in ``init`` of a train step, that a parameter is complex.

    Example:
        >>> from ltx.strategies.decentralized import LowPrecisionDecentralized
        >>> LowPrecisionDecentralized(communication_interval=2).layout.params
        'per_rank'
    """

    updates_in_buckets: ClassVar[bool] = True
    takes_complex: ClassVar[bool] = False  # of which no codec knows
    needs_whole: ClassVar[bool] = True  # a bucket's grid depends on all its numbers, and so on ranks' parts
    layout: ClassVar[StateLayout] = replace(GossipStrategy.layout, copies_of="own")

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        known = param.detach().to(self._ring.wire_dtype(param.dtype))
        return {name: known.clone(memory_format=torch.contiguous_format) for name in self._ring.state_names}

    @property
    def _ring(self) -> Ring:
        return Ring(self.together)

    def communicates_after_update(self, step: int) -> bool:
        return self.communicates(step)

    def post_update_hook(self, optimizer: Optimizer, step: int) -> Ring | None:
        return self._ring if self.communicates(step) else None

    def update(self, update: Update, states: States, info: StepInfo, pending: Any) -> Updated:
        params, opt_state = update.apply()
        if not self.communicates(info.step):
            return Updated(params, opt_state, states, pending)
        return replace(
            communicate_after_update(self.exchange, self._ring, update, params, opt_state, states, info),
            pending=pending,
        )


@dataclass(frozen=True)
class Ring(NodeHook, PostUpdateHook):
    """One round: it takes the weights after the optimizer, and returns the messages.

    Messages come in place of a state, under the name of the tensor to which they are added, a row for each rank of a
    node.
    """

    state_names: ClassVar[tuple[str, ...]] = ("own", "left", "right")

    exact: ClassVar[bool] = False

    @property
    def phases(self) -> int:
        return 2 if self.node_size == 1 else 4

    def scale(self, axis_size: int) -> float:
        return 1.0 / min(self.node_size, axis_size)

    def extra_terms(self, state: LeafState, axis_size: int) -> Terms:
        m = min(self.node_size, axis_size)
        own, *others = (state[name] for name in self.known(axis_size))
        return [(own, -5 / 3 / m), *((other, 2 / 3 / len(others) / m) for other in others)]

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype.itemsize < 4 else dtype

    def known(self, axis_size: int) -> tuple[str, ...]:
        """What is known apart. With two places, left and right are the same one, and its copy is kept once."""
        return self.state_names[: 2 if axis_size == 2 * min(self.node_size, axis_size) else 3]

    def reduce(self, inputs: BucketInput) -> Reduction:
        m = self.node_size
        if not inputs.flat.numel():
            return inputs.flat, ()
        assert inputs.axis is not None
        nodes = across(inputs.axis, m)
        names = self.known(inputs.axis_size)
        z = yield from scattered(inputs, m)
        messages = [_CODEC.encode(z[None], None)[0]]
        for by in (1, -1)[: len(names) - 1]:
            message = messages[0]
            if nodes.size > 1:
                message = yield CollectiveRequest("ppermute", message.clone(), None, _shifted(nodes.size, by), nodes)
            messages.append(message)
        # All ranks of a node decode the same messages, as do ranks of other nodes with copies of their weights.
        if node(inputs.axis, m).size > 1:
            arrived = list((yield from gathered(torch.stack(messages), inputs, m)).unbind(1))
        else:
            arrived = [message[None] for message in messages]
        messages_of = dict(zip(names, arrived, strict=True))
        return inputs.flat.new_empty(0), [messages_of]

    def written(self, old: Old) -> list[torch.Tensor]:
        return [state[name] for state in old.states for name in self.known(old.axis_size)]

    def finish_bucket(self, bucket: Bucket, reduced: Reduced, old: Old) -> PostUpdateResult:
        if not bucket.numel:
            return PostUpdateResult(old.params, old.states)
        (messages, *_) = reduced[1]
        states, names, dtype = old.states, list(messages), self.wire_dtype(bucket.dtype)
        if old.may_overwrite and dtype is bucket.dtype:
            # The next weights are what is known of them.
            known = [{**state, "right": state[names[-1]]} for state in states]
            finish = partial(_add_decoded, messages, states)
            return PostUpdateResult([state["own"].detach() for state in states], known, finish)
        moved = []
        for name, rows in messages.items():
            width = -(-bucket.numel // len(rows))
            change = _CODEC.decode(rows, width, dtype).reshape(-1)[: bucket.numel]
            moved.append(_moved([state[name] for state in states], change, bucket))
        by_leaf = zip(*(unpack(x, bucket, cast=False) for x in (moved[0], moved[1], moved[-1])), strict=True)
        known = [dict(zip(self.state_names, leaf, strict=True)) for leaf in by_leaf]
        return PostUpdateResult(unpack(moved[0], bucket), known)


def _moved(leaves: Sequence[torch.Tensor], change: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """The leaves, side by side, plus `change`; the sum is in its memory if that may be written to."""
    if not is_plain(change):  # under vmap what ranks don't share yet can't be
        return torch.cat([x.reshape(-1) for x in leaves]) + change
    for x, part in zip(leaves, unpack(change, bucket, cast=False), strict=True):
        part.add_(x)
    return change


def _add_decoded(messages: LeafState, states: Sequence[LeafState]) -> None:
    """Decode messages, in rows, and add them in place to their leaves, which lie side by side."""
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


@lru_cache(maxsize=16)
def _shifted(n: int, by: int) -> tuple[int, ...]:
    """Every rank sends to the rank that is `by` places further."""
    return tuple(rank for source in range(n) for rank in (source, (source + by) % n))
