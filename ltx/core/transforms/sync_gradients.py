"""sync_gradients: the reduction of a strategy, applied to a tree of gradients at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ltx.core import comm
from ltx.core.base import traced, tree
from ltx.core.base.arguments import checked
from ltx.core.base.errors import SyncStateError, UnsupportedError
from ltx.core.base.placements import Placements, summed
from ltx.core.collectives.calls import check_dense, check_sums
from ltx.core.collectives.linear import at_places
from ltx.core.collectives.psum import is_sparse, psum_sparse, split_sparse
from ltx.core.gradients.marker import reduce_gradients
from ltx.core.gradients.planning import arrival_order, differentiable, make_plan
from ltx.core.gradients.schedule import schedule_for
from ltx.core.transforms.marking import prepare_trace, reduce_in_graph
from ltx.core.transforms.placed import check_placements
from ltx.core.transforms.strategy import Strategy, default_strategy
from ltx.core.transforms.sync_state import SyncState, check_state
from ltx.typing import Tree


@checked("strategy")
def sync_gradients(
    grads: Tree, strategy: Strategy | None = None, sync_state: SyncState | None = None, *, axis: Any = None
) -> tuple[Tree, SyncState | None]:
    """Reduce gradients over the ranks of an axis, as the backward pass of a data-parallel step would.

    Args:
        grads: tree of tensors, the same structure, shapes and dtypes on every rank; integers and booleans are
            passed on. None leaves are part of the structure. Sparse ones (COO, as of ``nn.Embedding(sparse=True)``) are
            reduced exactly, whatever the hook, by their entries alone, and come back coalesced; each rank may have
            entries at other places.
        strategy: how; :class:`ltx.DDPStrategy` if None.
        sync_state: the communication state of a stateful strategy.
        axis: as in :func:`ltx.psum`.

    Returns:
        What each rank sees: (the mean over ranks as new tensors, the next state).

    Gradient:
        The mean over ranks of the cotangents, whatever the hook.

    Raises:
        TreeError, AxisError, RankMismatchError: as in :func:`ltx.psum`.
        SyncStateError: a stateful strategy without its state.
        UnsupportedError: a sparse leaf, and a hook that takes no mean (:class:`ltx.hooks.Adasum`).

    Example:
        >>> import torch, ltx
        >>> def step(w, x):  # clip each rank's gradient, then average
        ...     local = torch.func.grad(lambda w: (w * x).sum())(w)
        ...     return ltx.sync_gradients(local.clamp(max=2.0))[0]
        >>> ltx.vmap(step, in_dims=(None, 0))(torch.tensor(1.0), torch.tensor([1.0, 5.0]))
        tensor([1.5000, 1.5000])
    """
    strategy = strategy if strategy is not None else default_strategy()
    if strategy.auto_hook and sync_state is not None:
        check_state(sync_state)
        strategy = strategy.with_choice(sync_state.choice)
    leaves, spec = tree.flatten(grads)
    compiling = traced.recording()
    placements = Placements.of(leaves)
    if placements is not None:
        return _of_local_parts(grads, strategy, sync_state, axis)
    if not compiling:
        tree.check_tensors(grads, "grads")
        if any(map(is_sparse, leaves)):
            return _with_sparse(grads, strategy, sync_state, axis)
        check_dense("sync_gradients", leaves, grads)
        check_sums("sync_gradients", leaves, grads)
        if sync_state is not None:
            check_state(sync_state)
    wanted = differentiable(leaves)
    arrival = partial(arrival_order, grads, wanted)
    mine = [leaves[i] for i in wanted]
    if compiling:
        key, _ = prepare_trace(strategy, axis, 0, False)
        reduced = list(reduce_in_graph(key, tuple(arrival()), *mine)) if key and mine else mine
    else:
        paths = tree.leaf_paths(grads)
        reduced, sync_state = _reduce(strategy, axis, mine, arrival, [paths[i] for i in wanted], sync_state)
    return tree.unflatten(spec, at_places(leaves, wanted, reduced)), sync_state


def _of_local_parts(
    grads: Tree, strategy: Strategy, state: SyncState | None, axis: Any
) -> tuple[Tree, SyncState | None]:
    """:func:`sync_gradients` of a tree with DTensors: of their local parts. Sums that are due are taken first."""
    leaves, spec = tree.flatten(tree.map(summed, grads))
    placements = Placements.of(leaves)
    assert placements is not None
    step = 0 if state is None else state.checked_step()
    check_placements(comm.resolve(axis), placements, strategy, step, lambda: tree.leaf_paths(grads), "sync_gradients")
    parts = tree.unflatten(spec, placements.local(leaves))
    reduced, after = sync_gradients(parts, strategy, state, axis=axis)
    return tree.unflatten(spec, placements.placed(tree.flatten(reduced)[0])), after


def _with_sparse(grads: Tree, strategy: Strategy, state: SyncState | None, axis: Any) -> tuple[Tree, SyncState | None]:
    """:func:`sync_gradients` of a tree with sparse leaves: Horovod's way, whose indices and values are gathered.

    Nothing of them is compressed. They go first, as ranks compare their whole trees by then.
    """
    sparse, dense = split_sparse(grads)
    hook = strategy.hook(0 if state is None else state.checked_step())
    if hook is not None and not hook.averages:
        raise UnsupportedError(
            f"sync_gradients: leaf {tree.leaf_paths(sparse)[0]!r} is sparse, and of sparse gradients the mean is "
            f"taken, which {hook!r} doesn't give. Use x.to_dense()."
        )
    if hook is not None:
        found = comm.resolve(axis)
        among = hook.within(found) or found
        factor = hook.derivative_scale(among.size)
        counted, whole = _differentiable(sparse), _differentiable(grads)
        means = tree.map(lambda x: x * factor, psum_sparse("sync_gradients", whole, counted, among))
        sparse = tree.filled(means, sparse)
    reduced, state = sync_gradients(dense, strategy, state, axis=axis)
    return tree.filled(sparse, reduced), state


def _differentiable(grads: Tree) -> Tree:
    """`grads` with None for integers and booleans, which are passed on."""
    return tree.map(lambda x: x if x.is_floating_point() or x.is_complex() else None, grads)


def _reduce(
    strategy: Strategy,
    axis: Any,
    grads: list[torch.Tensor],
    arrival: Callable[[], Sequence[int]],
    paths: list[str],
    state: SyncState | None,
) -> tuple[list[torch.Tensor], SyncState | None]:
    step = state.checked_step() if state is not None else 0
    hook = strategy.hook(step)
    if hook is None or not grads:
        return grads, None if state is None else state.advanced()
    if state is None and strategy.stateful:
        whose = hook if hook.stateful else strategy
        raise SyncStateError(
            f"{whose!r} has communication state: pass sync_state=step.init(params) and keep what comes back."
        )
    entries = [state.leaves.get(path, {}) if state is not None else {} for path in paths]
    states = [hook.states_of(e) for e in entries]
    plan = make_plan(
        strategy,
        hook,
        comm.resolve(axis),
        grads,
        arrival,
        tuple(tuple(s) for s in states),
        step,
        lambda: paths,
        "sync_gradients",
        tuple(paths),
    )
    schedule = schedule_for(plan)
    reduced, advanced = reduce_gradients(schedule, grads, [list(s.values()) for s in states])
    if state is None:
        return reduced, None
    leaves = {path: dict(e) for path, e in state.leaves.items()}
    for path, names, tensors in zip(paths, states, advanced, strict=True):
        if names:
            leaves[path].update(zip(names, tensors, strict=True))
    return reduced, state.advanced(leaves)
