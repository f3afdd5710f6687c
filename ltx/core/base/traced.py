"""The way into what is recorded to run later: compiled graphs, and those of other tracers.

Dynamo drops the backward pass of an autograd.Function that it traces into under torch.func.grad, and can't look into
process groups at all. So whatever ltx does in a graph is a node: a function that the graph holds as it is. A node takes
tensors and constants; other values are kept here, and it is given their keys.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch

from ltx.core.base import private
from ltx.core.base.errors import LtxError, UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])

_nodes: list[Callable[..., Any]] = []
_kept: dict[str, Any] = {}

_TORCH = torch.torch_version.TorchVersion(torch.__version__)


def recording() -> bool:
    """Whether what is called now is recorded, to run later: by Dynamo, ``make_fx`` (``torch.func.linearize``,
    ``torch.export``), or on fake tensors, which have no values at all.

    Then whatever communicates is torch's functional collectives, which every tracer knows, and no value is looked at.
    """
    if torch.compiler.is_compiling():
        return True
    if private.count_of_modes() and any(map(private.mode, private.TRACERS)):
        return True
    return private.is_dispatched(private.PRE_DISPATCH)


def refuse_blind() -> None:
    """Raise, where a transform of torch.func is active, if the tracer around it can't see autograd Functions."""
    refuse_script()
    if private.is_dispatched(private.PRE_DISPATCH):
        raise UnsupportedError(
            "torch.export and make_fx(pre_dispatch=True) can't record ltx inside a transform of torch.func, such as "
            "torch.func.grad. Use make_fx without pre_dispatch, or torch.compile."
        )


def refuse_script() -> None:
    """Raise where ``torch.jit.trace`` records the call."""
    if private.script_state() is not None:
        raise UnsupportedError(
            "torch.jit.trace can't record ltx: what other ranks have sent would be constants. Use torch.export, "
            "torch.compile or make_fx."
        )


def node(fn: F) -> F:
    """Decorate a function that graphs hold as it is: tensors and constants in, tensors out."""
    _nodes.append(fn if _TORCH >= "2.13" else _said_to_compile(fn))
    return _nodes[-1]  # type: ignore[return-value]


def _said_to_compile(fn: Any) -> Any:
    """`fn`, in which ``torch.compiler.is_compiling()`` is true while a graph is made, as it is from torch 2.13 on."""

    @wraps(fn)
    def run(*args: Any) -> Any:
        before: bool = torch.compiler._is_compiling_flag
        if before or all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in args if isinstance(x, torch.Tensor)):
            return fn(*args)
        torch.compiler._is_compiling_flag = True
        try:
            return fn(*args)
        finally:
            torch.compiler._is_compiling_flag = before

    return run


def at_trace_time(fn: F) -> F:
    """Decorate a function that Dynamo runs while it traces. What it returns is a constant of the graph.

    What it raises reaches the user; Dynamo hides errors that are raised anywhere else.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn if _TORCH >= "2.12" else _by_address(fn)


def whole(fn: F) -> F:
    """Decorate a function that is traced as a whole, or not at all.

    What Dynamo can't trace would end a graph in the middle, and the rest would run as if it were traced too: that
    raises, and says what it was. Where Dynamo has given up, as after an exception, it leaves alone what `fn` calls.
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with torch._dynamo.error_on_graph_break(True):
                return fn(*args, **kwargs)
        before = private.set_eval_frame(None)
        try:
            return fn(*args, **kwargs)
        finally:
            private.set_eval_frame(before)

    return run  # type: ignore[return-value]


_CONSTANTS = (bool, int, float, str, tuple, type, torch.dtype, torch.device)


def _by_address(fn: Any) -> Any:
    """`fn`, for Dynamo before torch 2.12, which hands over constants alone.

    Objects come by their addresses; Dynamo's ``id`` guards the graph on their identity.
    """

    def at_addresses(places: tuple[int, ...], *values: Any) -> Any:
        # The objects are alive: Dynamo holds them while it traces.
        return fn(*(ctypes.cast(x, ctypes.py_object).value if i in places else x for i, x in enumerate(values)))

    at_addresses._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @wraps(fn, updated=())  # `run` itself is traced
    def run(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            return fn(*args)
        places = tuple([i for i, x in enumerate(args) if not (x is None or isinstance(x, _CONSTANTS))])
        return at_addresses(places, *[id(x) if i in places else x for i, x in enumerate(args)])

    return run


@at_trace_time
def trace_dicts() -> None:
    """Let Dynamo trace how optree flattens a dict that holds no tensors, such as an empty one.

    It calls optree there as long as optree's functions say so, and can't put into a graph what that keeps of the keys.
    """
    for fn in private.optree_of_dicts():
        fn.__torch_dynamo_can_constant_fold_through__ = False


@at_trace_time
def _assume_static(wanted: bool) -> bool:
    """Whether Dynamo takes numbers for constants until they have changed; gives what it did before."""
    config = private.dynamo_config()
    before, config.assume_static_by_default = bool(config.assume_static_by_default), wanted
    return before


def one_more(count: int) -> int:
    """`count` + 1, of what every call counts: in graphs a variable at once, or the second call would compile anew."""
    if not torch.compiler.is_compiling():
        return count + 1
    before = _assume_static(False)
    after = count + 1
    _assume_static(before)
    return after


@at_trace_time
def refuse(text: str, error: type[LtxError] = UnsupportedError) -> NoReturn:
    """Raise, so that it reaches the user in compiled graphs too."""
    raise error(text)


def keep(key: str, value: Any) -> str:
    """Keep `value`, for nodes that are given `key`, which comes back. Called at trace time."""
    for fn in _nodes:  # not where they are defined: this imports Dynamo, which takes 1.5 s
        torch.compiler.allow_in_graph(fn)
    _kept[key] = value
    return key


def kept(key: Any) -> Any:
    """What was kept under `key`; None for anything else."""
    return _kept.get(key) if isinstance(key, str) else None
