"""LowPrecisionDecentralized: eight-bit differences of weights around a ring, without error feedback (DCD-PSGD).

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
from typing import Any, ClassVar

import torch

from ltx.errors import StrategyError
from ltx.extend import (
    Axis,
    Bucket,
    BucketInput,
    CollectiveRequest,
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
    communicate_after_update,
    is_plain,
    tree,
    unpack,
)
from ltx.hooks import ByteGrad
from ltx.strategies.decentralized import GossipStrategy
from ltx.strategies.nodes import NodeHook, across, gathered, node, scattered
from ltx.typing import Tree

_CODEC = ByteGrad()


@dataclass(frozen=True, kw_only=True)
class LowPrecisionDecentralized(GossipStrategy):
    """Decentralized training on a ring in eight bits a number: two messages of a quarter of float32's bytes a step.

    What each rank sees: as with every :class:`GossipStrategy`, parameters, optimizer state and loss of its own. Its
    communication state holds three tensors a parameter ("own", "left", "right"), in float32 for parameters in half
    precision. Ranks communicate after the optimizer; with ``overlap="update"`` bucket by bucket in the backward pass.
    Between two ranks there is one message, as left and right are the same.

    Args:
        communication_interval: as in :class:`GossipStrategy`.
        hierarchical, node_size: nodes of that many ranks are the ring's places, and x is the mean of a node's. Each of
            m ranks sends an m-th of the messages to other nodes, of a grid of its own, and has the same weights
            afterwards as its node.
        bucket_bytes: a bucket of parameters has one eight-bit grid, from its least difference to its greatest. So
            another size of buckets gives slightly different numbers.

    Raises:
        StrategyError: a field's value isn't allowed; in ``init`` of a train step, that a parameter is complex.

    Example:
        >>> from ltx.strategies.low_precision import LowPrecisionDecentralized
        >>> LowPrecisionDecentralized(communication_interval=2).layout.params
        'per_rank'
    """

    updates_in_buckets: ClassVar[bool] = True
    layout: ClassVar[StateLayout] = replace(GossipStrategy.layout, copies_of="own")

    def init(self, param: torch.Tensor, path: str = "") -> LeafState:
        known = param.detach().to(self._ring.wire_dtype(param.dtype))
        return {name: known.clone(memory_format=torch.contiguous_format) for name in self._ring.state_names}

    @property
    def _ring(self) -> Ring:
        return Ring(self.together)

    def init_optimizer(self, optimizer: Optimizer, params: Tree, axis: Axis) -> Tree:
        for path, leaf in zip(tree.leaf_paths(params), tree.flatten(params)[0], strict=True):
            if leaf.is_complex():
                raise StrategyError(
                    f"LowPrecisionDecentralized quantizes real parameters, and leaf {path!r} is {leaf.dtype}. Keep its "
                    "real and imaginary parts apart (torch.view_as_real)."
                )
        return super().init_optimizer(optimizer, params, axis)

    @property
    def needs_whole(self) -> bool:
        return True  # the grid of a bucket depends on all that lies in it, and so on who holds which parts

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
    """One round: what is given are the weights after the optimizer, what comes out the messages.

    They come in place of a state, by the name of what they are added to; of each a row for each rank of the node.
    """

    state_names: ClassVar[tuple[str, ...]] = ("own", "left", "right")

    exact: ClassVar[bool] = False

    @property
    def phases(self) -> int:  # type: ignore[override]
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
        """What is known apart. Of two places left and right are the same one, which is known once."""
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
    """The leaves, side by side, and `change` added to them; in its memory where that may be written into."""
    if not is_plain(change):  # under vmap what ranks don't share yet can't be
        return torch.cat([x.reshape(-1) for x in leaves]) + change
    for x, part in zip(leaves, unpack(change, bucket, cast=False), strict=True):
        part.add_(x)
    return change


def _add_decoded(messages: LeafState, states: Sequence[LeafState]) -> None:
    """Add what messages say, in rows, to the leaves that they are about, side by side, in place."""
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
    """Every rank sends to the one that is `by` places further."""
    return tuple(rank for source in range(n) for rank in (source, (source + by) % n))
