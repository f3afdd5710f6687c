"""All private names of torch that ltx uses, so that a change in torch is fixed in one file.

Tried with torch 2.13.0, and every night with 2.11.0. None of them has a public equivalent. ``torch._foreach_*`` isn't
listed here, since torch documents it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch._C import _autograd, _functorch
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._guards import TracingContext as TracingContext
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.autograd import Variable, forward_ad

T = TypeVar("T")

# --- transforms of torch.func, and torch.vmap ---

#: Whether a torch.func transform (or vmap) is running in this thread.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
#: A context manager in which no transform is active.
below_transforms: Callable[[], Any] = torch._C._DisableFuncTorch
#: The number of the innermost transform, from 1. Without any, the first function raises, and the second returns None.
current_level, maybe_current_level = _functorch.current_level, _functorch.maybe_current_level
interpreter_stack, TransformType = _functorch.get_interpreter_stack, _functorch.TransformType
#: Whether a tensor is wrapped by a transform, or by a vmap; its level; its batch dimension; the tensor inside.
is_wrapped: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
is_batched: Callable[[torch.Tensor], bool] = _functorch.is_batchedtensor
level_of, batch_dim_of = _functorch.maybe_get_level, _functorch.maybe_get_bdim
unwrapped_once: Callable[[Any], Any] = _functorch.get_unwrapped
add_batch_dim = _functorch._add_batch_dim
#: The tensor inside a wrapper whose transform has ended; any other tensor unchanged.
unwrapped_if_dead: Callable[[torch.Tensor], torch.Tensor] = _functorch.unwrap_if_dead


def unwrapped(x: T) -> T:
    """`x` without the wrappers of torch.func's levels, if it is a tensor."""
    while isinstance(x, torch.Tensor) and is_wrapped(x):
        x = unwrapped_once(x)
    return x


# --- tensors ---

_PLAIN_DISPATCH = torch._C._disabled_torch_dispatch_impl


def has_memory(x: torch.Tensor) -> bool:
    """Whether the numbers of `x` lie in memory as they are: torch's efficient zeros don't, nor do lazy conjugates and
    negatives, nor tensors of a class that dispatches itself.
    """
    of_torch = type(x).__torch_dispatch__ is _PLAIN_DISPATCH
    return of_torch and not (x._is_zerotensor() or x.is_conj() or x.is_neg())


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` that :func:`has_memory`, unless the class of `x` allows none."""
    return x.resolve_conj().resolve_neg().clone()


#: Consecutive views of a flat tensor in the shapes of other tensors. To split it and view each part takes 2.5 as long.
parts_like: Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]] = (
    torch._utils._unflatten_dense_tensors
)

# --- autograd ---

#: The id of the running backward pass; -1 outside of one.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
#: Calls a function at the end of the running backward pass.
at_end_of_pass: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
#: Whether the running backward pass will execute a node.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
#: The number of autograd nodes that this thread has made so far.
nodes_made: Callable[[], int] = _autograd._get_sequence_nr
#: The error text with which saved-tensor hooks are disabled, or None; functions that enable and disable the hooks.
why_no_saved_hooks: Callable[[], str | None] = _autograd._saved_tensors_hooks_get_disabled_error_message
enable_saved_hooks, disable_saved_hooks = _autograd._saved_tensors_hooks_enable, _autograd._saved_tensors_hooks_disable


def has_tangents() -> bool:
    """Whether forward-mode differentiation is active, so that tensors may have tangents."""
    return forward_ad._current_level >= 0


#: autograd has a vmap of its own (``is_grads_batched``). These ask whether it wraps a tensor, begin it (returning its
#: level), end it, wrap a tensor, and unwrap one.
is_batched_by_autograd: Callable[[torch.Tensor], bool] = _functorch.is_legacy_batchedtensor
enter_autograd_vmap: Callable[[], int] = torch._C._vmapmode_increment_nesting
leave_autograd_vmap: Callable[[], int] = torch._C._vmapmode_decrement_nesting
into_autograd_vmap, out_of_autograd_vmap = torch._add_batch_dim, torch._remove_batch_dim

# --- tracers ---

#: Whether a dispatch key is active in this thread.
is_dispatched: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
AUTOGRAD_VMAP = torch._C._parse_dispatch_key("VmapMode")  # a constant, since parsing the key's name takes 6 us
#: The number of active dispatch modes; the active mode of a key, or None; the keys of tracing modes.
count_of_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
mode: Callable[[Any], Any] = torch._C._get_dispatch_mode
PROXY = torch._C._TorchDispatchModeKey.PROXY
TRACERS = (PROXY, torch._C._TorchDispatchModeKey.FAKE)
#: The state of torch.jit.trace if it is tracing, else None.
script_state: Callable[[], Any] = torch._C._get_tracing_state
#: Sets Dynamo's callback for calls (None turns Dynamo off); returns the previous one.
set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
#: Dynamo's settings. Call it only while Dynamo traces, since the import takes 1.5 s.
dynamo_config: Callable[[], Any] = lambda: torch._dynamo.config  # noqa: E731


def optree_of_dicts() -> tuple[Any, ...]:
    """Dynamo's replacements for the functions with which optree flattens and unflattens a dict."""
    polyfills = torch._dynamo.polyfills.pytree
    return polyfills.dict_flatten, polyfills.dict_unflatten


# --- the rest ---


def below_modes() -> AbstractContextManager[None]:
    """A context below the user's dispatch modes, which must neither see ltx's messages nor replace them."""
    return torch._C._DisableTorchDispatch() if count_of_modes() else nullcontext()


#: Context managers like the public ones, but faster or narrower.
inference, without_autocast = torch._C._InferenceMode, torch._C._DisableAutocast
plain_tensors: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
#: Raises RuntimeError with a text if a 0-dim bool is false, once the device has computed it. Works in graphs too.
assert_later: Callable[[torch.Tensor, str], None] = torch._assert_async
#: The number of tensors that use a storage; None in torch versions without this function.
storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
