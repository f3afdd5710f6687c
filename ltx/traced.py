"""The way into compiled graphs.

Dynamo drops the backward pass of an autograd.Function that it traces into under torch.func.grad, and can't look into
process groups at all. So whatever ltx does in a graph is a node: a function that the graph holds as it is. A node takes
tensors and constants; other values are kept here, and it is given their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_nodes: list[Callable[..., Any]] = []
_kept: dict[str, Any] = {}


def node(fn: F) -> F:
    """Decorate a function that graphs hold as it is: tensors and constants in, tensors out."""
    _nodes.append(fn)
    return fn


def at_trace_time(fn: F) -> F:
    """Decorate a function that Dynamo runs while it traces. What it returns is a constant of the graph.

    What it raises reaches the user; Dynamo hides errors that are raised anywhere else.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def keep(key: str, value: Any) -> str:
    """Keep `value`, for nodes that are given `key`, which comes back. Called at trace time."""
    for fn in _nodes:  # not where they are defined: this imports Dynamo, which takes 1.5 s
        torch.compiler.allow_in_graph(fn)
    _kept[key] = value
    return key


def kept(key: Any) -> Any:
    """What was kept under `key`; None for anything else."""
    return _kept.get(key) if isinstance(key, str) else None
