"""Models whose parameters are DTensors on one dimension of a mesh of four processes, and the same on one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import gelu, mse_loss

import ltx
from ltx.typing import Tree

WIDTH, LENGTH = 8, 6


class Block(nn.Module):
    """A small transformer block: heads of four, so that two ranks have one each."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.norm2(x))))


def drawn() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The weights of a block, and a batch."""
    return Block().state_dict(), torch.randn(4, LENGTH, WIDTH), torch.randn(4, LENGTH, WIDTH)


def model_of(weights: dict[str, Tensor]) -> Block:
    """The block that has these weights."""
    model = Block()
    model.load_state_dict(weights)
    return model


@contextmanager
def mesh_of(*sizes: int, names: tuple[str, ...] = ("data", "model"), **world: int) -> Iterator[Any]:
    """A DeviceMesh in a world of its own, with which the mesh's process groups go away; `world`: the axes of ltx."""
    ltx.shutdown()
    try:
        with ltx.init(mesh=world or None):
            yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        _forget_meshes()
        ltx.init()


def _forget_meshes() -> None:
    """Clear torch's caches, which would hand a later world a mesh of this one, whose process groups are gone.

    torch takes meshes of the same shape for equal.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()


def parallelize(model: Block, mesh: Any, sequence: bool = False) -> Block:
    """`model`, split over the ranks of `mesh` as torch does it; with `sequence`, activations between are split too."""
    # Not at the top: it takes seconds, in every process that reads this file.
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import parallel as tp

    inside = {"input_layouts": Shard(1)} if sequence else {}
    outside = {"output_layouts": Shard(1)} if sequence else {}
    plan: dict[str, Any] = {name: tp.ColwiseParallel(**inside) for name in ("q", "k", "v", "up")}
    plan |= {name: tp.RowwiseParallel(**outside) for name in ("o", "down")}
    if sequence:
        plan |= {name: tp.SequenceParallel() for name in ("norm", "norm2")}
    tp.parallelize_module(model, mesh, plan)
    return model


def loss_of(model: Block, mesh: Any = None, sequence: bool = False) -> Any:
    """The loss of `model`, on `mesh` if it is split, as a step."""

    def step(params: Tree, x: Tensor, y: Tensor) -> Tensor:
        if not sequence:
            return mse_loss(ltx.functional_call(model, params, (x,)), y)
        from torch.distributed.tensor import DTensor, Replicate, Shard

        part = ltx.functional_call(model, params, (x.chunk(2, 1)[mesh.get_local_rank()],))
        whole: Any = DTensor.from_local(part, mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        return mse_loss(whole, DTensor.from_local(y, mesh, [Replicate()], run_check=False))  # itself a DTensor

    return step


def distributed(w: Tensor, mesh: Any, placement: Any = None) -> Any:
    """`w` as a DTensor, of which each rank of `mesh` has some rows, or what `placement` says."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(w, mesh, [placement or Shard(0)])


def full(tensors: Any) -> dict[str, Tensor]:
    """The values of a dict of tensors."""
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in tensors.items()}


def placements(tensors: Any) -> dict[str, Any]:
    """The placements of those that are DTensors."""
    return {name: getattr(x, "placements", None) for name, x in tensors.items()}
