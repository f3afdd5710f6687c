"""DTensors by their local parts: what this rank holds of each, and how that lies on a DeviceMesh.

Data parallelism over one dimension of a mesh, where parameters are split over another: each rank reduces the gradients
of its own parts with the ranks that hold the same parts. So ltx computes with the local parts, which are plain tensors,
and the user's step gets DTensors that are made of them (:class:`Placements`). What this file gives is true of plain
tensors too: such a tensor is its own local part, and whole.
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
    """torch's DTensor; None where nobody has imported it, which takes seconds, so that there are none.

    None inside a compiled graph too, where :func:`refuse_in_graph` looks for them.
    """
    if torch.compiler.is_compiling():
        return None
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def meshes_are_used() -> bool:
    """Whether any tensor of this process can lie on a mesh, which costs less to ask than of all leaves."""
    return _dtensor_class() is not None


def on_mesh(leaves: Iterable[Any]) -> list[int]:
    """The places of those that lie on a mesh, perhaps below the wrappers of torch.func."""
    cls = _dtensor_class()
    return [] if cls is None else [i for i, x in enumerate(leaves) if isinstance(_unwrapped(x), cls)]


def _unwrapped(x: Any) -> Any:
    while isinstance(x, torch.Tensor) and private.is_wrapped(x):
        x = private.unwrapped_once(x)
    return x


@at_trace_time
def refuse_in_graph(classes: tuple[str, ...]) -> None:
    """Run by Dynamo at trace time, with the names of the classes of tensors: raise if one is a DTensor."""
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
    """This rank's part of a DTensor, differentiable; anything else as it is."""
    return x.to_local() if on_mesh([x]) else x


def own_part(x: torch.Tensor) -> torch.Tensor:
    """The very object that a DTensor keeps as its local part, with nobody else's memory behind it; others as they are.

    What is done to that object is seen through the DTensor alone.
    """
    if on_mesh([x]):
        cast(Any, x)._local_tensor = x = cast(Any, x)._local_tensor.detach()
    return x


def whole(x: Any) -> Any:
    """The value of a DTensor as a plain tensor, the same on all ranks of its mesh; anything else as it is."""
    return x.full_tensor() if on_mesh([x]) else x


def summed(x: Any) -> Any:
    """A DTensor whose ranks hold terms of a sum (Partial) with that sum taken; anything else as it is."""
    if not (on_mesh([x]) and any(placement.is_partial() for placement in x.placements)):
        return x
    replicate = sys.modules["torch.distributed.tensor"].Replicate
    return x.redistribute(placements=[replicate() if p.is_partial() else p for p in x.placements])


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on a mesh."""

    mesh: Any  # torch's DeviceMesh
    placements: tuple[Any, ...]  # one for each dimension of the mesh: Shard, Replicate, Partial
    shape: torch.Size  # of the whole tensor
    stride: tuple[int, ...]

    @property
    def split_over(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups over which the tensor is split: one for each such dimension of the mesh."""
        return tuple(
            self.mesh.get_group(dim)
            for dim, placement in enumerate(self.placements)
            if not placement.is_replicate() and self.mesh.size(dim) > 1
        )

    def is_whole_on(self, group: dist.ProcessGroup) -> bool:
        """Whether `group` is one of the mesh's, and all of its ranks hold the same."""
        groups = [self.mesh.get_group(dim) for dim in range(self.mesh.ndim)]
        return group in groups and group not in self.split_over

    @property
    def is_partial(self) -> bool:
        return any(placement.is_partial() for placement in self.placements)


class _Place(torch.autograd.Function):
    """``_Place.apply(placement, local) -> DTensor``, without communication.

    A gradient may come with other placements: that of a replicated norm weight is a sum over the ranks of a sequence
    (Partial). The backward pass gives it the parameter's placements before it takes the local part.
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
    """How the leaves of a tree lie on meshes: a :class:`Placement` for each DTensor, None for each plain tensor.

    False, and without `leaves`, where all are plain (:data:`PLAIN`): nothing is done to these.
    """

    leaves: tuple[Placement | None, ...]

    @staticmethod
    def of(leaves: Sequence[Any]) -> Placements:
        """Those of `leaves`. Raises if one is a DTensor inside a transform of torch.func."""
        places = on_mesh(leaves)
        if not places:
            return PLAIN
        if private.in_transform():
            raise UnsupportedError(
                "torch.func's transforms, simulated ranks (ltx.vmap) among them, can't look into DTensors. Take first "
                "derivatives by loss.backward(), torch.autograd.grad, ltx.grad or ltx.train_step; torch.func.grad can "
                "where parameters don't require gradients (x.detach()). For simulated ranks take x.full_tensor()."
            )
        found: list[Placement | None] = [None] * len(leaves)
        for i in places:
            x = leaves[i]
            found[i] = Placement(x.device_mesh, tuple(x.placements), x.shape, x.stride())
        return Placements(tuple(found))

    def __bool__(self) -> bool:
        return bool(self.leaves)

    def local(self, leaves: list[Any]) -> list[Any]:
        """This rank's parts of DTensors, differentiable. Leaves that are parts already stay as they are."""
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
        """The process groups of all dimensions of all meshes, each once, in the order of the leaves."""
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

        They can't where a leaf is a sum that hasn't been taken, or its mesh has ranks of `group` in it.
        """
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        found = _obstacle(self, ranks)
        if found is not None:
            place, text = found
            raise UnsupportedError(f"{what}: leaf {paths()[place]!r} is a DTensor {text}")

    @cached_property
    def first_split(self) -> int | None:
        """The place of the first DTensor of which ranks hold different parts; None if there is none."""
        split = (i for i, placement in enumerate(self.leaves) if placement is not None and placement.split_over)
        return next(split, None)

    @cached_property
    def first_shared(self) -> int | None:
        """The place of the first leaf that some ranks share between which another leaf is split; None if none is."""
        split = [set[Any]() if placement is None else {*placement.split_over} for placement in self.leaves]
        groups = set[Any]().union(*split)
        return next((i for i, own in enumerate(split) if own != groups), None)


PLAIN = Placements(())


@lru_cache(maxsize=64)
def _obstacle(placements: Placements, ranks: tuple[int, ...]) -> tuple[int, str] | None:
    """The place of a leaf whose gradient can't be reduced over `ranks` of the world, and why."""
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
