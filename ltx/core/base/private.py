"""All private names of torch that ltx uses, so that a change in torch is fixed in one file.

Tried with torch 2.13.0, and every night with 2.11.0, 2.14.1 and 2.15.0. None of them has a public equivalent.
``torch._foreach_*`` isn't listed here, since torch documents it. Names that another torch doesn't have are told in one
warning when ltx is imported, and only what uses them raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from operator import methodcaller
from pkgutil import resolve_name
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch.autograd import forward_ad

from ltx.core.base.errors import UnsupportedError

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]

_TAKE = "Take a torch that ltx is tested with (2.11 to 2.15), or a newer ltx."
_gone: list[str] = []


class _Gone(type):
    """The class of what stands in for a name that torch doesn't have: no object is of it, and its use raises."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            f"ltx needs {cls.__qualname__}, a private name that torch {torch.__version__} doesn't have. {_TAKE}"
        )

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


def _of_torch(path: str) -> Any:
    """What torch has at `path`, written "module:name"; a stand-in if it has no such name."""
    try:
        return resolve_name(path)
    except (ImportError, AttributeError):
        _gone.append(path.replace(":", "."))
        return _Gone(path.rpartition(".")[2], (), {"__qualname__": _gone[-1]})


if TYPE_CHECKING:
    from torch._guards import TracingContext as TracingContext
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
else:
    TracingContext = _of_torch("torch._guards:TracingContext")
    FakeTensor = _of_torch("torch._subclasses.fake_tensor:FakeTensor")

# --- transforms of torch.func, and torch.vmap ---

#: Whether a torch.func transform (or vmap) is running in this thread.
in_transform: Callable[[], bool] = _of_torch("torch._C:_are_functorch_transforms_active")
#: A context manager in which no transform is active.
below_transforms: Callable[[], AbstractContextManager[None]] = _of_torch("torch._C:_DisableFuncTorch")
#: The number of the innermost transform, from 1. Without any, the first function raises, and the second returns None.
current_level = _of_torch("torch._C._functorch:current_level")
maybe_current_level = _of_torch("torch._C._functorch:maybe_current_level")
interpreter_stack = _of_torch("torch._C._functorch:get_interpreter_stack")
TransformType = _of_torch("torch._C._functorch:TransformType")
#: Whether a tensor is wrapped by a transform, or by a vmap; its level; its batch dimension; the tensor inside.
is_wrapped: Callable[[torch.Tensor], bool] = _of_torch("torch._C._functorch:is_functorch_wrapped_tensor")
is_batched: Callable[[torch.Tensor], bool] = _of_torch("torch._C._functorch:is_batchedtensor")
level_of = _of_torch("torch._C._functorch:maybe_get_level")
batch_dim_of = _of_torch("torch._C._functorch:maybe_get_bdim")
unwrapped_once: Callable[[Any], Any] = _of_torch("torch._C._functorch:get_unwrapped")
add_batch_dim: Callable[..., torch.Tensor] = _of_torch("torch._C._functorch:_add_batch_dim")
#: The tensor inside a wrapper whose transform has ended; any other tensor unchanged.
unwrapped_if_dead: Callable[[torch.Tensor], torch.Tensor] = _of_torch("torch._C._functorch:unwrap_if_dead")
#: The innermost transform, as an object that unwraps and wraps tensors; a context that runs an autograd Function at it.
innermost: Callable[[], Any] = _of_torch("torch._functorch.pyfunctorch:retrieve_current_functorch_interpreter")
in_single_level: Any = _of_torch("torch._functorch.autograd_function:enable_single_level_autograd_function")
SingleLevelFunction: Any = _of_torch("torch.autograd.function:_SingleLevelFunction")
wrap_for_grad = _of_torch("torch._C._functorch:_wrap_for_grad")
unwrap_for_grad = _of_torch("torch._C._functorch:_unwrap_for_grad")


def unwrapped(x: T) -> T:
    """`x` without the wrappers of torch.func's levels, if it is a tensor."""
    while isinstance(x, torch.Tensor) and is_wrapped(x):
        x = unwrapped_once(x)
    return x


# --- tensors ---

_PLAIN_DISPATCH = _of_torch("torch._C:_disabled_torch_dispatch_impl")


def has_memory(x: torch.Tensor) -> bool:
    """Whether the numbers of `x` lie in memory as they are: those of lazy zeros, conjugates and negatives don't."""
    of_torch = type(x).__torch_dispatch__ is _PLAIN_DISPATCH
    return of_torch and not (x._is_zerotensor() or x.is_conj() or x.is_neg())


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` that :func:`has_memory`, unless the class of `x` allows none."""
    return x.resolve_conj().resolve_neg().clone()


#: Consecutive views of a flat tensor in the shapes of other tensors. To split it and view each part takes 2.5 as long.
parts_like: Callable[[torch.Tensor, Tensors], Tensors] = _of_torch("torch._C._nn:unflatten_dense_tensors")

# --- autograd ---

#: The id of the running backward pass; -1 outside of one.
graph_task: Callable[[], int] = _of_torch("torch._C:_current_graph_task_id")
#: Calls a function at the end of the running backward pass.
at_end_of_pass: Callable[[Any], None] = _of_torch("torch.autograd:Variable._execution_engine.queue_callback")
#: Whether the running backward pass will execute a node.
will_run: Callable[[Any], bool] = _of_torch("torch._C:_will_engine_execute_node")
#: The number of autograd nodes that this thread has made so far.
nodes_made: Callable[[], int] = _of_torch("torch._C._autograd:_get_sequence_nr")
#: The number of a node, from 0. One that accumulates a leaf's gradient has no number, but a higher one than all others.
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
#: The error text with which saved-tensor hooks are disabled, or None; functions that enable and disable the hooks.
why_no_saved_hooks: Callable[[], Any] = _of_torch("torch._C._autograd:_saved_tensors_hooks_get_disabled_error_message")
enable_saved_hooks = _of_torch("torch._C._autograd:_saved_tensors_hooks_enable")
disable_saved_hooks = _of_torch("torch._C._autograd:_saved_tensors_hooks_disable")


def has_tangents() -> bool:
    """Whether forward-mode differentiation is active, so that tensors may have tangents."""
    return forward_ad._current_level >= 0


def is_transforming() -> bool:
    """Whether a ``torch.func`` transform is running, or forward-mode differentiation."""
    return maybe_current_level() is not None or forward_ad._current_level >= 0


#: autograd has a vmap of its own (``is_grads_batched``). These ask whether it wraps a tensor, begin it (returning its
#: level), end it, wrap a tensor, and unwrap one.
is_batched_by_autograd: Callable[[torch.Tensor], bool] = _of_torch("torch._C._functorch:is_legacy_batchedtensor")
enter_autograd_vmap: Callable[[], int] = _of_torch("torch._C:_vmapmode_increment_nesting")
leave_autograd_vmap: Callable[[], int] = _of_torch("torch._C:_vmapmode_decrement_nesting")
into_autograd_vmap, out_of_autograd_vmap = _of_torch("torch:_add_batch_dim"), _of_torch("torch:_remove_batch_dim")

# --- tracers ---

#: Whether a dispatch key is active in this thread.
is_dispatched: Callable[[Any], bool] = _of_torch("torch._C:_dispatch_tls_is_dispatch_key_included")
PRE_DISPATCH = _of_torch("torch._C:DispatchKey.PreDispatch")
AUTOGRAD_VMAP: Any = None  # a constant, since parsing the key's name takes 6 us
with suppress(UnsupportedError):
    AUTOGRAD_VMAP = _of_torch("torch._C:_parse_dispatch_key")("VmapMode")
#: The number of active dispatch modes; the active mode of a key, or None; the keys of tracing modes.
count_of_modes: Callable[[], int] = _of_torch("torch._C:_len_torch_dispatch_stack")
mode: Callable[[Any], Any] = _of_torch("torch._C:_get_dispatch_mode")
PROXY = _of_torch("torch._C:_TorchDispatchModeKey.PROXY")
TRACERS = (PROXY, _of_torch("torch._C:_TorchDispatchModeKey.FAKE"))
#: The state of torch.jit.trace if it is tracing, else None.
script_state: Callable[[], Any] = _of_torch("torch._C:_get_tracing_state")
#: Sets Dynamo's callback for calls (None turns Dynamo off); returns the previous one.
set_eval_frame: Callable[[Any], Any] = _of_torch("torch._C:_dynamo.eval_frame.set_eval_frame")
#: Dynamo's settings, and its replacements for functions of optree. Call them only while Dynamo traces, since the import
#: takes 1.5 s.
dynamo_config: Callable[[], Any] = lambda: torch._dynamo.config  # noqa: E731
dynamo_optree: Callable[[], Any] = lambda: torch._dynamo.polyfills.pytree  # noqa: E731

# --- the rest ---

#: torch's own registry of trees' nodes, by class.
torch_pytree: Any = _of_torch("torch.utils:_pytree")


_NO_DISPATCH: Callable[[], AbstractContextManager[None]] = _of_torch("torch._C:_DisableTorchDispatch")
_NO_FUNCTIONS: Callable[[], AbstractContextManager[None]] = _of_torch("torch._C:DisableTorchFunction")
count_of_function_modes: Callable[[], int] = _of_torch("torch._C:_len_torch_function_stack")


def below_modes() -> AbstractContextManager[object]:
    """A context below the user's modes, which must neither see ltx's messages nor replace them."""
    under = count_of_modes() or count_of_function_modes()
    return _both(_NO_DISPATCH(), _NO_FUNCTIONS()) if under else nullcontext()


def below_all() -> AbstractContextManager[object]:
    """A context below transforms and modes."""
    under = count_of_modes() or count_of_function_modes()
    return _both(below_modes(), below_transforms()) if under else below_transforms()


def _both(*contexts: Any) -> ExitStack:
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


_engine: Callable[..., Any] = _of_torch("torch.autograd.graph:_engine_run_backward")


def runs_of_engine() -> int:
    """How many runs of autograd's engine the present code is in, one inside the other."""
    code = getattr(_engine, "__code__", None)
    return sum(frame.f_code is code for frame, _ in walk_stack(None))


def run_backward(outputs: Tensors, cotangents: Tensors | None, again: bool, leaves: Tensors) -> None:
    """``torch.autograd.backward``, which looks at each leaf in Python: 4% of the time of a step of ten parameters."""
    if cotangents is not None or torch.overrides.has_torch_function((*outputs, *leaves)):
        torch.autograd.backward(outputs, cotangents, again, inputs=leaves)
    else:
        ones = tuple(map(torch.ones_like, outputs))
        _engine(tuple(outputs), ones, again, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True)


#: Optimizers' kernels, each one call for lists of parameters, gradients and states.
fused_adam, fused_adamw, fused_sgd, fused_adagrad = map(
    _of_torch, ("torch:_fused_adam_", "torch:_fused_adamw_", "torch:_fused_sgd_", "torch:_fused_adagrad_")
)

#: A process group without a network.
FakeProcessGroup: Any = _of_torch("torch._C._distributed_c10d:FakeProcessGroup")


def capturing() -> bool:
    """Whether the current stream records a CUDA graph now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_set_grad_enabled: Callable[[bool], None] = _of_torch("torch._C:_set_grad_enabled")


class no_grad:  # noqa: N801
    """As the public one, which takes four times as many calls."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        _set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        _set_grad_enabled(self._before)


#: A context manager like the public one, but faster.
inference = _of_torch("torch._C:_InferenceMode")
plain_tensors: Callable[[], Any] = _of_torch("torch._C:DisableTorchFunctionSubclass")
#: Raises RuntimeError with a text if a 0-dim bool is false, once the device has computed it. Works in graphs too.
assert_later: Callable[[torch.Tensor, str], None] = _of_torch("torch:_assert_async")
#: The number of tensors that use a storage; None in torch versions without this function.
storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)

if _gone:
    warnings.warn(
        f"torch {torch.__version__} doesn't have these private names, which ltx uses: {', '.join(_gone)}. What needs "
        f"them raises. {_TAKE}",
        stacklevel=2,
    )
