"""The wire inside a compiled graph: functional collectives that Inductor sees and may reorder.

Python doesn't run in a compiled step, so these issues are neither compared nor counted; they were when the step was
traced. Same operations and arguments as :mod:`ltx.comm.operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from ltx.comm.operations import Arguments, permuted_splits

_resolve: Callable[[str], Any] = c10d._resolve_process_group  # type: ignore[attr-defined,assignment]
_Start = Callable[[torch.Tensor, int, str, Arguments], torch.Tensor]


def _ops() -> torch._ops._OpNamespace:
    return torch.ops._c10d_functional


def _exchange(x: torch.Tensor, n: int, group: str, _: Arguments) -> torch.Tensor:
    parts = [x.shape[0] // n] * n
    out: torch.Tensor = _ops().all_to_all_single(x, parts, parts, group)
    return out


def _permute(x: torch.Tensor, n: int, group: str, arguments: Arguments) -> torch.Tensor:
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


_STARTS: dict[str, _Start] = {
    "psum": lambda x, n, group, _: _ops().all_reduce(x, "sum", group),
    "pmax": lambda x, n, group, _: _ops().all_reduce(x, "max", group),
    "pmin": lambda x, n, group, _: _ops().all_reduce(x, "min", group),
    "all_gather": lambda x, n, group, _: _ops().all_gather_into_tensor(x, n, group),
    "psum_scatter": lambda x, n, group, _: _ops().reduce_scatter_tensor(x, "sum", n, group),
    "broadcast": lambda x, n, group, arguments: _ops().broadcast(x, arguments[0], group),
    "all_to_all": _exchange,
    "ppermute": _permute,
}


def start(operation: str, buffer: torch.Tensor, size: int, group_name: str, arguments: Arguments = ()) -> torch.Tensor:
    """Begin `operation`; the result may be used only through :func:`wait`."""
    return _STARTS[operation](buffer.contiguous(), size, group_name, arguments)


def wait(value: torch.Tensor) -> torch.Tensor:
    """The landed result."""
    completed: torch.Tensor = torch.ops._c10d_functional.wait_tensor(value)
    return completed
