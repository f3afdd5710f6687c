"""Modules that a backward pass calls again, with the tensors that they had in the forward pass.

An autograd.Function may call a module in the backward pass once more (``odeint_adjoint``, reversible layers), and
gradients would be silently wrong. So :class:`Calls` records what is put into modules, and puts it there once more. What
can't be repeated so raises: two calls with different tensors, buffers that the first call has written and that its
output depends on, tensors that are gone by then (a sharded layer's), and a pass that somebody else runs, whose end
nobody sees after an error. For ``torch.utils.checkpoint`` there is a mechanism of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import stateless
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook, _CheckpointFrame, checkpoint

from ltx.core.base import private, traced, tree
from ltx.core.base.errors import StepError
from ltx.core.gradients.planning import in_step
from ltx.core.transforms import closure_check
from ltx.core.transforms.closure_check import Members, calls_of_torch, placed, version_of
from ltx.core.transforms.swap import Swap, module_of

#: Where functional calls of this thread are recorded, and the backward passes that repeat them.
recording_calls: ContextVar[Calls | None] = ContextVar("recording_calls", default=None)
_passes: ContextVar[tuple[Calls, ...]] = ContextVar("_passes", default=())


class Calls:
    """The functional calls of a forward pass, for what calls their modules again in its backward pass. Its owner runs
    both: ``with calls.recorded(): forward``, then ``with calls.in_pass(): backward``. `around`: another record, for
    derivatives of this pass. `kept`: the step's parameters; it keeps nothing else that a call was given.
    """

    def __init__(self, around: Calls | None = None) -> None:
        self.placed: list[Swap] = []  # in the backward pass: what is in modules again
        self.kept: list[Any] = []
        self._made: list[Callable[[], Swap]] = []
        self._around, self._task, self._thread = around, private.graph_task(), threading.get_ident()
        self._swaps: dict[int, Swap] = {}  # by the ids of the parts of their modules
        self._mixed: set[int] = set()  # the ids of parts that were called with different tensors
        self._handle: Any = None  # of the hook on all modules, while there is one
        self._owned = False

    def add(self, make: Callable[[], Swap]) -> None:
        """Record a call, by a function that makes its swap, if it is ever needed."""
        if private.graph_task() == self._task:  # else the backward pass calls it
            self._made.append(make)
        if self._around is not None:
            self._around.add(make)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        token = recording_calls.set(self)
        try:
            yield
        finally:
            recording_calls.reset(token)

    @contextmanager
    def in_pass(self, begun: bool = True) -> Iterator[None]:
        """The backward pass: recorded modules called in it get their tensors, from :meth:`begin` on if not `begun`."""
        token = _passes.set((*_passes.get(), self))
        try:
            if begun and self._made:
                self.begin()
            yield
        finally:
            self._end()
            self._owned = False
            while self.placed:
                self.placed.pop().take_out()
            _passes.reset(token)

    def begin(self, _: Any = None) -> None:
        if self._handle is not None:
            self._end()
        self._owned, self._handle = True, register_module_forward_pre_hook(self._called)

    def _begin(self, _: Any) -> None:
        """A backward pass comes to an output of a recorded call. If it isn't the owner's, it may call no module."""
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._called)
            private.at_end_of_pass(self._end)

    def watch(self, outputs: Any, at: Callable[[Any], None] | None = None) -> None:
        """Have a backward pass that comes to `outputs` call a function."""
        for x in tree.flatten(outputs)[0]:
            while isinstance(x, torch.Tensor) and not x.requires_grad and private.is_wrapped(x):
                x = private.unwrapped_once(x)
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(at or self._begin)

    def _end(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _called(self, module: nn.Module, _: Any) -> None:
        """A module is called, anywhere in the process."""
        task, passes = private.graph_task(), _passes.get()
        if task == self._task or task == -1 or (passes and self not in passes):
            if not self._owned and threading.get_ident() == self._thread:
                self._end()  # after an error torch doesn't say that the pass has ended
            return
        if self._made:
            self._look()
        swap = self._swaps.get(id(module))
        if swap is None:
            return
        whole = swap.members.module
        running = (*(swap.members.module for swap in placed.get()), *(around for around, _ in calls_of_torch()))
        if any(module is part for around in running for part in around.modules()):
            return
        path = next(path for path, part in whole.named_modules() if part is module)
        which = f"{path!r} of {type(whole).__name__}" if path else type(whole).__name__
        gone = next((name for name in swap.gone if not path or name.startswith(f"{path}.")), None)
        mixed = id(module) in self._mixed
        if gone is not None and self._owned and not mixed:
            raise StepError(_called_again(which, f"was given a {gone!r} that nobody has kept since", _SAVED))
        if any(whole is again.members.module for again in self.placed):
            return
        now = {name: kept_in[key] for name, (kept_in, key) in swap.members.slots.items()}
        if gone is None and not mixed and all(swap.given(name) is now.get(name) for name in swap.tensors):
            return  # it was called with its own
        if not self._owned:
            self._end()
            raise StepError(_called_again(which, "has its own tensors there, and not those of the step", _OWNED))
        if mixed:
            raise StepError(_called_again(which, "was called with several sets of tensors", _COPY))
        for name in (name for name, (x, version, _) in swap.first.items() if version_of(x) != version):
            # Batch norm's output doesn't depend on its buffers.
            if not isinstance(whole.get_submodule(module_of(name)), nn.modules.batchnorm._NormBase):
                raise StepError(_called_again(which, f"has written to its buffer {name!r} since", _CHECKPOINT))
        again = swap.anew({name: (x, -1, value) for name, (x, _, value) in swap.first.items()})
        self.placed.append(again)
        again.put()

    def _look(self) -> None:
        """Find the parts of modules, and those with several sets. A part that got no tensor has its own in its set."""
        held: dict[tuple[int, str], int] = {}
        mixed: set[int] = set()
        swaps, self._made = [make() for make in self._made], []
        for swap in swaps:
            for path, (kept_in, key) in swap.members.slots.items():
                x = id(swap.gone.get(path) or (swap.given(path) if path in swap.tensors else kept_in[key]))
                if held.setdefault((id(kept_in), key), x) != x:
                    mixed.add(id(kept_in))
        for swap in swaps:
            parts = list(swap.members.module.modules())
            if any(id(kept_in) in mixed for part in parts for kept_in in (part._parameters, part._buffers)):
                self._mixed.update(map(id, parts))
            self._swaps.update((id(part), swap) for part in parts)


def _called_again(which: str, why: str, instead: str) -> str:
    return (
        f"{which} was called again in the backward pass, by a function that computes a part of the step anew, and "
        f"{why}, so gradients would be wrong. {instead}"
    )


_OTHERWISE = (
    "call ltx.functional_call(module, params, inputs) there, with the parameters that the function was given. Or let "
    "torch.utils.checkpoint compute it anew."
)
_OWNED = (
    "Have ltx run the backward pass, which keeps the step's tensors in the module: ltx.grad(step)(params, ...) or "
    f"ltx.train_step(step, optimizer). Or {_OTHERWISE}"
)
_SAVED = f"Save the parameters with ctx.save_for_backward, and {_OTHERWISE}"
_COPY = "Call a module for each set: other = copy.deepcopy(module), and ltx.functional_call(other, params, inputs)."
_CHECKPOINT = "Let torch.utils.checkpoint compute it anew, which knows what the buffers were; or module.eval()."


def own_grad_and_value(fn: Callable[..., Any], has_aux: bool = False, argnums: Any = 0) -> Callable[..., Any]:
    """``torch.func.grad_and_value(fn)``, in whose backward pass modules may be called again."""

    def run(*args: Any) -> Any:
        if traced.recording():
            return torch.func.grad_and_value(fn, argnums, has_aux)(*args)
        calls = Calls(recording_calls.get())

        def recorded(*args: Any) -> Any:
            with calls.recorded():
                output = fn(*args)
            calls.watch(output[0] if has_aux else output, calls.begin)
            return output

        with calls.in_pass(begun=False):
            return torch.func.grad_and_value(recorded, argnums, has_aux)(*args)

    return run


def record(given: Mapping[str, torch.Tensor], make: Callable[..., Swap], output: Any = ()) -> Calls | None:
    """Record a functional call, if a backward pass may come; `make` makes its swap of the tensors kept until then."""
    if not torch.is_grad_enabled():
        return None
    found = dict(zip(given, map(weakref.ref, given.values()), strict=True))

    def swap() -> Swap:
        there = {name: x for name, at in found.items() if (x := at()) is not None}
        made = make(there)
        made.gone = {name: at for name, at in found.items() if name not in there}
        return made

    calls = recording_calls.get() or Calls()
    calls.add(swap)
    calls.watch(output)
    return calls


def _torch_calls(module: Any, parameters_and_buffers: Any, *args: Any, **options: Any) -> Any:
    """torch's function behind torch.func.functional_call, recorded."""
    if traced.recording() or not (in_step.get() or recording_calls.get()):
        return _call_of_torch(module, parameters_and_buffers, *args, **options)
    given = dict(parameters_and_buffers)  # torch writes to the other one
    fixed = {name: version_of(x) for name, x in given.items() if not getattr(x, "requires_grad", True)}
    own = [(name, x, version_of(x)) for name, x in module.named_buffers() if name not in given]
    output = _call_of_torch(module, parameters_and_buffers, *args, **options)
    for name, x, was in own:
        if version_of(x) != was and id(x) not in closure_check.tensors_in_place():
            raise StepError(closure_check.own_buffer_text(f"{name!r} of {type(module).__name__}"))

    def swap(tensors: dict[str, torch.Tensor]) -> Swap:
        members = Members(module)
        buffers = {buffer.path for buffer in members.buffers} & set(fixed) & set(tensors)
        first = {name: (tensors[name], fixed[name], tensors[name]) for name in buffers}
        return Swap(members, members.untied(tensors, bool(options.get("tie_weights", True))), first)

    record(given, swap, output)
    return output


_call_of_torch = stateless._functional_call
stateless._functional_call = _torch_calls


# torch.utils.checkpoint calls them again too. Subclasses of three of its classes, in their place, note when it begins
# which tensors are in modules. That is in the midst of a call, so this is right where :class:`Calls` has to refuse: for
# several sets of tensors, for buffers that are half way (power iterations), and in whoever's backward pass.


def _run_again(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for a recomputation, in which modules have the tensors that they have now."""
    if private.in_transform():
        return fn  # under torch.func there is no recomputation
    swaps, inside = [swap.again() for swap in placed.get()], in_step.get()
    for module, given in calls_of_torch():
        members, ids = Members(module), {id(x) for x in given.values()}
        tensors = {path: x for path, (kept_in, key) in members.slots.items() if id(x := kept_in[key]) in ids}
        kept = {b.path: (b.tensor, b.version, b.tensor.clone()) for b in members.buffers if b.path in tensors}
        swaps.append(Swap(members, tensors, kept).again())
    if not (swaps or inside):
        return fn

    def again(*args: Any, **kwargs: Any) -> Any:
        token = in_step.set(inside)
        try:
            with ExitStack() as stack:
                for swap in swaps:
                    stack.enter_context(swap())
                return fn(*args, **kwargs)
        finally:
            in_step.reset(token)

    return again


class _Frame(_CheckpointFrame):
    def __init__(self, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any):
        super().__init__(_run_again(recompute_fn), *args, **kwargs)


class _Hook(_checkpoint_hook):
    """torch's hooks that drop the activations of a checkpointed call; off under torch.func, which forbids them."""

    def __enter__(self) -> None:
        self._off = private.in_transform() and (placed.get() or private.why_no_saved_hooks() is not None)
        if not self._off:
            super().__enter__()

    def __exit__(self, *args: object) -> None:
        if not self._off:
            super().__exit__(*args)


class _Reentrant(CheckpointFunction):
    """torch's for ``use_reentrant=True``; in a step that for False, as this would differentiate past the reduction."""

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if in_step.get() or placed.get() or calls_of_torch():
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
        return CheckpointFunction.apply(function, preserve, *args)


checkpointing._CheckpointFrame = _Frame  # type: ignore[misc]
checkpointing._checkpoint_hook = _Hook  # type: ignore[misc]
checkpointing.CheckpointFunction = _Reentrant  # type: ignore[misc]


@contextmanager
def checkpoints_allowed() -> Iterator[None]:
    """Let plain autograd below a transform hook saved tensors, though torch.func turns such hooks off."""
    if (message := private.why_no_saved_hooks()) is not None:
        private.enable_saved_hooks()
    try:
        yield
    finally:
        if message is not None:
            private.disable_saved_hooks(message)
