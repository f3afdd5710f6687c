"""Parameters that are DTensors: torch's tensor parallelism on a dimension of a mesh, ltx's data parallelism on another.

ltx works on this rank's parts, which are plain tensors, and the user's function gets DTensors made of them:

    with_dtensors(data_parallel(f))(params) = data_parallel(f ∘ placed)(local(params))

The transpose of `placed` gives a gradient its parameter's placements. Three things ask the model's ranks: the norm for
clipping, whether gradients are finite, and whether what isn't split is equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partialmethod, reduce
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ltx
from ltx.errors import ReplicaDivergedError, StrategyError, UnsupportedError
from ltx.extend import CommHook, Optimizer, comm, recording, tree, unwrapped
from ltx.optim.clipping import ClipByGlobalNorm
from ltx.optim.combine import members_of, with_members
from ltx.typing import Tree

__all__ = ["DTensorState", "DTensorStep", "DTensorTrainStep", "with_dtensors"]


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def _placed(spec: Any, x: Tensor) -> Tensor:
    if spec is None:
        return x
    return DTensor.from_local(x, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


@dataclass(frozen=True)
class Layout:
    """How leaves lie on meshes: torch's DTensorSpec for each DTensor, None for each plain tensor."""

    specs: tuple[Any, ...]

    @staticmethod
    def of(params: Tree) -> Layout:
        return Layout(tuple(x._spec if isinstance(x, DTensor) else None for x in tree.flatten(params)[0]))

    def placed(self, parts: Tree) -> Tree:
        """DTensors made of the leaves of `parts`; a gradient gets its parameter's placements."""
        leaves, structure = tree.flatten(parts)
        return tree.unflatten(structure, list(map(_placed, self.specs, leaves)))

    @property
    def split_over(self) -> list[tuple[dist.ProcessGroup, ...]]:
        """For each leaf the process groups over which it is split."""
        dims = ([] if s is None else zip(s.mesh.get_all_groups(), s.placements, strict=True) for s in self.specs)
        return [tuple(group for group, how in each if group.size() > 1 and not how.is_replicate()) for each in dims]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of all dimensions of the meshes."""
        meshes = dict.fromkeys(spec.mesh for spec in self.specs if spec is not None)
        return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1))

    def anywhere(self, bad: Tensor) -> Tensor:
        """Whether `bad` is true here or on another rank of the meshes."""
        return reduce(lambda bad, group: ltx.psum(bad.float(), group) > 0, self.groups, bad)

    def check(self, step: Any, paths: Sequence[str]) -> None:
        """Raise unless the step's strategy can reduce the gradients of these leaves over its axis, part by part."""
        axis, strategy = comm.resolve(step.axis), step.strategy
        others = {*_ranks_of(axis)} - {dist.get_rank()}
        for path, spec in zip(paths, self.specs, strict=True):
            if spec is not None and (shared := sorted(others & {*spec.mesh.mesh.flatten().tolist()})):
                raise UnsupportedError(
                    f"leaf {path!r} is a DTensor whose mesh {spec.mesh} holds this rank and rank {shared[0]} of the "
                    "world, and so does the axis: its gradient would be reduced over these ranks twice, or with other "
                    'parts. Give axis=mesh["data"], and place parameters on mesh["model"] alone.'
                )
        over = dict(zip(paths, self.split_over, strict=True))
        split, every = [path for path in over if over[path]], {group for groups in over.values() for group in groups}
        beside = [path for path in over if {*over[path]} != every]
        steps, ways = range(sum(strategy.cycle or (0, 1))), (strategy.hook, strategy.post_update_hook)
        ahead = dict.fromkeys(way(step) for way in ways for step in steps)
        for part in _hooks_in((*vars(strategy).values(), *ahead)) if split and axis.size > 1 else ():
            lossy, whole = not (part.exact or part.reach == "element"), part.reach == "parameter"
            if whole or (lossy and beside):
                whose = "" if str(part) in str(strategy) else f" of {strategy}"
                among = "" if whole else f", and leaf {beside[0]!r}, which they share, is beside it"
                raise UnsupportedError(
                    f"leaf {split[0]!r} is a DTensor, split over ranks{among}. What {part}{whose} makes of a "
                    "number depends on others: use ltx.hooks.FP16() or BF16()"
                    f"{', or place all parameters alike' if among else ''}."
                )


def _ranks_of(axis: Any) -> list[int]:
    return [dist.get_rank()] if axis.comm is None else dist.get_process_group_ranks(axis.comm.group)


def _hooks_in(values: Iterable[Any]) -> Iterator[CommHook]:
    """The hooks among `values`, and the hooks inside them."""
    for hook in (value for value in values if isinstance(value, CommHook)):
        yield hook
        yield from _hooks_in(vars(hook).values())


@dataclass(frozen=True, eq=False)
class _OnDTensors:
    """The user's function, which gets DTensors made of its parameters' parts."""

    fn: Callable[..., Any]
    layout: Layout

    def __call__(self, parts: Tree, *args: Any, **named: Any) -> Any:
        if recording() or any(unwrapped(x) is not x for x in tree.flatten(parts)[0]):
            raise UnsupportedError(
                "compiled graphs, torch.func's transforms and simulated ranks can't look into DTensors. Call the step "
                "eagerly; the loss inside may be compiled: ltx.data_parallel(torch.compile(loss))."
            )
        given = self.layout.placed(parts)
        for x in tree.flatten(given)[0]:
            # Nodes that are made before the step would come last in the backward pass, and nothing would overlap.
            getattr(x.grad_fn, "_set_sequence_nr", lambda number: None)(1 << 62)
        return tree.map(_plain, self.fn(given, *args, **named))


def _plain(x: Any) -> Any:
    """The value of a 0-dim DTensor, such as the loss, which is equal on all ranks; anything else unchanged."""
    if isinstance(x, DTensor) and x.ndim:
        raise UnsupportedError(f"the step returned a DTensor, {[*x.shape]}: return x.full_tensor(), or x.to_local().")
    return x.full_tensor() if isinstance(x, DTensor) else x


def _around(fn: Any, layout: Layout) -> Any:
    """`fn`, whose innermost function gets DTensors: ltx's own around it (micro-batches, casts) work on parts."""
    if type(fn).__module__.startswith("ltx.") and is_dataclass(fn) and hasattr(fn, "fn"):
        return replace(fn, fn=_around(fn.fn, layout))  # type: ignore[type-var]
    return _OnDTensors(fn, layout)


@dataclass(frozen=True, eq=False)
class DTensorStep:
    """A data-parallel step of DTensors, made by :func:`with_dtensors`. Called like the step."""

    step: Any  # what ltx.data_parallel returns
    _made: dict[Layout, Any] = field(default_factory=dict, init=False, repr=False)

    def _of(self, params: Tree) -> tuple[Any, Layout]:
        layout = Layout.of(params)
        if layout not in self._made:
            layout.check(self.step, tree.leaf_paths(params))
            self._made[layout] = replace(self.step, fn=_around(self.step.fn, layout))
        return self._made[layout], layout

    def __call__(self, params: Tree, *args: Any, **named: Any) -> Any:
        if self.step.blocked and any(x.requires_grad for x in tree.flatten(params)[0]):
            raise UnsupportedError("block_backward_sync: take own gradients by with_dtensors(step).grad(params, ...).")
        return self._of(params)[0](tree.map(_local, params), *args, **named)

    def init(self, params: Tree) -> Any:
        """The communication state before the first step, of this rank's parts."""
        return self.step.init(tree.map(_local, params))

    def grad_and_value(
        self, params: Tree, *args: Any, sync_state: Any = None, has_aux: bool = False, **named: Any
    ) -> Any:
        """``ltx.grad_and_value(step, has_aux=...)(...)``; gradients are DTensors that lie as the parameters do."""
        (step, layout), parts = self._of(params), tree.map(lambda x: _local(x.detach()), params)
        grads, value = ltx.grad_and_value(step, has_aux=has_aux)(parts, *args, sync_state=sync_state, **named)
        placed = layout.placed(grads if sync_state is None else grads[0])
        return placed if sync_state is None else (placed, grads[1]), value

    def grad(self, params: Tree, *args: Any, **named: Any) -> Any:
        """:meth:`grad_and_value` without the value."""
        return self.grad_and_value(params, *args, **named)[0]


@dataclass(frozen=True)
class NormOfParts:
    """The norm of gradients with this layout, from all ranks' parts; each number counts once."""

    takes_parts: ClassVar[bool] = True
    layout: Layout

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        over, total = self.layout.split_over, torch.zeros((), dtype=torch.float64, device=parts[0].device)
        for groups in dict.fromkeys(over):
            mine = [x for x, those in zip(parts, over, strict=True) if those == groups]
            total += reduce(ltx.psum, groups, nn.utils.get_total_norm(mine).double().square()).to(total.device)
        return total.sqrt().to(reduce(torch.promote_types, [x.dtype.to_real() for x in parts]))


def _on_parts(optimizer: Any, layout: Layout) -> Any:
    """`optimizer`, for trained parameters with this layout, of which ranks hold parts."""
    if optimizer.offers.elementwise or not any(layout.split_over):
        return optimizer
    if isinstance(optimizer, ClipByGlobalNorm) and optimizer.takes_parts:
        return replace(optimizer, norm=NormOfParts(layout))
    if isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # an average of its parameters
        return replace(optimizer, optimizer=_on_parts(inner, layout))
    if (members := members_of(optimizer)) != (optimizer,):
        return with_members(optimizer, [_on_parts(member, layout) for member in members])
    raise StrategyError(
        f"{optimizer!r} needs whole parameters, and ranks hold parts of DTensors: use an elementwise optimizer (SGD, "
        "Adam, ...; from_functions(..., elementwise=True)), alone or in a chain with clip_by_global_norm."
    )


@dataclass(frozen=True, eq=False)
class DTensorState:
    """A train state of DTensors. `parts` is this rank's :class:`ltx.TrainState`, which steps update.

    Its `params` are the parameters as DTensors: copies, which later steps don't change.
    """

    parts: ltx.TrainState
    layout: Layout  # of all parameters
    trained: Layout  # of those that are trained

    @property
    def params(self) -> Tree:
        return self.layout.placed(tree.map(torch.clone, self.parts.params))

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parts, for ``torch.distributed.checkpoint``; the same ranks of as many have to load them."""
        mine = f"rank_{dist.get_rank()}_of_{dist.get_world_size()}"
        return {f"{mine}.{path}": x for path, x in self.parts.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self.parts.load_state_dict({path.partition(".")[2]: x for path, x in state_dict.items()})


@dataclass(frozen=True, eq=False)
class DTensorTrainStep:
    """A train step of DTensors, made by :func:`with_dtensors`. It has the methods of a train step."""

    train: Any  # what ltx.train_step returns
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def _of(self, layout: Layout, trained: Layout) -> Any:
        if (layout, trained) not in self._made:
            step = replace(self.train.step, fn=_around(self.train.step.fn, layout))
            own = {"optimizer": _on_parts(self.train.optimizer, trained), "bad_anywhere": layout.anywhere}
            self._made[layout, trained] = replace(self.train, step=step, **own)
        return self._made[layout, trained]

    def init(self, params: Tree, buffers: Tree = None) -> DTensorState:
        """``train.init(params, buffers)``. What isn't split is compared: it has to be equal on the model's ranks."""
        if isinstance(params, nn.Module):
            raise UnsupportedError("a state copies DTensors: use train.init(dict(module.named_parameters())).")
        layout, paths = Layout.of(params), tree.leaf_paths(params)
        layout.check(self.train.step, paths)
        own = tree.map(lambda x: _local(x.detach()), params)
        given = tree.map(
            lambda x, own: nn.Parameter(own, x.requires_grad) if isinstance(x, nn.Parameter) else own, params, own
        )
        with warnings.catch_warnings():  # a module of DTensors can't follow, so its Parameters are right here
            warnings.filterwarnings("ignore", "train.init was given a module's Parameters")
            parts = self._of(layout, Layout(())).init(given, buffers)
        for group in layout.groups:
            leaves = zip(paths, tree.flatten(parts.params)[0], layout.split_over, strict=True)
            try:
                ltx.check_replicas({path: x for path, x, over in leaves if group not in over}, group)
            except ReplicaDivergedError as error:
                raise ReplicaDivergedError(f"{error} It isn't split there: was the model made of one seed?") from None
        return self._state(layout, parts)

    def _state(self, layout: Layout, parts: ltx.TrainState) -> DTensorState:
        known, specs = {*tree.leaf_paths(parts.trained)}, zip(tree.leaf_paths(parts.params), layout.specs, strict=True)
        trained = Layout(tuple(spec for path, spec in specs if path in known))
        self._of(layout, trained)  # raises for optimizers that need whole parameters
        held_by = tuple(_ranks_of(comm.resolve(self.train.step.axis))) if any(layout.split_over) else ()
        return DTensorState(replace(parts, layout=replace(parts.layout, held_by=held_by)), layout, trained)

    def __call__(self, state: DTensorState, *args: Any, **named: Any) -> tuple[DTensorState, ltx.Metrics]:
        parts, metrics = self._of(state.layout, state.trained)(state.parts, *args, **named)
        return replace(state, parts=parts), metrics

    def _then(self, name: str, state: DTensorState, *args: Any, **named: Any) -> DTensorState:
        method = getattr(self._of(state.layout, state.trained), name)
        return self._state(state.layout, method(state.parts, *args, **named))

    finish, gather = partialmethod(_then, "finish"), partialmethod(_then, "gather")
    broadcast, adopt = partialmethod(_then, "broadcast"), partialmethod(_then, "adopt")


def with_dtensors(step: Any) -> Any:
    """A data-parallel step, or a train step, for parameters that are DTensors; inside, ltx sees this rank's parts."""
    return DTensorStep(step) if isinstance(step, ltx.DataParallel) else DTensorTrainStep(step)


def __dir__() -> list[str]:
    return sorted(__all__)
