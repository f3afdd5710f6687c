"""What a train state was made for, and what another train step keeps of it.

Elsewhere than with the train step that made it a state may go wrong without a word: a step that averages gradients
keeps the unequal replicas of local SGD unequal; Adadelta takes Adam's moments for its own. So each call that gets a
state compares once what it was made for (``state.layout``): states that don't name this train step (``made_by``) are
compared as texts, and where these differ by what they keep, which another learning rate doesn't change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import torch

from ltx.core import collectives, comm
from ltx.core.base import traced, tree
from ltx.core.base.arguments import brief
from ltx.core.base.errors import StepError
from ltx.core.optim import Optimizer, advanced
from ltx.core.training.parameters import left_out
from ltx.core.training.settings import TrainSettings
from ltx.core.training.train_state import TrainState, updates_of
from ltx.core.transforms.compare import tensors_by_path
from ltx.core.transforms.strategy import StateLayout, Strategy
from ltx.typing import Tree


def layout_for(train: TrainSettings, params: Tree) -> StateLayout:
    """The layout of a state that `train` makes of `params`, with what it was made for."""
    strategy = train.step.strategy
    optimizer = kind_of(train.optimizer), repr(train.optimizer)
    out = tuple(sorted(left_out(train.trainable, tree.leaf_paths(params))))
    layout: StateLayout = strategy.layout
    return replace(layout, strategy=repr(strategy), optimizer=optimizer, left_out=out)


def kind_of(optimizer: Any) -> str:
    """The classes of an optimizer and of those inside it: ``Chain(ClipByGlobalNorm, torch.optim.adam.Adam)``."""
    of_torch = getattr(optimizer, "cls", None)
    if isinstance(of_torch, type):
        return f"{of_torch.__module__}.{of_torch.__qualname__}"
    held = [getattr(optimizer, field.name, None) for field in fields(optimizer)]
    parts = [x.values() if isinstance(x, Mapping) else x if isinstance(x, list | tuple) else [x] for x in held]
    inner = [kind_of(each) for part in parts for each in part if isinstance(each, Optimizer)]
    return f"{type(optimizer).__name__}({', '.join(inner)})" if inner else type(optimizer).__name__


def check_made_for(train: Any, state: TrainState) -> None:
    """Raise unless `state` was made for `train`, or for one that makes the same of it."""
    if traced.recording():
        _check_in_graph(train.step.strategy, train.optimizer, state.layout)
        return
    if state.made_by is train or not state.layout.strategy:  # a state that a program has made says nothing of this
        return
    if found := [f"{what}: made for {was}, this one has {now}" for what, was, now in _differences(train, state)]:
        raise StepError(
            f"this TrainState (step {state.step}) was made for another train step. {'; '.join(found)}. To go on with "
            "this one, take state = train.adopt(state), on all ranks: it keeps what fits."
        )


@traced.at_trace_time
def _check_in_graph(strategy: Strategy, optimizer: Optimizer, layout: StateLayout) -> None:
    """As :func:`check_made_for`, by what is constant in a graph."""
    if layout.strategy and (strategy.layout.params, kind_of(optimizer)) != (layout.params, layout.optimizer[0]):
        raise StepError(
            f"this TrainState was made for another train step: for {layout.strategy} and {layout.optimizer[1]}, and "
            f"this one has {strategy!r} and {optimizer!r}. Take train.adopt(state), on all ranks, outside of the graph."
        )


def _differences(train: Any, state: TrainState) -> Iterator[tuple[str, str, str]]:
    """(what differs, what the state was made for, what `train` has)."""
    was, own = state.layout, train.step.strategy
    first = partial(own.init_optimizer, train.optimizer, state.trained, comm.resolve(train.step.axis))
    if repr(own) != was.strategy:
        if any(getattr(own.layout, part) != getattr(was, part) for part in ("params", "sync_state", "copies_of")):
            replicated = own.layout.params == "replicated"
            has = "ranks have equal parameters" if replicated else "each rank has parameters of its own"
            yield "strategy", was.strategy, f"{own!r}, with which {has}"
        elif _shapes(train.step.init(state.trained).leaves) != _shapes(state.held_sync_state.leaves):
            yield "strategy", was.strategy, f"{own!r}, which keeps other tensors of each parameter"
        elif was.opt_state != own.layout.opt_state or type(first()) is not type(state.opt_state):
            yield "strategy", was.strategy, f"{own!r}, with other parts of the optimizer's state on each rank"
    # It fits if its classes are those that the state was made for, and it keeps tensors of the same names and shapes.
    whole = was.opt_state != own.layout.opt_state  # the state of ZeRO has other shapes
    if repr(train.optimizer) != was.optimizer[1] and not (
        kind_of(train.optimizer) == was.optimizer[0] and (whole or _shapes(first()) == _shapes(state.held_opt_state))
    ):
        yield "optimizer", was.optimizer[1], repr(train.optimizer)
    out = left_out(train.trainable, tree.leaf_paths(state.held_params, with_none=True))  # also of frozen parameters
    if out != set(was.left_out):
        now, before = out - set(was.left_out), set(was.left_out) - out
        told = [f"{brief(sorted(names))} {word}" for names, word in ((now, "frozen"), (before, "trained")) if names]
        yield "trainable=", "other parameters", f"{' and '.join(told)} by {brief(train.trainable)}"
    if train.dynamic is not None and isinstance(getattr(state.loss_scale, "scale", ()), tuple):
        yield "precision", "no dynamic loss scaling", repr(train.step.precision)


def _shapes(part: Tree) -> list[tuple[str, torch.Size]]:
    return [(path, x.shape) for path, x in tensors_by_path(part)]


def adopted(train: Any, state: TrainState, params: Literal["mean", "rank0"]) -> TrainState:
    if params not in ("mean", "rank0"):
        raise StepError(f'adopt: params must be "mean" or "rank0", got {brief(params)}.')
    state.check_whole()
    state.check_finished("adopt")
    if (was := state.layout).opt_state == "sharded":
        raise StepError(
            f"adopt: each rank has a part of this state's optimizer state ({was.strategy}). Put it together first, by "
            "the train step that made it, on all ranks: state = old_train.gather(state)."
        )
    axis = comm.resolve(train.step.axis)

    def equal(x: torch.Tensor) -> Any:  # ranks may have parameters, and then moments, of their own
        if params == "rank0":
            return collectives.broadcast(x, axis=axis)
        return collectives.pmean(x, axis) if x.is_floating_point() or x.is_complex() else collectives.pmax(x, axis)

    whole = state.params if was.params == "replicated" else tree.map(equal, state.params)
    opt_state = state.held_opt_state if was.opt_state == "replicated" else tree.map(equal, state.held_opt_state)
    now_out = left_out(train.trainable, tree.leaf_paths(state.held_params, with_none=True))
    # By requires_grad=False when the state was made, which its tensors don't show.
    out = ({*tree.leaf_paths(state.frozen)} - {*was.left_out}) | now_out
    fresh = replace(train, trainable=lambda path: path not in out)
    new: TrainState = fresh.gather(fresh.init(whole))
    same, wanted = new.layout.optimizer[0] == was.optimizer[0], _by_path(new.opt_state)
    kept = {path: x for path, x in _by_path(opt_state).items() if same and path in wanted}
    sync_state = new.held_sync_state
    if new.layout.strategy == was.strategy and not was.copies_of:
        leaves_kept = _with_values(sync_state.leaves, _by_path(state.held_sync_state.leaves))
        sync_state = replace(sync_state, leaves=leaves_kept, step=state.held_sync_state.checked_step())
    scale, old_scale = new.loss_scale, state.loss_scale
    alike = tree.flatten(scale)[1] == tree.flatten(old_scale)[1]
    return replace(
        new,
        step=state.step,
        buffers=tree.map(torch.clone, state.buffers),
        opt_state=advanced(_with_values(new.opt_state, kept), lambda _: updates_of(state) if kept else 0),
        sync_state=sync_state,
        loss_scale=tree.map(torch.clone, old_scale) if alike else scale,
        module=state.module,
        layout=replace(
            new.layout,
            left_out=tuple(sorted(now_out)),
            adopted=f"parameters {'unchanged' if was.params == 'replicated' else f'are the {params} of all ranks'}, "
            f"optimizer state {'kept' if kept else 'new'}, communication state "
            f"{'new' if sync_state is new.held_sync_state else 'kept'}",
        ),
    )


def _by_path(part: Tree) -> dict[str, torch.Tensor]:
    """The leaves by path, without the name that a whole state of ZeRO has in front: its leaves are vectors."""
    return {path.removeprefix("shard_0_of_1."): leaf for path, leaf in tensors_by_path(part)}


def _with_values(part: Tree, values: Mapping[str, torch.Tensor]) -> Tree:
    """`part` with copies of `values` where path, shape and dtype fit."""
    kept = list[torch.Tensor]()
    for path, x in _by_path(part).items():
        old = values.get(path, x)
        alike = old is not x and (old.numel(), old.dtype, old.device) == (x.numel(), x.dtype, x.device)
        kept.append(old.detach().reshape(x.shape).clone() if alike else x)
    return tree.unflatten(tree.flatten(part)[1], kept)
