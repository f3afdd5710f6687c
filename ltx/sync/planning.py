"""Plans: from tensors, bucket sizes and a hook to what every rank will issue, compared where ranks first meet it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch

from ltx import wire
from ltx.axis import Axis, GroupBacking, ShapesBacking
from ltx.sync.buckets import Leaf, plan_buckets
from ltx.sync.reduction import Reducer
from ltx.sync.schedule import Plan

#: For each leaf, the names of its communication state's tensors.
Names = tuple[tuple[str, ...], ...]


class Owner(Protocol):
    """What a plan needs of the strategy that it is for; ranks must agree in it too."""

    def __hash__(self) -> int: ...

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a bucket, and of the first one."""
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
    agreement: wire.Agreement | None,
) -> Plan:
    buckets = plan_buckets(tuple(Leaf(*leaf) for leaf in leaves), arrival, *sizes, groups)
    return Plan(axis, hook, buckets, names, agreement=agreement)


def make_plan(
    owner: Owner,
    hook: Reducer,
    axis: Axis,
    tensors: Sequence[torch.Tensor],
    arrival: Sequence[int],
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
        arrival: the order in which this rank expects its gradients; all take rank 0's.
        step: the number of steps so far; matters to stateful hooks alone.
        structure: that of the tree they come from.
        compare: False inside a graph, where nothing can be waited for.
        background: for the background channel, on which a hook has one phase.
    """
    leaves = tuple((t.shape, t.dtype, t.device) for t in tensors)
    order = tuple(arrival)
    agreement = None
    if compare and isinstance(axis.backing, GroupBacking):
        line: wire.Line = axis.backing.line
        agreement = line.meet(
            line.background if background else line.bucket_channel(0),
            (operation, owner, hook, leaves, names, structure),  # not the order: it may differ
            lambda: wire.Signature.of(
                operation, paths(), list(tensors), f"{hook!r} with {_names_text(names)}buckets of {owner.sizes} bytes"
            ),
            offer=list(order),
        )
        order = tuple(agreement.offer)
        parts = [part.backing.line for part in hook.axes(axis) if isinstance(part.backing, GroupBacking)]
        for opened in () if background else (line, *parts):
            opened.open_phases(hook.phases_on(axis.size))
    bucket, first = owner.sizes
    groups = owner.grouping(paths, order)
    # An axis of shapes is made for one look, and needn't be kept.
    make = _plan.__wrapped__ if isinstance(axis.backing, ShapesBacking) else _plan
    plan: Plan = make(axis, hook, (hook.bucket_factor * bucket, first), leaves, order, groups, names, agreement)
    return replace(plan, step=step) if hook.stateful else plan


def _names_text(names: Names) -> str:
    """The states of a hook in the words of an error."""
    return f"states {sorted({n for leaf in names for n in leaf})}, " if any(names) else ""
