"""What a step marks: its parameters, so that a backward pass reduces their gradients; and ltx.sync_gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import checked
from ltx.core.base.errors import SyncStateError, UnsupportedError
from ltx.core.base.needs import require
from ltx.core.base.private import Tensors, unwrapped
from ltx.core.collectives.calls import check_dense, check_sums
from ltx.core.collectives.psum import is_sparse, psum_sparse, split_sparse
from ltx.core.gradients import marker, planning
from ltx.core.gradients.comm_hook import EXACT, CommHook, counts_as, shared_part, stateful_hook
from ltx.core.gradients.pending import ProcessSchedule, schedule_for
from ltx.core.gradients.planning import Names, Order, Plan, all_tracked, arrival_order, differentiable, make_plan
from ltx.core.gradients.schedule import ImmediateSchedule, Schedule
from ltx.core.ranks.axis import Axis
from ltx.core.ranks.backings import ALONE
from ltx.core.transforms import compare
from ltx.core.transforms.closure_check import version_of
from ltx.core.transforms.compare import check_in_debug, check_params_once
from ltx.core.transforms.run import CallOptions, Marked, StepSettings
from ltx.core.transforms.strategy import Strategy, constant_hook, default_strategy, hook_of_plain, stateful
from ltx.core.transforms.sync_state import SyncState, check_state, kept_beside, states_of_leaves
from ltx.typing import Tree

Paths = tuple[str, ...]


@traced.at_trace_time
def prepare_trace(
    strategy: Strategy, axis: Any, step: int, with_state: bool, blocked: bool = False, dtype: torch.dtype | None = None
) -> tuple[str, tuple[str, ...]]:
    """(the key of a step's settings in a graph, "" if gradients stay local; the names of a leaf's states)."""
    found = comm.resolve(axis)
    hook = None if blocked else constant_hook(strategy, step, dtype)
    if hook is None:
        if with_state:
            raise UnsupportedError("a compiled step whose gradients stay local takes bare parameters, not ltx.Synced.")
        return "", ()
    if stateful_hook(hook) and not with_state:
        raise SyncStateError(
            f"{strategy!r} has communication state, but was given bare parameters. Use ltx.Synced(params, state) or "
            "ltx.grad_and_value(step)(params, batch, sync_state=state); ltx.sync_gradients can't be compiled with it."
        )
    key = f"{strategy!r} at step {step} on {found!r} in {dtype}"
    return traced.keep(key, (strategy, hook, found)), hook.state_names


def _schedule_in_graph(
    key: str, tensors: Tensors, arrival: Order, names: Names, paths: Paths, step: int, clock: torch.Tensor | None
) -> Schedule:
    strategy, hook, axis = traced.kept(key)
    plan = make_plan(strategy, hook, axis, tensors, lambda: arrival, names, step, lambda: list(paths), "", None)
    # Reductions run below all levels of torch.func.
    return schedule_for(replace(plan, clock=None if clock is None else unwrapped(clock)), compiled=True)


@traced.node
def _mark_node(
    key: str, arrival: Order, names: Names, paths: Paths, step: int, clock: torch.Tensor | None, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Mark ``*parameters, *states`` at step `step` + `clock`. Returns (*marked parameters, *tokens)."""
    count = len(arrival)
    schedule = _schedule_in_graph(key, tensors[:count], arrival, names, paths, step, clock)
    states = iter(tensors[count:])
    marked, tokens = marker.put_on(schedule, tensors[:count], [[next(states) for _ in leaf] for leaf in names])
    return (*marked, *tokens)


@traced.node
def _tie_node(key: str, tokens: int, kept: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tied outputs; `tensors` are ``*tokens, *kept, *their next values, *outputs``."""
    _, hook, axis = traced.kept(key)
    return tuple(marker.Tie.apply(schedule_for(Plan(axis, hook, (), ()), compiled=True), tokens, kept, *tensors))


@traced.node
def reduce_in_graph(key: str, arrival: Order, paths: Paths, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Reduce gradients by a hook without state."""
    none: list[tuple[()]] = [() for _ in grads]
    schedule = _schedule_in_graph(key, grads, arrival, tuple(none), paths, 0, None)
    return tuple(marker.reduce_gradients(schedule, grads, none)[0])


def marks_on_wire(step_fn: StepSettings, hook: CommHook | None, axis: Axis) -> bool:
    """Whether an eager call on `axis`, with the strategy's `hook`, will have a schedule of process groups."""
    return axis.ranks.overlaps and hook is not None and _marks(step_fn, hook, axis)


def _marks(step_fn: StepSettings, hook: CommHook, axis: Axis) -> bool:
    return not (step_fn.blocked or (axis.size == 1 and hook.exact and not stateful_hook(hook)))


def mark(
    step_fn: StepSettings,
    params: Tree,
    leaves: list[Any],
    spec: Any,
    sync_state: SyncState | None,
    axis: Axis,
    hook: CommHook | None,
    step: int,
    options: CallOptions,
) -> Marked:
    """The marked parameters of an eager call of `step_fn` on `axis` at `step`, with the strategy's `hook`."""
    strategy, paths = step_fn.strategy, functools.partial(tree.spec_paths, spec)
    hook = options.hook or hook
    below: Tensors = () if options.deferred else leaves
    if private.in_transform():
        below = [*map(unwrapped, below)] if axis.ranks.levels else ()
    own = {i: x for i, x in enumerate(below) if x.is_leaf and x.requires_grad}  # whose .grad a backward pass may write
    if hook is None or not _marks(step_fn, hook, axis):
        wanted = [] if hook is None and sync_state is None else all_tracked(leaves)
        if hook is not None and wanted:  # patterns must match here too, as on many ranks
            planning.by_path(strategy, hook, lambda: [paths()[i] for i in wanted], range(len(wanted)))
        if sync_state is None or not wanted:
            return Marked(leaves, as_given=True)
        # A blocked step passes the state through unchanged; any other step without communication is counted in it.
        state = tree.flatten(sync_state)[0]
        kept = [(x, x.detach()) for x in state] if step_fn.blocked else kept_beside(sync_state, set(), ())
        nothing = ImmediateSchedule(Plan(replace(axis, ranks=ALONE), EXACT, (), ()))
        return Marked(leaves, lambda outs: marker.tie(nothing, [], outs, kept), as_given=True)
    axis.ranks.need(
        "whole",
        f"data_parallel: axis {axis.name!r} is a part of a simulated axis, whose ranks are in one batch with others. "
        "Nest two ltx.vmap, one for nodes and one for the ranks of a node.",
    )
    # A deferred caller takes the gradients from the schedule, so the graph needn't reach the parameters.
    deferred = options.deferred and axis.ranks.overlaps
    wanted = differentiable(leaves) if deferred else all_tracked(leaves)
    if not wanted:
        return Marked(leaves, as_given=True)
    mine = [*map(leaves.__getitem__, wanted)]
    states = states_of_leaves(sync_state, paths, wanted, hook, returned=deferred)
    tensors = [tuple(state.values()) for state in states] if hook.state_names else [()] * len(mine)
    arrival, mine_paths = functools.partial(arrival_order, params, wanted), lambda: [paths()[i] for i in wanted]
    of = tuple(map(tuple, states)), step, mine_paths, "data_parallel", spec
    plan = make_plan(strategy, hook, axis, mine, arrival, *of)
    # Ranks that share gradients start from equal parameters; ranks that communicate after the update needn't.
    sharing = plan.part or axis
    if strategy.layout.params == "replicated" or options.hook is None:
        check_in_debug(sharing, params)
        if options.step is None:  # a train step compares its whole state
            agreed = plan.agreement
            check_params_once(sharing, params, step_fn.fn, agreed, None if agreed is None else agreed.signature)
    schedule = schedule_for(plan, options.deferred)
    if own and axis.size > 1:
        hooks_of = ((plan.hook_of(bucket), bucket.members) for bucket in plan.buckets)
        stay_local = {wanted[i] for each, members in hooks_of if not each.alike for i in members}
        shared = {i: x for i, x in own.items() if i not in stay_local}
        schedule.unreduced = functools.partial(_unreduced, sharing, leaves, shared, paths)
    if isinstance(schedule, ProcessSchedule) and deferred:
        given, inputs = marker.defer(schedule, mine, tensors)
        return Marked(tree.at_places(leaves, wanted, given), None, schedule, inputs)
    marked, tokens = marker.put_on(schedule, mine, tensors)
    filled = marked if len(mine) == len(leaves) else tree.at_places(leaves, wanted, marked)
    carried = {paths()[i] for i in wanted} if sync_state is not None else set()
    kept = kept_beside(sync_state, carried, hook.state_names)
    return Marked(filled, lambda outs: marker.tie(schedule, tokens, outs, kept), schedule)


# The attribute of a .grad that a reduced pass has written: its version after that pass.
_REDUCED = "_ltx_reduced"


def _unreduced(axis: Axis, given: list[Any], leaves: dict[int, torch.Tensor], paths: Callable[[], Paths]) -> str:
    """A text on each ``.grad`` that this backward pass adds to, and that no reduced pass has left so, with a digest,
    which ranks compare (simulated ranks here): it may be equal on all ranks too, reduced by hand, or clipped.
    """
    before = {i: _version_of(x.grad) for i, x in leaves.items()}

    def ended() -> None:
        for i, x in leaves.items():
            if (version := _version_of(x.grad)) is not None and version != before[i]:
                setattr(x.grad, _REDUCED, version[1])

    private.at_end_of_pass(ended)
    written = [i for i, version in before.items() if version and version[1] != getattr(leaves[i].grad, _REDUCED, None)]
    found = [(i, grad) for i in written if (grad := leaves[i].grad) is not None and _accumulates(leaves[i])]
    used = torch.stack([grad.any().to(found[0][1].device) for _, grad in found]).tolist() if found else []
    # Zeros, as of zero_grad(set_to_none=False), are left out; + 0: no zero is negative.
    grads = [(f"{paths()[i]}.grad", _wrapped_as(given[i], x + 0)) for (i, x), u in zip(found, used, strict=True) if u]
    if axis.ranks.levels:
        compare.check_leaves(axis, grads, f"Fix: {comm.UNREDUCED}.")
    if axis.ranks.levels or not grads:
        return ""
    more = f" and {len(grads) - 1} more" if len(grads) > 1 else ""
    return f"{grads[0][0]!r}{more} (digest {compare.hash_of(compare.digest(compare.values(x)) for _, x in grads)[:12]})"


def _version_of(grad: torch.Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), version_of(grad))


def _wrapped_as(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` with the dimensions that vmap's levels have in `x`."""
    if not private.is_wrapped(x):
        return value
    inner = _wrapped_as(private.unwrapped_once(x), value)
    if not private.is_batched(x):
        return inner
    return private.add_batch_dim(inner, private.batch_dim_of(x), private.level_of(x))


def _accumulates(leaf: torch.Tensor) -> bool:
    """Whether the backward pass that runs now adds to the ``.grad`` of `leaf`."""
    try:
        return private.will_run(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:  # torch.autograd.grad returns the gradient instead
        return False


def mark_in_graph(
    step_fn: StepSettings, params: Tree, leaves: list[Any], spec: Any, sync_state: SyncState | None, step: int
) -> Marked:
    """As :func:`mark`, inside a compiled graph that is compiled at `step`."""
    of = step_fn.strategy, step_fn.axis, step, sync_state is not None, step_fn.blocked, step_fn.reduce_dtype
    key, all_names = prepare_trace(*of)
    if key == "":
        return Marked(leaves, as_given=True)
    wanted = differentiable(leaves)
    every = tree.paths_of(spec)
    paths = tuple([every[i] for i in wanted])
    held, clock = ({}, None) if sync_state is None else (sync_state.leaves, sync_state.clock)
    entries = [held.get(path, {}) for path in paths]
    names = tuple(tuple(name for name in all_names if name in entry) for entry in entries)
    states = [entry[name] for entry, own in zip(entries, names, strict=True) for name in own]
    arrival, kept = tuple(arrival_order(params, wanted)), kept_beside(sync_state, set(paths), all_names)
    outs = _mark_node(key, arrival, names, paths, step, clock, *[leaves[i] for i in wanted], *states)
    tokens = outs[len(wanted) :]
    before, after = [x for x, _ in kept], [y for _, y in kept]

    def tie(tied: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(_tie_node(key, len(tokens), len(kept), *tokens, *before, *after, *tied))

    return Marked(tree.at_places(leaves, wanted, outs[: len(wanted)]), tie)


@checked("strategy")
def sync_gradients(
    grads: Tree, strategy: Strategy | None = None, sync_state: SyncState | None = None, *, axis: Any = None
) -> tuple[Tree, SyncState | None]:
    """Reduce gradients over the ranks of an axis, as the backward pass of a data-parallel step would.

    Args:
        grads: tree of tensors, of the same structure, shapes and dtypes on every rank; integers and booleans are
            returned unchanged. None leaves are part of the structure. Sparse leaves (COO, as of
            ``nn.Embedding(sparse=True)``) are reduced exactly with any hook, by sending only their entries, and are
            returned coalesced; ranks may have entries at different places.
        strategy: how gradients are reduced; :class:`ltx.DDPStrategy` if None.
        sync_state: the communication state of a stateful strategy.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: (the mean over ranks as new tensors, the next state; None if none was given).

    Gradient:
        The mean over ranks of the cotangents, whatever the hook.

    Raises:
        TreeError, AxisError, RankMismatchError: as in :func:`ltx.psum`.
        SyncStateError: the strategy is stateful, and its state wasn't given.
        UnsupportedError: a leaf is sparse, and the hook isn't a mean (:class:`ltx.hooks.Adasum`).

    Example:
        >>> import torch, ltx
        >>> def step(w, x):  # clip each rank's gradient, then average
        ...     local = torch.func.grad(lambda w: (w * x).sum())(w)
        ...     return ltx.sync_gradients(local.clamp(max=2.0))[0]
        >>> ltx.vmap(step, in_dims=(None, 0))(torch.tensor(1.0), torch.tensor([1.0, 5.0]))
        tensor([1.5000, 1.5000])
    """
    strategy = strategy if strategy is not None else default_strategy()
    leaves, spec = tree.flatten(grads)
    compiling = traced.recording()
    if not compiling:
        tree.check_tensors(grads, "grads")
        if any(map(is_sparse, leaves)):
            return _with_sparse(grads, strategy, sync_state, axis)
        check_dense("sync_gradients", leaves, grads)
        check_sums("sync_gradients", leaves, grads)
        if sync_state is not None:
            check_state(sync_state)
    wanted, every = differentiable(leaves), tree.leaf_paths(grads)
    arrival = functools.partial(arrival_order, grads, wanted)
    mine, paths = [leaves[i] for i in wanted], [every[i] for i in wanted]
    if compiling:
        key, _ = prepare_trace(strategy, axis, 0, False)
        given = list(reduce_in_graph(key, tuple(arrival()), tuple(paths), *mine)) if key and mine else mine
        return tree.unflatten(spec, tree.at_places(leaves, wanted, given)), sync_state
    step = 0 if sync_state is None else sync_state.checked_step()
    hook = hook_of_plain(strategy, step)
    if hook is None or not mine:
        return tree.unflatten(spec, leaves), None if sync_state is None else sync_state.advanced()
    if sync_state is None and stateful(strategy, plain=True):
        whose = hook if stateful_hook(hook) else strategy
        raise SyncStateError(
            f"{whose!r} has communication state: pass sync_state=step.init(params) and keep what comes back."
        )
    states = states_of_leaves(sync_state, lambda: paths, list(range(len(paths))), hook, returned=True)
    found, names = comm.resolve(axis), tuple(map(tuple, states))
    of = strategy, hook, found, mine, arrival, names, step, lambda: paths, "sync_gradients", tuple(paths)
    reduced, advanced = marker.reduce_gradients(schedule_for(make_plan(*of)), mine, [list(s.values()) for s in states])
    if sync_state is not None:
        after = {path: dict(entries) for path, entries in sync_state.leaves.items()}
        for path, own, tensors in zip(paths, names, advanced, strict=True):
            after.get(path, {}).update(zip(own, tensors, strict=True))
        sync_state = sync_state.advanced(after)
    return tree.unflatten(spec, tree.at_places(leaves, wanted, reduced)), sync_state


def _with_sparse(grads: Tree, strategy: Strategy, state: SyncState | None, axis: Any) -> tuple[Tree, SyncState | None]:
    """Reduce a tree with sparse leaves. These come first: in that collective ranks compare their whole trees."""
    sparse, dense = split_sparse(grads)
    hook = hook_of_plain(strategy, 0 if state is None else state.checked_step())
    require("sparse, hook", hook, f"sync_gradients: leaf {tree.leaf_paths(sparse)[0]!r}, which is sparse,")
    if hook is not None:
        found = comm.resolve(axis)
        among = shared_part(hook, found) or found
        factor = counts_as(hook, among.size)
        floats = functools.partial(tree.map, lambda x: x if x.is_floating_point() or x.is_complex() else None)
        means = tree.map(lambda x: x * factor, psum_sparse("sync_gradients", floats(grads), floats(sparse), among))
        sparse = tree.filled(means, sparse)
    reduced, state = sync_gradients(dense, strategy, state, axis=axis)
    return tree.filled(sparse, reduced), state
