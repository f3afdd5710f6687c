"""Plans: from tensors, bucket sizes and a hook to what every rank will issue. Ranks compare a plan when they first meet
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch

from ltx import comm
from ltx.axis import Axis
from ltx.errors import UnsupportedError
from ltx.gradients.buckets import Leaf, plan_buckets
from ltx.gradients.reduction import Reducer
from ltx.gradients.schedule import Plan
from ltx.gradients.sizes import DEFAULT_BYTES, DEFAULT_STREAM_BYTES, bucket_sizes

#: For each leaf, the names of its communication state's tensors.
Names = tuple[tuple[str, ...], ...]


class Owner(Protocol):
    """What a plan needs of its strategy; ranks must agree in it too."""

    def __hash__(self) -> int: ...

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a bucket, and of the first one; with :attr:`auto_sizes` those without a known network."""
        ...

    @property
    def auto_sizes(self) -> bool:
        """Whether sizes are chosen for the network."""
        ...

    @property
    def network(self) -> comm.Network | None:
        """The network, if the user has described it."""
        ...

    def grouping(self, paths: Callable[[], list[str]], arrival: Sequence[int]) -> tuple[int, ...]:
        """Which of the leaves at `paths` travel together; as the `groups` of :func:`plan_buckets`."""
        ...


@lru_cache(maxsize=256)
def _plan(
    axis: Axis,
    hook: Reducer,
    sizes: tuple[int, int],
    leaves: tuple[tuple[torch.Size, torch.dtype, torch.device], ...],
    arrival: tuple[int, ...],
    groups: tuple[int, ...],
    names: Names,
    agreement: comm.Agreement | None,
    network: comm.Network | None,
) -> Plan:
    found = tuple(Leaf(*leaf) for leaf in leaves)
    bucket, first = chosen_sizes(sizes, network, hook, axis.size, sum(leaf.nbytes for leaf in found))
    buckets = plan_buckets(found, arrival, hook.bucket_factor * bucket, first, groups)
    return Plan(axis, hook, buckets, names, agreement=agreement)


def chosen_sizes(
    sizes: tuple[int, int], network: comm.Network | None, hook: Reducer, ranks: int, nbytes: int
) -> tuple[int, int]:
    """Bytes of a bucket, before the hook's factor, and of the first one: `sizes`, or those that suit the network."""
    if network is None or ranks == 1:
        return sizes
    bucket, first = bucket_sizes(network, ranks, nbytes, sizes[1])
    # Where less than the gradients is sent, in several phases, more of a bucket's time are its starts and its codec.
    small = hook.phases_on(ranks) <= 1 and hook.bucket_factor == 1
    return (bucket, first) if small else (max(bucket, DEFAULT_BYTES), sizes[1])


def _network(owner: Owner, axis: Axis, compare: bool, background: bool) -> comm.Network | None:
    """The network that sizes are chosen for: all ranks know it, or all call this. None where sizes are fixed."""
    if not owner.auto_sizes or background or owner.network is not None:
        return owner.network if owner.auto_sizes and not background else None
    if axis.comm is None or axis.size == 1:
        return None
    axis_comm: comm.AxisComm = axis.comm
    if axis_comm.network is None and not compare:
        raise UnsupportedError(
            'bucket_bytes="auto" measures the network, which a compiled graph can\'t do. Call '
            "ltx.profile.measure_network() on "
            "every rank before, or train.init(params); or say what it is: network=ltx.profile.Network(bandwidth=, "
            "latency=)."
        )
    return comm.measured(axis_comm)


def make_plan(
    owner: Owner,
    hook: Reducer,
    axis: Axis,
    tensors: Sequence[torch.Tensor],
    arrival: Callable[[], Sequence[int]],
    names: Names,
    step: int,
    paths: Callable[[], list[str]],
    operation: str,
    structure: Any,
    *,
    compare: bool = True,
    background: bool = False,
) -> Plan:
    """The plan for reducing `tensors`; ranks compare it when they meet it for the first time.

    Args:
        owner: the strategy.
        arrival: the order in which this rank expects its gradients; all ranks take rank 0's, once for a plan.
        step: the number of steps so far; only stateful hooks read it.
        structure: that of the tree the tensors come from.
        compare: False inside a graph, where ranks can't wait for each other.
        background: for the background channel, on which a hook has one phase.
    """
    # Once it has met several models Dynamo takes sizes for variables; a plan, and so the graph, is for these sizes.
    shapes = [t.shape if compare else torch.Size(map(int, t.shape)) for t in tensors]
    leaves = tuple((shape, t.dtype, t.device) for shape, t in zip(shapes, tensors, strict=True))
    agreement = None
    key = (operation, owner, hook, leaves, names, structure)  # not the order: it may differ

    def described() -> comm.Signature:
        text = f"{hook!r} with {_names_text(names)}buckets of {_sizes_text(owner)}"
        return comm.Signature.of(operation, paths(), list(tensors), text)

    if compare and axis.threads is not None:
        agreement = axis.threads.negotiate(key, described, lambda: list(arrival()))
    elif compare and axis.comm is not None:
        axis_comm: comm.AxisComm = axis.comm
        channel = axis_comm.background if background else axis_comm.bucket_channel(0)
        agreement = axis_comm.negotiate(channel, key, described, offer=lambda: list(arrival()))
        parts = [part.comm for part in hook.axes(axis) if part.comm is not None]
        for opened in () if background else (axis_comm, *parts):
            opened.open_phases(hook.phases_on(axis.size))
    order = tuple(agreement.offer) if agreement is not None else tuple(arrival())
    network = _network(owner, axis, compare, background)
    sizes = owner.sizes
    if sizes[0] == DEFAULT_BYTES and not background and _on_streams(axis, tensors):
        sizes = (DEFAULT_STREAM_BYTES, sizes[1])
    groups = owner.grouping(paths, order)
    # A meta axis is used once; its plan isn't cached.
    make = _plan.__wrapped__ if axis.meta else _plan
    plan: Plan = make(axis, hook, sizes, leaves, order, groups, names, agreement, network)
    return replace(plan, step=step) if hook.stateful else plan


def _on_streams(axis: Axis, tensors: Sequence[torch.Tensor]) -> bool:
    axis_comm: comm.AxisComm | None = axis.comm
    return axis_comm is not None and any(axis_comm.stream_of(x.device) for x in tensors)


def _names_text(names: Names) -> str:
    """The states of a hook, for an error."""
    return f"states {sorted({n for leaf in names for n in leaf})}, " if any(names) else ""


def _sizes_text(owner: Owner) -> str:
    """What ranks must agree on for their buckets to be equal."""
    if not owner.auto_sizes:
        return f"{owner.sizes} bytes"
    network = "the network as measured" if owner.network is None else repr(owner.network)
    return f"bytes for {network}, the first of at most {owner.sizes[1]}"
