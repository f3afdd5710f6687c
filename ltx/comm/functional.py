"""Collectives inside a compiled graph: functional ones, which Inductor sees and may reorder.

:mod:`ltx.comm.operations` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from ltx.comm.process_groups import Arguments, permuted_splits

_resolve: Callable[[str], Any] = c10d._resolve_process_group  # type: ignore[attr-defined,assignment]
#: ``(buffer, n, group name, arguments)`` -> what :func:`wait` makes the result of.
Start = Callable[[torch.Tensor, int, str, Arguments], torch.Tensor]


def _ops() -> torch._ops._OpNamespace:
    return torch.ops._c10d_functional


def all_to_all(x: torch.Tensor, n: int, group: str, _: Arguments) -> torch.Tensor:
    """Part i of dimension 0 goes to rank i, and part i comes from there."""
    parts = [x.shape[0] // n] * n
    out: torch.Tensor = _ops().all_to_all_single(x, parts, parts, group)
    return out


def ppermute(x: torch.Tensor, n: int, group: str, arguments: Arguments) -> torch.Tensor:
    """Rank to rank as `arguments` say (source, destination, ...); zeros where no rank sends."""
    # A filler for each rank that gets or gives nothing: Inductor takes empty buffers out of the graph, and with them
    # the exchange that peers wait for.
    rank, numel = _resolve(group).rank(), x.numel()
    sent, received = permuted_splits(arguments, rank, n, numel)
    filler = x.new_zeros(1)
    given = torch.cat([x.flatten() if count else filler for count in sent])
    arrived = wait(_ops().all_to_all_single(given, [max(c, 1) for c in received], [max(c, 1) for c in sent], group))
    source = next((other for other, count in enumerate(received) if count), None)
    if source is None:
        return torch.zeros_like(x) * arrived[0]
    return arrived[source : source + numel].reshape(x.shape)


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
