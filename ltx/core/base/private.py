"""torch's private names, each under what it says: a version of torch that changes one is met here.

Tried with torch 2.13.0, and every night with 2.11.0. There are no public names that say the same. ``torch._foreach_*``
is documented by torch, and is called by its own name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _autograd, _functorch
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._guards import TracingContext as TracingContext
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.autograd import Variable, forward_ad

# --- transforms of torch.func, and torch.vmap ---

#: Whether one is running in this thread.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
#: A context manager in which none is.
below_transforms: Callable[[], Any] = torch._C._DisableFuncTorch
#: The innermost level, from 1 on; the first raises and the second gives None where there is none.
current_level, maybe_current_level = _functorch.current_level, _functorch.maybe_current_level
interpreter_stack, TransformType = _functorch.get_interpreter_stack, _functorch.TransformType
#: Whether a tensor is wrapped for a level, or for a vmap's; its level, its batch dimension, and the tensor inside.
is_wrapped: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
is_batched: Callable[[torch.Tensor], bool] = _functorch.is_batchedtensor
level_of, batch_dim_of = _functorch.maybe_get_level, _functorch.maybe_get_bdim
unwrapped_once: Callable[[torch.Tensor], torch.Tensor] = _functorch.get_unwrapped
add_batch_dim = _functorch._add_batch_dim
#: What is in a tensor of a level that has ended; any other as it is.
unwrapped_if_dead: Callable[[torch.Tensor], torch.Tensor] = _functorch.unwrap_if_dead

# --- autograd ---

#: The number of the run of the engine that this code is in; -1 outside of a backward pass.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
#: Calls a function at the end of that run.
at_end_of_pass: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
#: Whether the engine will come to a node in that run.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
#: The number of nodes that this thread has made so far.
nodes_made: Callable[[], int] = _autograd._get_sequence_nr
#: Why hooks of saved tensors are refused, or None; and both ways to change that.
why_no_saved_hooks: Callable[[], str | None] = _autograd._saved_tensors_hooks_get_disabled_error_message
enable_saved_hooks, disable_saved_hooks = _autograd._saved_tensors_hooks_enable, _autograd._saved_tensors_hooks_disable


def has_tangents() -> bool:
    """Whether forward-mode differentiation goes on, so that tensors may have tangents."""
    return forward_ad._current_level >= 0


#: The vmap that autograd has of its own (``is_grads_batched``): is a tensor in one? To begin one, which gives its
#: level, and to end it; to take a tensor into one, and out of it.
is_batched_by_autograd: Callable[[torch.Tensor], bool] = _functorch.is_legacy_batchedtensor
enter_autograd_vmap: Callable[[], int] = torch._C._vmapmode_increment_nesting
leave_autograd_vmap: Callable[[], int] = torch._C._vmapmode_decrement_nesting
into_autograd_vmap, out_of_autograd_vmap = torch._add_batch_dim, torch._remove_batch_dim

# --- what records calls ---

#: Whether a dispatch key is in force in this thread.
is_dispatched: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
AUTOGRAD_VMAP = torch._C._parse_dispatch_key("VmapMode")  # torch has no name for it, and looks for the text for 6 us
#: How many dispatch modes are; the one of a key, or None; the keys of those that record.
count_of_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
mode: Callable[[Any], Any] = torch._C._get_dispatch_mode
TRACERS = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)
#: That of torch.jit.trace, or None.
script_state: Callable[[], Any] = torch._C._get_tracing_state
#: Has Dynamo look at what is called, or not; gives what it was.
set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
#: Dynamo's settings, where it traces: to import it takes 1.5 s.
dynamo_config: Callable[[], Any] = lambda: torch._dynamo.config  # noqa: E731


def optree_of_dicts() -> tuple[Any, ...]:
    """What Dynamo takes for optree's functions that take a dict apart, and that put one together."""
    polyfills = torch._dynamo.polyfills.pytree
    return polyfills.dict_flatten, polyfills.dict_unflatten


# --- the rest ---

#: Context managers as public ones are, and faster or for one thing alone.
inference, without_autocast = torch._C._InferenceMode, torch._C._DisableAutocast
plain_tensors: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
#: Raises RuntimeError with a text, once the device has come so far, unless a 0-dim bool is true; in graphs too.
assert_later: Callable[[torch.Tensor, str], None] = torch._assert_async
#: The number of tensors on a storage; None where torch doesn't tell.
storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
