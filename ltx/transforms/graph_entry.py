"""The marker inside a compiled graph: from a strategy and a list of tensors to a schedule of functional collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ltx import comm, traced
from ltx.backings import unwrapped
from ltx.collectives.calls import refuse_threads
from ltx.errors import SyncStateError, UnsupportedError
from ltx.gradients import marker
from ltx.gradients.functions import reduce_gradients
from ltx.gradients.graph_schedule import GraphSchedule
from ltx.gradients.immediate_schedule import ImmediateSchedule
from ltx.gradients.planning import Names, make_plan
from ltx.gradients.schedule import Plan, Schedule
from ltx.strategies import Strategy
from ltx.strategies.base import in_dtype


@traced.at_trace_time
def prepare_trace(
    strategy: Strategy,
    axis: Any,
    step: int,
    with_state: bool,
    blocked: bool = False,
    dtype: torch.dtype | None = None,
    choice: str = "",
) -> str:
    """The key of a step's settings in a graph; "" where gradients stay local.

    `with_state`: the step was given its communication state. `dtype`: as in :func:`in_dtype`. `choice`: the state's.
    """
    refuse_threads(found := comm.resolve(axis))
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
    if found.comm is not None:
        key += f" of {id(found.comm)}"
    return traced.keep(key, (strategy, hook, found))


@traced.at_trace_time
def names_in_graph(key: str) -> tuple[str, ...]:
    """The names of a leaf's states in the graph of `key`, which :func:`prepare_trace` gave."""
    names: tuple[str, ...] = traced.kept(key)[1].state_names
    return names


def _schedule_in_graph(
    key: str,
    operation: str,
    tensors: Sequence[torch.Tensor],
    arrival: tuple[int, ...],
    names: Names,
    step: int,
    clock: torch.Tensor | None,
) -> Schedule:
    strategy, hook, axis = traced.kept(key)
    plan = make_plan(strategy, hook, axis, tensors, lambda: arrival, names, step, list, operation, None, compare=False)
    # Reductions run below every level of torch.func.
    return _in_graph(replace(plan, clock=None if clock is None else unwrapped(clock)))


def _in_graph(plan: Plan) -> Schedule:
    return GraphSchedule(plan) if plan.axis.comm is not None else ImmediateSchedule(plan)


@traced.node
def mark_in_graph(
    key: str, arrival: tuple[int, ...], names: Names, step: int, clock: torch.Tensor | None, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(marked parameters, tokens) of ``*parameters, *states``, at the step `step` + `clock`."""
    count = len(arrival)
    schedule = _schedule_in_graph(key, "data_parallel", tensors[:count], arrival, names, step, clock)
    marked, tokens = marker.mark(schedule, tensors[:count], _states_by_leaf(tensors[count:], names))
    return (*marked, *tokens)


@traced.node
def tie_in_graph(key: str, tokens: int, kept: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs tied, of ``*tokens, *kept, *successors, *outputs``."""
    _, hook, axis = traced.kept(key)
    schedule = _in_graph(Plan(axis, hook, (), ()))
    pairs = list(zip(tensors[tokens : tokens + kept], tensors[tokens + kept : tokens + 2 * kept], strict=True))
    return tuple(marker.tie(schedule, tensors[:tokens], tensors[tokens + 2 * kept :], pairs))


@traced.node
def reduce_in_graph(
    key: str, arrival: tuple[int, ...], names: Names, step: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(reduced gradients, next states) of ``*gradients, *states``."""
    count = len(arrival)
    schedule = _schedule_in_graph(key, "sync_gradients", tensors[:count], arrival, names, step, None)
    grads, states = reduce_gradients(schedule, tensors[:count], _states_by_leaf(tensors[count:], names))
    return (*grads, *(t for leaf in states for t in leaf))


def _states_by_leaf(flat: Sequence[torch.Tensor], names: Names) -> list[list[torch.Tensor]]:
    tensors = iter(flat)
    return [[next(tensors) for _ in leaf] for leaf in names]
