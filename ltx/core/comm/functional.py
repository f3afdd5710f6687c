"""Collectives inside a compiled graph: functional ones, which Inductor sees and may reorder.

:mod:`ltx.core.comm.operations` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.fx import has_side_effect

from ltx.core.comm.group_collectives import Arguments, gathered_splits, permuted_splits

_resolve: Callable[[str], Any] = c10d._resolve_process_group  # type: ignore[attr-defined,assignment]
#: ``(buffer, n, group name, arguments)`` -> what :func:`wait` makes the result of.
Start = Callable[[torch.Tensor, int, str, Arguments], torch.Tensor]


def _ops() -> torch._ops._OpNamespace:
    return torch.ops._c10d_functional


# A tracer may neither drop a collective that peers wait for nor run it while it folds constants, as it does not wait.
for _name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
    has_side_effect(getattr(_ops(), _name).default)


def all_to_all(x: torch.Tensor, n: int, group: str, _: Arguments) -> torch.Tensor:
    """Part i of dimension 0 goes to rank i, and part i comes from there."""
    parts = [x.shape[0] // n] * n
    out: torch.Tensor = _ops().all_to_all_single(x, parts, parts, group)
    return out


def ppermute(x: torch.Tensor, n: int, group: str, arguments: Arguments) -> torch.Tensor:
    """Rank to rank as `arguments` say (source, destination, ...); zeros where no rank sends."""
    rank, numel = _resolve(group).rank(), x.numel()
    sent, received = permuted_splits(arguments, rank, n, numel)
    arrived = _exchanged([x.flatten() if count else None for count in sent], received, x, group)
    source = next((other for other, count in enumerate(received) if count), None)
    if source is None:
        return torch.zeros_like(x) * arrived[0]
    return arrived[source : source + numel].reshape(x.shape)


def _exchanged(given: list[torch.Tensor | None], received: list[int], like: torch.Tensor, group: str) -> torch.Tensor:
    """What arrives where rank i is given ``given[i]``, one part after the other, with one element for nothing.

    A filler goes to each rank that gets nothing: Inductor takes empty buffers out of the graph, and with them the
    exchange that peers wait for.
    """
    filler = like.new_zeros(1)
    parts = [filler if part is None else part for part in given]
    lengths = [max(count, 1) for count in received]
    return wait(_ops().all_to_all_single(torch.cat(parts), lengths, [part.numel() for part in parts], group))


def gather(x: torch.Tensor, n: int, group: str, arguments: Arguments) -> torch.Tensor:
    """Every rank's `x` on the rank in `arguments`, one after the other; zeros elsewhere."""
    rank, numel = _resolve(group).rank(), x.numel()
    sent, received = gathered_splits(arguments[0], rank, n, numel)
    arrived = _exchanged([x.flatten() if count else None for count in sent], received, x, group)
    return arrived if rank == arguments[0] else x.new_zeros(n * numel) * arrived[0]


def scatter(x: torch.Tensor, n: int, group: str, arguments: Arguments) -> torch.Tensor:
    """This rank's part, of n along dimension 0, of the `x` of the rank in `arguments`."""
    rank, numel = _resolve(group).rank(), x.numel() // n
    received, sent = gathered_splits(arguments[0], rank, n, numel)
    parts = [part if count else None for part, count in zip(x.reshape(n, -1).unbind(), sent, strict=True)]
    arrived = _exchanged(list(parts), received, x, group)
    return arrived[arguments[0] : arguments[0] + numel]


def all_reduce(op: str) -> Start:
    """An all-reduce by "sum", "max" or "min"."""
    return lambda x, n, group, _: _ops().all_reduce(x, op, group)


def all_gather(x: torch.Tensor, n: int, group: str, _: Arguments) -> torch.Tensor:
    """Every rank's `x`, one after the other along dimension 0."""
    out: torch.Tensor = _ops().all_gather_into_tensor(x, n, group)
    return out


def psum_scatter(x: torch.Tensor, n: int, group: str, _: Arguments) -> torch.Tensor:
    """This rank's part, along dimension 0, of the sum."""
    out: torch.Tensor = _ops().reduce_scatter_tensor(x, "sum", n, group)
    return out


def broadcast(x: torch.Tensor, n: int, group: str, arguments: Arguments) -> torch.Tensor:
    """The `x` of the rank in `arguments`."""
    out: torch.Tensor = _ops().broadcast(x, arguments[0], group)
    return out


def wait(value: torch.Tensor) -> torch.Tensor:
    """The completed result."""
    completed: torch.Tensor = torch.ops._c10d_functional.wait_tensor(value)
    return completed
