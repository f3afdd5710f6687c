"""DTensors: their local parts, and their placements on a DeviceMesh.

Data parallelism over one dimension of a mesh, with parameters split over another: each rank reduces the gradients of
its own parts with the ranks that hold the same parts. So ltx computes with the local parts, which are plain tensors,
and the user's step gets DTensors made of them (:class:`Placements`). The functions here take plain tensors too: a plain
tensor is its own local part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist

from ltx.core.base import private
from ltx.core.base.errors import UnsupportedError
from ltx.core.base.traced import at_trace_time


def _dtensor_class() -> Any:
    """torch's DTensor class; None if nobody has imported it yet (it takes seconds), so that no DTensor exists.

    Also None inside a compiled graph, where :func:`refuse_in_graph` looks for DTensors.
    """
    if torch.compiler.is_compiling():
        return None
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def meshes_are_used() -> bool:
    """Whether this process can have any DTensors. This is cheaper than :func:`on_mesh`."""
    return _dtensor_class() is not None


def on_mesh(leaves: Iterable[Any]) -> list[int]:
    """The indices of the leaves that are DTensors, or that torch.func has wrapped around DTensors."""
    cls = _dtensor_class()
    if cls is None:
        return []
    kinds = [*map(type, map(private.unwrapped, leaves) if private.in_transform() else leaves)]
    placed = {kind for kind in {*kinds} if issubclass(kind, cls)}  # few classes are asked, and not each leaf
    return [i for i, kind in enumerate(kinds) if kind in placed] if placed else []


@at_trace_time
def refuse_in_graph(classes: tuple[str, ...]) -> None:
    """Raise if one of the class names of a graph's tensors is DTensor. Dynamo runs this while it traces."""
    if "DTensor" in classes:
        raise UnsupportedError(
            "a compiled graph can't reduce the gradients of DTensors. Call the step eagerly; the loss inside is "
            "compiled as far as torch compiles DTensors: ltx.data_parallel(torch.compile(loss), axis=...)."
        )


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether torch's fully_shard (FSDP2) manages the parameters of `module`."""
    cls = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return cls is not None and isinstance(module, cls)


def local(x: Any) -> Any:
    """This rank's part of a DTensor, differentiable; anything else unchanged."""
    return x.to_local() if on_mesh([x]) else x


def own_part(x: torch.Tensor) -> torch.Tensor:
    """Detach the local tensor inside a DTensor, and return this very object; return a plain tensor unchanged.

    In-place changes of the returned object are visible through the DTensor.
    """
    if on_mesh([x]):
        cast(Any, x)._local_tensor = x = cast(Any, x)._local_tensor.detach()
    return x


def whole(x: Any) -> Any:
    """The full value of a DTensor as a plain tensor, on all ranks of its mesh; anything else unchanged."""
    return x.full_tensor() if on_mesh([x]) else x


def summed(x: Any) -> Any:
    """A DTensor with its Partial placements summed (replicated); anything else unchanged."""
    if not (on_mesh([x]) and any(placement.is_partial() for placement in x.placements)):
        return x
    replicate = sys.modules["torch.distributed.tensor"].Replicate
    return x.redistribute(placements=[replicate() if p.is_partial() else p for p in x.placements])


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on a mesh."""

    mesh: Any  # torch's DeviceMesh
    placements: tuple[Any, ...]  # Shard, Replicate or Partial for each dimension of the mesh
    shape: torch.Size  # the whole tensor's shape
    stride: tuple[int, ...]

    @staticmethod
    def of(x: Any) -> Placement | None:
        """The placement of a DTensor; None for a plain tensor."""
        return Placement(x.device_mesh, tuple(x.placements), x.shape, x.stride()) if on_mesh([x]) else None

    @property
    def split_over(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups over which the tensor is split, one for each mesh dimension that splits it."""
        return tuple(
            self.mesh.get_group(dim)
            for dim, placement in enumerate(self.placements)
            if not placement.is_replicate() and self.mesh.size(dim) > 1
        )

    def is_whole_on(self, group: dist.ProcessGroup) -> bool:
        """Whether `group` belongs to the mesh, and all its ranks hold the same part of the tensor."""
        groups = [self.mesh.get_group(dim) for dim in range(self.mesh.ndim)]
        return group in groups and group not in self.split_over

    @property
    def is_partial(self) -> bool:
        return any(placement.is_partial() for placement in self.placements)


class _Place(torch.autograd.Function):
    """``_Place.apply(placement, local) -> DTensor``, without communication.

    The gradient may have other placements than the parameter: with sequence parallelism the gradient of a replicated
    norm weight is Partial. So ``backward`` redistributes the gradient before it takes the local part.
    """

    @staticmethod
    def forward(ctx: Any, placement: Placement, x: torch.Tensor) -> Any:
        ctx.placement = placement
        ctx.set_materialize_grads(False)
        return _dtensor_class().from_local(
            x, placement.mesh, placement.placements, run_check=False, shape=placement.shape, stride=placement.stride
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[None, torch.Tensor | None]:
        if grad is None:
            return None, None
        return None, grad.redistribute(ctx.placement.mesh, ctx.placement.placements).to_local()


@dataclass(frozen=True)
class Placements:
    """How a tree's leaves are placed on meshes: a :class:`Placement` for each DTensor, None for each plain tensor.

    :data:`PLAIN` stands for trees of plain tensors only: it has no `leaves`, is false, and its methods change nothing.
    """

    leaves: tuple[Placement | None, ...]

    @staticmethod
    def of(leaves: Sequence[Any]) -> Placements:
        """The placements of `leaves`. Raises for a DTensor inside a torch.func transform."""
        places = on_mesh(leaves)
        if not places:
            return PLAIN
        if private.in_transform():
            raise UnsupportedError(
                "torch.func's transforms, simulated ranks (ltx.vmap) among them, can't look into DTensors. Take first "
                "derivatives by loss.backward(), torch.autograd.grad, ltx.grad or ltx.train_step; torch.func.grad can "
                "where parameters don't require gradients (x.detach()). For simulated ranks take x.full_tensor()."
            )
        return Placements(tuple(map(Placement.of, leaves)))

    def __bool__(self) -> bool:
        return bool(self.leaves)

    def local(self, leaves: list[Any]) -> list[Any]:
        """This rank's parts of the DTensors, differentiable. Plain tensors stay as they are."""
        return [local(x) for x in leaves] if self.leaves else leaves

    def placed(self, parts: list[Any]) -> list[Any]:
        """DTensors made of their `parts`, differentiable: the inverse of :meth:`local`."""
        if not self.leaves:
            return parts
        return [
            x if placement is None else _Place.apply(placement, x)  # type: ignore[no-untyped-call]
            for x, placement in zip(parts, self.leaves, strict=True)
        ]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of all mesh dimensions, without duplicates, in the order of the leaves."""
        found = {
            group: None
            for placement in self.leaves
            if placement is not None
            for group in (placement.mesh.get_group(dim) for dim in range(placement.mesh.ndim))
            if group.size() > 1
        }
        return list(found)

    def check(self, group: dist.ProcessGroup | None, paths: Callable[[], Sequence[str]], what: str) -> None:
        """Raise unless the gradients of these leaves can be reduced over the ranks of `group`, part by part.

        They can't if a leaf is Partial, or if its mesh contains other ranks of `group`.
        """
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        found = _obstacle(self, ranks)
        if found is not None:
            place, text = found
            raise UnsupportedError(f"{what}: leaf {paths()[place]!r} is a DTensor {text}")

    @cached_property
    def first_split(self) -> int | None:
        """The index of the first leaf that is split over ranks, or None."""
        split = (i for i, placement in enumerate(self.leaves) if placement is not None and placement.split_over)
        return next(split, None)

    @cached_property
    def first_shared(self) -> int | None:
        """The index of the first leaf that isn't split over all groups over which some leaf is split, or None."""
        split = [set[Any]() if placement is None else {*placement.split_over} for placement in self.leaves]
        groups = set[Any]().union(*split)
        return next((i for i, own in enumerate(split) if own != groups), None)


PLAIN = Placements(())


@lru_cache(maxsize=64)
def _obstacle(placements: Placements, ranks: tuple[int, ...]) -> tuple[int, str] | None:
    """The index of a leaf whose gradient can't be reduced over `ranks` of the world, and the reason."""
    axis_ranks = set(ranks) - {dist.get_rank()}
    meshes = dict[Any, set[int]]()
    for place, placement in enumerate(placements.leaves):
        if placement is None:
            continue
        if placement.is_partial:
            return place, (
                f"with placements {placement.placements}: ranks hold terms of a sum that hasn't been taken, which is "
                "no parameter. Give it Replicate or Shard: x.redistribute(placements=...)."
            )
        if placement.mesh not in meshes:
            meshes[placement.mesh] = set(placement.mesh.mesh.flatten().tolist())
        if shared := sorted(axis_ranks & meshes[placement.mesh]):
            return place, (
                f"whose mesh {placement.mesh} holds this rank and rank {shared[0]} of the world, and so does the axis: "
                "its gradient would be reduced over these ranks twice, or over ranks that hold other parts. Give "
                'the axis the other dimension of the mesh, axis=mesh["data"], and place parameters on mesh["model"] '
                "alone."
            )
    return None
