"""ltx inside graphs that are recorded to run later, by Dynamo or other tracers.

Under torch.func.grad, Dynamo drops the backward pass of an autograd.Function that it traces into, and it can't trace
process groups. So in a graph ltx is made of nodes, which Dynamo doesn't trace into. A node takes tensors and constants;
other values are kept here, and it gets their keys.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch

from ltx.core.base import private
from ltx.core.base.errors import Kind, UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])

_nodes: list[Callable[..., Any]] = []
_kept: dict[str, Any] = {}

TORCH = torch.torch_version.TorchVersion(torch.__version__)


class TracedValueError(Exception):
    """The step closes over a value that is differentiated around it; all ranks find it, and run it in another way."""


def recording() -> bool:
    """Whether calls are being recorded now to run later: by Dynamo, ``make_fx`` (``torch.func.linearize``,
    ``torch.export``), or on fake tensors, which have no values.

    While recording, ltx communicates by torch's functional collectives, which every tracer knows, and reads no values.
    """
    if torch.compiler.is_compiling():
        return True
    if private.count_of_modes() and any(map(private.mode, private.TRACERS)):
        return True
    return private.is_dispatched(private.PRE_DISPATCH)


def only_asked_for_shapes() -> bool:
    """Whether a compiler runs a node for the shapes of its results, and puts no operation of the node into a graph."""
    compiling = private.TracingContext.try_get() is not None
    return compiling and private.mode(private.PROXY) is None and not private.is_dispatched(private.PRE_DISPATCH)


def refuse_blind() -> None:
    """Raise if the active tracer can't record an autograd.Function. Called inside torch.func transforms."""
    refuse_script()
    if private.is_dispatched(private.PRE_DISPATCH):
        raise UnsupportedError(
            "torch.export and make_fx(pre_dispatch=True) can't record ltx inside a transform of torch.func, such as "
            "torch.func.grad. Use make_fx without pre_dispatch, or torch.compile."
        )


def refuse_script() -> None:
    """Raise if ``torch.jit.trace`` is tracing."""
    if private.script_state() is not None:
        raise UnsupportedError("torch.jit.trace can't record ltx: what ranks send would be constant. Use torch.export.")


def node(fn: F) -> F:
    """Decorate a function from tensors and constants to tensors. Dynamo puts it into graphs without tracing into it."""
    _nodes.append(fn if TORCH >= "2.13" else _said_to_compile(fn))
    return _nodes[-1]  # type: ignore[return-value]


def _said_to_compile(fn: Any) -> Any:
    """`fn`, with ``torch.compiler.is_compiling()`` true in it while Dynamo traces, as torch does from 2.13 on."""

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
    """Decorate a function that Dynamo runs while it traces: a constant of the graph. Its errors reach the user."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn if TORCH >= "2.12" else _by_address(fn)


_GIVEN_UP = (
    "torch.compile has given up on this step, as its log says: most often there were more graphs than "
    "torch._dynamo.config.recompile_limit. It would run as it is, while other ranks wait in a graph. Give what changes "
    "from call to call as tensors; or compile the loss alone: ltx.data_parallel(torch.compile(loss))."
)


def whole(fn: F) -> F:
    """Decorate a function that Dynamo must trace as a whole or not at all, with what it calls: a graph break inside
    raises, since the untraced rest would run as if it were being traced.
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            with torch._dynamo.error_on_graph_break(True):
                return fn(*args, **kwargs)
        before = private.set_eval_frame(None)
        if before is False:  # Dynamo has given up on the frame of `fn`
            private.set_eval_frame(before)
            raise UnsupportedError(_GIVEN_UP)
        try:
            return fn(*args, **kwargs)
        finally:
            private.set_eval_frame(before)

    return run  # type: ignore[return-value]


_CONSTANTS = (bool, int, float, str, tuple, type, torch.dtype, torch.device)


def _by_address(fn: Any) -> Any:
    """`fn` for torch before 2.12, whose Dynamo passes it only constants: other objects go as addresses, their ids."""

    def at_addresses(places: tuple[int, ...], *values: Any) -> Any:
        # The addresses are valid, because Dynamo keeps the objects alive while it traces.
        return fn(*(ctypes.cast(x, ctypes.py_object).value if i in places else x for i, x in enumerate(values)))

    at_addresses._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @wraps(fn, updated=())  # Dynamo has to trace `run` itself
    def run(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            return fn(*args)
        places = tuple([i for i, x in enumerate(args) if not (x is None or isinstance(x, _CONSTANTS))])
        return at_addresses(places, *[id(x) if i in places else x for i, x in enumerate(args)])

    return run


@at_trace_time
def trace_dicts() -> None:
    """Let Dynamo trace how optree flattens a dict without tensors: as constants, its keys wouldn't get into a graph."""
    for fn in (private.dynamo_optree().dict_flatten, private.dynamo_optree().dict_unflatten):
        fn.__torch_dynamo_can_constant_fold_through__ = False


@at_trace_time
def _assume_static(wanted: bool) -> bool:
    """Set whether Dynamo treats an int as a constant until it changes; return the previous setting."""
    config = private.dynamo_config()
    before, config.assume_static_by_default = bool(config.assume_static_by_default), wanted
    return before


def one_more(count: int) -> int:
    """`count` + 1. In graphs the count is a variable from the start, or the second call would recompile."""
    if not torch.compiler.is_dynamo_compiling():
        return count + 1
    before = _assume_static(False)
    after = count + 1
    _assume_static(before)
    return after


@at_trace_time
def refuse(text: str, error: Kind = UnsupportedError) -> NoReturn:
    """Raise an error that reaches the user even while Dynamo traces."""
    raise error(text)


def keep(key: str, value: Any) -> str:
    """Keep `value` for nodes that get its `key`, and return `key`. Called at trace time."""
    for fn in _nodes:  # done late, since it imports Dynamo (1.5 s)
        torch.compiler.allow_in_graph(fn)
    _kept[key] = value
    return key


def kept(key: Any) -> Any:
    """The value kept under `key`, or None."""
    return _kept.get(key) if isinstance(key, str) else None
