"""Setting the marker up: from a strategy and a list of tensors to a schedule, and the entry into compiled graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._C import _functorch

from ltx import hooks, tree, wire
from ltx.axis import Axis, GroupBacking, unwrapped
from ltx.errors import SyncStateError, UnsupportedError
from ltx.strategies import Strategy
from ltx.sync import marker
from ltx.sync.graph_schedule import GraphSchedule
from ltx.sync.once_schedule import OnceSchedule
from ltx.sync.planning import Names, make_plan
from ltx.sync.schedule import Plan, Schedule
from ltx.sync.wire_schedule import WireSchedule
from ltx.typing import Tree


def arrival_order(params: Tree, wanted: Sequence[int]) -> list[int]:
    """The places among the `wanted` leaves of a tree in the order in which their gradients are expected."""
    place = {leaf: i for i, leaf in enumerate(wanted)}
    return [place[i] for i in reversed(tree.insertion_order(params)) if i in place]


def in_dtype(hook: hooks.CommHook | None, dtype: torch.dtype | None) -> hooks.CommHook | None:
    """`hook`, whose sums travel in `dtype`."""
    return hook if hook is None or dtype is None else hooks.cast(hook, dtype)


def tracked(tensor: torch.Tensor) -> bool:
    """Whether a gradient with respect to `tensor` is wanted, by plain autograd or at any level of torch.func."""
    if not torch._C._are_functorch_transforms_active():
        return tensor.requires_grad and torch.is_grad_enabled()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    # At each level `requires_grad` speaks of that level alone.
    while not tensor.requires_grad:
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return True


def all_tracked(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The places of those that are :func:`tracked`."""
    if torch._C._are_functorch_transforms_active():
        return [i for i, x in enumerate(tensors) if tracked(x)]
    return [i for i, x in enumerate(tensors) if x.requires_grad] if torch.is_grad_enabled() else []


def differentiable(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The places of those that can have a gradient."""
    return [i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()]


# --- inside a compiled graph -----------------------------------------------------------------------------------------
# As in ltx.collectives.linear: entered through functions that Dynamo leaves as they are, registered at trace time.

_traced: dict[str, tuple[Strategy, hooks.CommHook, Axis]] = {}


def prepare_trace(
    strategy: Strategy,
    axis: Any,
    step: int,
    with_state: bool,
    blocked: bool = False,
    dtype: torch.dtype | None = None,
    choice: str = "",
) -> str:
    """Run by Dynamo at trace time: register the entries into the graph and name their settings by a constant.

    Gives "" where gradients stay local. `with_state`: the step was given its communication state. `dtype`: as in
    :func:`in_dtype`. `choice`: the state's. Errors are raised here because Dynamo would hide them anywhere else.
    """
    torch.compiler.allow_in_graph(mark_in_graph)
    torch.compiler.allow_in_graph(tie_in_graph)
    torch.compiler.allow_in_graph(reduce_in_graph)
    found = wire.resolve(axis)
    if strategy.auto_hook and with_state and not blocked:
        strategy = strategy.with_choice(choice)
    hook = None if blocked else in_dtype(strategy.hook_in_graph(step), dtype)
    if hook is None and with_state:
        raise UnsupportedError(
            "in a compiled graph a step whose gradients stay local takes bare parameters, not ltx.Synced."
        )
    if hook is None:
        return ""
    if (hook.stateful or strategy.auto_hook) and not with_state:
        raise SyncStateError(
            f"{strategy!r} has communication state, but was given bare parameters. Use ltx.Synced(params, state) or "
            "ltx.grad_and_value(step)(params, batch, sync_state=state); ltx.sync_gradients can't be compiled with it."
        )
    key = f"{strategy!r} at step {step} on {found!r} in {dtype}"
    if isinstance(found.backing, GroupBacking):
        key += f" of line {id(found.backing.line)}"
    _traced[key] = (strategy, hook, found)
    return key


def names_in_graph(key: str) -> tuple[str, ...]:
    """The names of a leaf's states in the graph of `key`, which :func:`prepare_trace` gave."""
    return _traced[key][1].state_names


prepare_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]
names_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _schedule_in_graph(
    key: str,
    operation: str,
    tensors: Sequence[torch.Tensor],
    arrival: tuple[int, ...],
    names: Names,
    step: int,
    clock: torch.Tensor | None,
) -> Schedule:
    strategy, hook, axis = _traced[key]
    plan = make_plan(strategy, hook, axis, tensors, lambda: arrival, names, step, list, operation, None, compare=False)
    # Reductions run below every level of torch.func.
    return _in_graph(replace(plan, clock=None if clock is None else unwrapped(clock)))


def _in_graph(plan: Plan) -> Schedule:
    return GraphSchedule(plan) if isinstance(plan.axis.backing, GroupBacking) else OnceSchedule(plan)


def mark_in_graph(
    key: str, arrival: tuple[int, ...], names: Names, step: int, clock: torch.Tensor | None, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(marked parameters, tokens) of ``*parameters, *states``, at the step `step` + `clock`."""
    count = len(arrival)
    schedule = _schedule_in_graph(key, "data_parallel", tensors[:count], arrival, names, step, clock)
    marked, tokens = marker.mark(schedule, tensors[:count], _states_by_leaf(tensors[count:], names))
    return (*marked, *tokens)


def tie_in_graph(key: str, tokens: int, kept: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs tied, of ``*tokens, *kept, *successors, *outputs``."""
    _, hook, axis = _traced[key]
    schedule = _in_graph(Plan(axis, hook, (), ()))
    pairs = list(zip(tensors[tokens : tokens + kept], tensors[tokens + kept : tokens + 2 * kept], strict=True))
    return tuple(marker.tie(schedule, tensors[:tokens], tensors[tokens + 2 * kept :], pairs))


def reduce_in_graph(
    key: str, arrival: tuple[int, ...], names: Names, step: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(reduced gradients, next states) of ``*gradients, *states``."""
    count = len(arrival)
    schedule = _schedule_in_graph(key, "sync_gradients", tensors[:count], arrival, names, step, None)
    grads, states = marker.reduce_gradients(schedule, tensors[:count], _states_by_leaf(tensors[count:], names))
    return (*grads, *(t for leaf in states for t in leaf))


def _states_by_leaf(flat: Sequence[torch.Tensor], names: Names) -> list[list[torch.Tensor]]:
    tensors = iter(flat)
    return [[next(tensors) for _ in leaf] for leaf in names]


# ---------------------------------------------------------------------------------------------------------------------


def wire_schedule(plan: Plan, deferred: bool = False, ahead: bool = False) -> Schedule:
    """The eager schedule for `plan`; the others as in :class:`WireSchedule`, where the axis has a wire."""
    wired = isinstance(plan.axis.backing, GroupBacking)
    return WireSchedule(plan, deferred, ahead) if wired else OnceSchedule(plan)


def no_schedule(axis: Axis) -> Schedule:
    """A schedule without buckets, for outputs that are tied to nothing but a state that passes through."""
    return OnceSchedule(Plan(replace(axis, backing=None), hooks.AllReduce(), (), ()))
