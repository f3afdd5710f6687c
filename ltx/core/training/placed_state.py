"""Train states of DTensors: a train step works on this rank's parts of them, and returns states of DTensors.

Inside the step, parameters, optimizer state and the strategy's state are plain tensors: this rank's parts, which are
the same on all ranks of the data axis. Two things need more than a part, and ask the ranks along the mesh's other
dimensions: the norm for clipping, and whether gradients are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ltx.core import collectives, comm
from ltx.core.base import tree
from ltx.core.base.errors import UnsupportedError
from ltx.core.base.needs import require
from ltx.core.base.placements import PLAIN, Placement, Placements, local, meshes_are_used, on_mesh
from ltx.core.optim import Optimizer
from ltx.core.optim.averages import Ema
from ltx.core.optim.combine import Chain
from ltx.core.optim.grad_transforms import ClipByGlobalNorm, global_norm
from ltx.core.training.settings import TrainSettings
from ltx.core.training.train_state import TrainState, hand_over
from ltx.core.transforms.compare import check_leaves
from ltx.core.transforms.run import check_placements
from ltx.typing import Tree

Train = TypeVar("Train", bound=TrainSettings)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

#: The parts of a state that may hold DTensors.
_PARTS = ("params", "buffers", "opt_state", "frozen")


def _parts(state: TrainState) -> list[Tree]:
    return [state.held(name) for name in _PARTS]


@dataclass(frozen=True)
class PlacedState:
    """The placements on meshes of a train state's parts: how each DTensor is divided among ranks."""

    given: Placements  # the parameters as the step gets them, trained and frozen ones together
    trained: Placements  # the parameters that are trained
    parts: Placements = PLAIN  # all leaves of :data:`_PARTS`

    @staticmethod
    def of(state: Any) -> PlacedState | None:
        """The placements of `state`; None if its parameters are plain tensors."""
        if not (meshes_are_used() and isinstance(state, TrainState)):
            return None
        state.check_owned()
        trained, frozen = state.held("params"), state.frozen
        given = Placements.of(tree.flatten(trained if frozen is None else tree.filled(trained, frozen))[0])
        if not given:
            return None
        return PlacedState(given, *(Placements.of(tree.flatten(part)[0]) for part in (trained, _parts(state))))

    def local(self, state: TrainState) -> TrainState:
        """`state` with this rank's parts in place of DTensors, in the same memory; it is donated when `state` is."""
        with torch.no_grad():
            return _with_parts(state, tree.map(local, _parts(state)))

    def placed(self, state: TrainState) -> TrainState:
        """The inverse of :meth:`local`."""
        leaves, spec = tree.flatten(_parts(state))
        with torch.no_grad():
            return _with_parts(state, tree.unflatten(spec, self.parts.placed(leaves)))

    def train(self, train: Train) -> Train:
        """`train` in a form that works on :meth:`local` states."""
        axis, strategy = comm.resolve(train.step.axis), train.step.strategy
        if self.given.first_split is not None and axis.size > 1:
            require("parts, strategy", strategy)
        optimizer = _on_parts(train.optimizer, self.trained)
        return replace(train, step=replace(train.step, placements=self.given), optimizer=optimizer)


def _with_parts(state: TrainState, parts: Sequence[Tree]) -> TrainState:
    """`state` with other :data:`_PARTS`; it is donated when `state` is."""
    held = {name: state.held(name) for name in ("sync_state", "loss_scale")}
    return replace(state, **dict(zip(_PARTS, parts, strict=True)), **held).unseen()


def on_parts(
    method: Callable[Concatenate[Train, TrainState, Arguments], Result],
) -> Callable[Concatenate[Train, TrainState, Arguments], Result]:
    """Let a method of a train step take states of DTensors too. It returns a state, or a tuple that begins with one."""

    @wraps(method)
    def of_state(train: Train, state: TrainState, *args: Arguments.args, **named: Arguments.kwargs) -> Any:
        how = PlacedState.of(state)
        if how is None:
            return method(train, state, *args, **named)
        seen, parts = state.seen, how.local(state)
        try:
            result: Any = method(how.train(train), parts, *args, **named)
        except BaseException:
            if parts.step != state.step:  # an interrupt came after the commit, so the caller didn't get the next state
                state.become(how.placed(parts))
            raise
        following = result[0] if isinstance(result, tuple) else result
        following = state if following is parts else how.placed(following)
        if state.is_donated:
            hand_over(state, following, seen)
        return (following, *result[1:]) if isinstance(result, tuple) else following

    return cast(Callable[Concatenate[Train, TrainState, Arguments], Result], of_state)


def init_on_parts(train: Any, params: Tree, buffers: Tree) -> TrainState | None:
    """``train.init(params, buffers)`` if some parameters are DTensors; else None."""
    if isinstance(params, torch.nn.Module):
        if on_mesh(params.parameters()):
            raise UnsupportedError(
                f"train.init: parameters of this {type(params).__name__} are DTensors, which a state copies and never "
                "takes over. Use train.init(dict(module.named_parameters()))."
            )
        return None
    leaves, spec = tree.flatten(params)
    given = Placements.of(leaves)
    if not given:
        return None
    axis = comm.resolve(train.step.axis)
    check_placements(axis, given, train.step.strategy, 0, lambda: tree.leaf_paths(params), "train_step")
    pairs = zip(leaves, given.leaves, strict=True)
    parts = tree.unflatten(spec, [x if how is None else _parameter_part(x) for x, how in pairs])
    train = PlacedState(given, given).train(train)
    state = train.init(parts, tree.map(local, buffers))
    trained, frozen = state.held("params"), state.frozen
    _check_shared(given, trained if frozen is None else tree.filled(trained, frozen))
    by_path = dict(zip(tree.leaf_paths(params), given.leaves, strict=True))
    shapes = dict(zip(tree.leaf_paths(parts), (x.shape for x in tree.flatten(parts)[0]), strict=True))

    def of(part: Tree) -> list[Placement | None]:
        """The placements of parameters, or of the optimizer's state for them."""
        pairs = zip(tree.leaf_paths(part), tree.flatten(part)[0], strict=True)
        paths = [(_parameter_of(path, by_path), x) for path, x in pairs]
        return [by_path[path] if path is not None and shapes[path] == x.shape else None for path, x in paths]

    of_buffers = map(Placement.of, tree.flatten(buffers)[0])
    found = Placements((*of(trained), *of_buffers, *of(state.held("opt_state")), *of(frozen)))
    return PlacedState(given, given, found).placed(state)


_SHARED = (
    "A tensor that isn't split over a dimension of the parameters' mesh must be equal on its ranks. Fix: call "
    "torch.manual_seed before the model is made; or, if ranks hold parts of the tensor, make a DTensor of these "
    "(DTensor.from_local)."
)


def _check_shared(given: Placements, parts: Tree) -> None:
    """Raise ReplicaDivergedError on all ranks unless ranks of a mesh are equal in tensors that aren't split on it."""
    leaves = list(zip(given.leaves, tree.leaf_paths(parts), tree.flatten(parts)[0], strict=True))
    for group in given.groups:
        shared = [(path, x) for placement, path, x in leaves if placement is None or placement.is_whole_on(group)]
        check_leaves(comm.resolve(group), shared, _SHARED)


def _parameter_part(x: Tensor) -> Tensor:
    """This rank's part of a parameter; its ``requires_grad`` is the parameter's."""
    part = local(x.detach())
    return torch.nn.Parameter(part, x.requires_grad) if isinstance(x, torch.nn.Parameter) else part


def _parameter_of(path: str, params: Any) -> str | None:
    """The path of the parameter to which the optimizer's leaf at `path` belongs: the longest path that matches.

    >>> _parameter_of("per_param.layer.weight.exp_avg", {"weight": 0, "layer.weight": 0})
    'layer.weight'
    """
    if "<the tree itself>" in params:
        return "<the tree itself>"
    pieces = path.split(".")
    ends = [pieces[start:end] for end in (len(pieces) - 1, len(pieces)) for start in range(end)]
    longest: list[str] = max((end for end in ends if ".".join(end) in params), key=lambda end: len(end), default=[])
    return ".".join(longest) if longest else None


@dataclass(frozen=True)
class NormOfParts:
    """The norm of gradients with these placements, from all ranks' parts; each number counts once."""

    takes_parts: ClassVar[bool] = True

    placements: Placements

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        together: dict[Any, list[Tensor]] = {}
        for x, placement in zip(parts, self.placements.leaves, strict=True):
            together.setdefault(() if placement is None else placement.split_over, []).append(x)
        own = [(groups, global_norm(tensors)) for groups, tensors in together.items()]
        total = torch.zeros((), dtype=torch.float64, device=own[0][1].device)
        for groups, norm in own:
            square = norm.double().square()
            for group in groups:
                square = collectives.psum(square, group)
            total = total + square.to(total.device)
        dtypes = [norm.dtype for _, norm in own]
        return total.sqrt().to(dtypes[0] if len(set(dtypes)) == 1 else torch.float64)


def on_any_rank(bad: Tensor, placements: Placements) -> Tensor:
    """Whether `bad` is true here or on another rank of the meshes."""
    for group in placements.groups:
        bad = collectives.psum(bad.float(), group) > 0
    return bad


def _on_parts(optimizer: Optimizer, placements: Placements) -> Optimizer:
    """`optimizer`, for parameters whose parts are on several ranks."""
    if optimizer.offers.elementwise or placements.first_split is None:
        return optimizer
    if isinstance(optimizer, ClipByGlobalNorm) and optimizer.takes_parts:
        return replace(optimizer, norm=NormOfParts(placements))
    if isinstance(optimizer, Chain):
        return replace(optimizer, members=tuple(_on_parts(member, placements) for member in optimizer.members))
    if isinstance(optimizer, Ema):
        return replace(optimizer, optimizer=_on_parts(optimizer.optimizer, placements))
    require("parts, optimizer", optimizer)
    return optimizer
