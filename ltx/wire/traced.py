"""The wire inside a compiled graph: functional collectives that Inductor sees and may reorder.

Python doesn't run in a compiled step, so these issues are neither compared nor counted; they were when the step was
traced. Same operations and arguments as :mod:`ltx.wire.operations`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_Start = Callable[[torch.Tensor, int, str, int], torch.Tensor]


def _ops() -> torch._ops._OpNamespace:
    return torch.ops._c10d_functional


_STARTS: dict[str, _Start] = {
    "sum": lambda x, n, group, arg: _ops().all_reduce(x, "sum", group),
    "all_gather": lambda x, n, group, arg: _ops().all_gather_into_tensor(x, n, group),
    "reduce_scatter": lambda x, n, group, arg: _ops().reduce_scatter_tensor(x, "sum", n, group),
    "broadcast": lambda x, n, group, arg: _ops().broadcast(x, arg, group),
}


def start(operation: str, buffer: torch.Tensor, size: int, group_name: str, argument: int = 0) -> torch.Tensor:
    """Begin `operation`; the result may be used only through :func:`wait`."""
    return _STARTS[operation](buffer.contiguous(), size, group_name, argument)


def wait(value: torch.Tensor) -> torch.Tensor:
    """The landed result."""
    landed: torch.Tensor = torch.ops._c10d_functional.wait_tensor(value)
    return landed
