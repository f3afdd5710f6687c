"""What can be issued: each operation's call into torch.distributed and its share of the wire.

This table is the only place in ltx that calls a collective of torch.distributed. Every call is asynchronous and works
on contiguous buffers that the caller has made for it. The process groups that they run on are opened here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# torch 2.13 has the pair *_single and warns about *_tensor; 2.11 has only *_tensor.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Operation:
    """How one kind of collective is started, and how many bytes a rank sends for it."""

    start: Callable[[dist.ProcessGroup, torch.Tensor, int], tuple[dist.Work, torch.Tensor]]
    wire_bytes: Callable[[int, int], int]  # (bytes of the buffer, ranks) -> bytes sent by one rank


def _sum(group: dist.ProcessGroup, buffer: torch.Tensor, _arg: int) -> tuple[dist.Work, torch.Tensor]:
    return dist.all_reduce(buffer, group=group, async_op=True), buffer


def _gather(group: dist.ProcessGroup, buffer: torch.Tensor, _arg: int) -> tuple[dist.Work, torch.Tensor]:
    out = buffer.new_empty((group.size(), *buffer.shape))
    return _all_gather(out.flatten(), buffer.flatten(), group=group, async_op=True), out


def _scatter_sum(group: dist.ProcessGroup, buffer: torch.Tensor, _arg: int) -> tuple[dist.Work, torch.Tensor]:
    out = buffer.new_empty(buffer.shape[1:])
    return _reduce_scatter(out.flatten(), buffer.flatten(), group=group, async_op=True), out


def _broadcast(group: dist.ProcessGroup, buffer: torch.Tensor, source: int) -> tuple[dist.Work, torch.Tensor]:
    return dist.broadcast(buffer, group_src=source, group=group, async_op=True), buffer


OPERATIONS: dict[str, Operation] = {
    "sum": Operation(_sum, lambda nbytes, n: 2 * nbytes * (n - 1) // n),
    "all_gather": Operation(_gather, lambda nbytes, n: nbytes * (n - 1)),
    "reduce_scatter": Operation(_scatter_sum, lambda nbytes, n: nbytes * (n - 1) // n),
    "broadcast": Operation(_broadcast, lambda nbytes, n: nbytes * (n - 1) // n),
}


def open_group(ranks: list[int], name: str, backend: str, timeout: timedelta, description: str) -> dist.ProcessGroup:
    """A process group over the global `ranks` that they alone open, called `name` on all of them.

    ``dist.new_group(..., use_local_synchronization=True)`` makes names up from the number of groups that a process has
    at the moment. So ranks that differ in their other groups wait for each other for ever, and a name is used again
    after its group was destroyed, whose addresses are still in the store.
    """
    make: Any = c10d._new_process_group_helper
    group: dist.ProcessGroup = make(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        c10d.Backend(backend),
        c10d._get_default_store(),
        name,
        timeout=timeout,
        group_desc=description,
    )[0]
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def unregister(group: dist.ProcessGroup) -> None:
    """Compiled graphs, which find a group by its name, raise from now on."""
    forget: Any = c10d._unregister_process_group  # type: ignore[attr-defined]
    forget(group.group_name)
