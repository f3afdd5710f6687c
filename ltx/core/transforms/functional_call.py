"""functional_call: as torch.func's, but its tensors are also in place where the backward pass calls a module again.

The tensors are in the module for the time of the call: bound methods and patched forwards would miss a copy. An
autograd.Function may call the module in the backward pass once more (``odeint_adjoint``, reversible layers), and
gradients would be silently wrong. So :class:`Calls` records what a forward pass has put into modules. Who runs the
backward pass too calls it ``in_pass``: a module that is called there gets its tensors once more. What can't be repeated
so raises: two calls with different tensors, buffers that the first call has written and that its output depends on,
tensors that are gone by then (a sharded layer's), and a pass that somebody else runs, whose end nobody sees after an
error. For ``torch.utils.checkpoint`` there is a mechanism of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import stateless
from torch.nn.utils._named_member_accessor import NamedMemberAccessor
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook, _CheckpointFrame, checkpoint

from ltx.core.base import private, traced, tree
from ltx.core.base.arguments import brief
from ltx.core.base.errors import InputError, StepError, TreeError, UnsupportedError
from ltx.core.gradients.marker import Marker
from ltx.core.gradients.planning import in_step
from ltx.core.ranks.axis import axes_in_scope
from ltx.core.transforms import closure_check
from ltx.core.transforms.closure_check import Members, calls_of_torch, placed, version_of
from ltx.typing import Tree


def functional_call(
    module: nn.Module,
    params_and_buffers: Tree,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    return_buffers: bool = False,
) -> Any:
    """Call a module with the given tensors in place of its parameters and buffers.

    A module of torch has its own parameters; a step of ltx gets them as a dict from names to tensors, such as
    ``dict(model.named_parameters())``. ``ltx.functional_call(model, params, (x,))`` is ``model(x)`` with `params`.

    Unlike ``torch.func.functional_call``, it is also right under activation checkpointing
    (``torch.utils.checkpoint``, ``gradient_checkpointing_enable()``): the second forward pass, which runs in the
    backward pass, gets the given tensors too. The module and the given tensors don't change.

    Args:
        module: any module. It uses its own tensors where none are given.
        params_and_buffers: a dict from names, as in ``module.named_parameters()`` and ``named_buffers()``, to tensors,
            a tuple of such dicts, or an :class:`ltx.TrainState`.
        args: a tuple of the module's positional arguments, or a single argument that isn't a tuple.
        kwargs: the module's keyword arguments.
        tie_weights: if a tensor has several names in the module, and one of them is given, all names get the given
            tensor. If False, names that aren't given keep the module's tensor.
        return_buffers: for a module that updates buffers in its forward pass, such as batch norm in training: it
            writes to copies of the given buffers, and the call returns ``(output, buffers)`` with the new values.

    Returns:
        The module's output; with `return_buffers` ``(output, buffers)``, a dict with the names of the given buffers.

    Gradient:
        With respect to the given tensors, as through the module. Checkpoints with ``use_reentrant=True`` run as if it
        were False, with the same gradients. If torch.func makes the graph (simulated ranks, second derivatives,
        :func:`ltx.grad` in a world of one, compiled steps), torch keeps activations instead: values are the same.

    Raises:
        InputError: the module doesn't have a name, or it is parametrized, or given twice; or tied names differ.
        TreeError: `module` isn't a module, or something that isn't a tensor is given.
        StepError: the module wrote to a given buffer without `return_buffers`, or to a buffer of its own.

    Example:
        >>> import torch, ltx
        >>> net = torch.nn.Linear(2, 1)
        >>> ltx.functional_call(net, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, torch.tensor([1.0, 2.0]))
        tensor([3.])
        >>> norm = torch.nn.BatchNorm1d(1)
        >>> params, buffers = dict(norm.named_parameters()), dict(norm.named_buffers())
        >>> y, buffers = ltx.functional_call(norm, (params, buffers), torch.ones(4, 1), return_buffers=True)
        >>> buffers["running_mean"], norm.running_mean
        (tensor([0.1000]), tensor([0.]))
    """
    given = _merged(params_and_buffers)
    args = args if isinstance(args, tuple) else () if args is None else (args,)
    if not isinstance(kwargs, Mapping | None):
        raise InputError(
            f"functional_call: kwargs is a dict of keyword arguments, got {brief(kwargs)}. Several positional "
            "arguments are a tuple: ltx.functional_call(module, params, (x, y))."
        )
    kwargs = {} if kwargs is None else dict(kwargs)
    if traced.recording():
        tied, buffers = _look_at_trace_time(module)
        # In a graph, checkpoints are operators that get all their tensors as arguments. Under torch.func, writes to
        # given buffers raise without return_buffers; in copies the writes would be lost silently.
        taken = return_buffers or not private.in_transform()
        names = [name for name in buffers if name in given and taken]
        filled = {**given, **{name: given[name].clone() for name in names}}
        output = torch.func.functional_call(module, filled, args, kwargs, tie_weights=tied and tie_weights)
        return (output, {name: filled[name] for name in names}) if return_buffers else output
    for name, flag in (("tie_weights", tie_weights), ("return_buffers", return_buffers)):
        if not isinstance(flag, bool):
            raise InputError(f"functional_call: {name} must be a bool, got {brief(flag)}.")
    swap = Swap.of_call(module, given, "functional_call", tie_weights, return_buffers)
    with swap.in_place():
        output = module(*args, **kwargs)
    _record(swap.tensors, partial(Swap, swap.members, first=swap.first), output)
    after = swap.done(return_buffers)
    return (output, after) if return_buffers else output


@contextmanager
def using(*modules: Any) -> Iterator[None]:
    """In the block, modules compute with the given tensors, whatever of their methods is called.

    ``with ltx.using(model, params):`` is for what one call of a module can't be: ``flow(x).log_prob(y)``,
    ``elbo(model, guide)``, a criterion with weights of its own. :func:`ltx.functional_call` is this for one call, and
    says what holds for both. Buffers that the block writes to raise; that function returns them.

    Args:
        modules: a module and its tensors, as :func:`ltx.functional_call` takes them, or several such pairs:
            ``ltx.using((encoder, params["encoder"]), (loss, params["loss"]))``.

    Raises:
        InputError: as :func:`ltx.functional_call`; or a module is given twice, or inside of another one.
        UnsupportedError: in a compiled graph.

    Example:
        >>> import torch, ltx
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> with ltx.using(net, {"weight": torch.full((1, 1), 2.0)}):
        ...     net(net(torch.ones(1)))
        tensor([4.])
    """
    if traced.recording():
        traced.refuse("torch.compile can't trace ltx.using. Call ltx.functional_call in what is compiled.")
    pairs = (modules,) if modules and isinstance(modules[0], nn.Module) else modules
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TreeError(f"using takes a module and its tensors, or several such pairs, got {brief(modules)}.")
    swaps = [Swap.of_call(module, _merged(given), "using") for module, given in pairs]
    parts = [id(part) for swap in swaps for part in swap.members.module.modules()]
    if len(parts) > len({*parts}):
        raise InputError("using: a module is given twice, or is a part of another one. Give the outer one alone.")
    records = [_record(swap.tensors, partial(Swap, swap.members, first=swap.first)) for swap in swaps]

    def watch(_: Any, __: Any, output: Any) -> None:
        for record in filter(None, records):
            record.watch(output)

    with ExitStack() as stack:
        for swap in swaps:
            stack.enter_context(swap.in_place())
        if any(records) and recording_calls.get() is None:  # somebody else will run the backward pass
            stack.callback(register_module_forward_hook(watch).remove)
        yield
    for swap in swaps:
        swap.done()


@traced.at_trace_time
def _look_at_trace_time(module: nn.Module) -> tuple[bool, tuple[str, ...]]:
    """Whether tensors have several names in `module`, and its buffers' names. Raises if it can't be traced."""
    members = Members(module)
    found = bool(members.tied()), tuple([buffer.path for buffer in members.buffers])
    if not private.in_transform():
        return found
    closure_check.refuse_max_norm(module)
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            where = f", {path!r} of this {type(module).__name__}" if path else ""
            raise UnsupportedError(
                f"torch.compile can't trace the gradient of a {type(part).__name__}{where}. Don't compile the step; "
                "or compile parts of the module that have none, such as module.head = torch.compile(module.head)."
            )
    return found


def _merged(given: Any) -> dict[str, torch.Tensor]:
    if hasattr(given, "params") and hasattr(given, "buffers"):  # a train state
        given = given.params if given.buffers is None else (given.params, given.buffers)
    dicts = [given] if isinstance(given, Mapping) else given
    if not (isinstance(dicts, Sequence) and all(isinstance(d, Mapping) for d in dicts)):
        raise TreeError(f"functional_call takes a dict of tensors or a tuple of such dicts, got {brief(given)}.")
    merged: dict[str, torch.Tensor] = {}
    for part in dicts:
        for name, tensor in part.items():
            if not isinstance(name, str):
                raise TreeError(f"functional_call: names are strings, got {brief(name)}.")
            if name in merged:
                raise InputError(f"functional_call: {name!r} is in two of the dicts that it was given.")
            merged[name] = tensor
    return merged


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, to which also simulated ranks can write different values."""
    copied = tensor.clone()
    if private.in_transform():
        for axis in axes_in_scope():
            if (index := axis.batch_index) is not None:
                copied = torch.where(index >= 0, copied, copied)
    return copied


def _value(copy: torch.Tensor, given: torch.Tensor, training: bool) -> torch.Tensor | None:
    """The value of `copy`, if it is a buffer to which batch norm may write without torch counting the write."""
    if private.in_transform():
        with private.below_transforms():
            return private.unwrapped(copy).clone()
    return given if training and copy.ndim == 1 and copy.is_floating_point() else None  # batch norm's are vectors


# --- tensors in places ------------------------------------------------------------------------------------------------

#: A buffer, the count of writes to it, and its value at that count.
Kept = tuple[torch.Tensor, int, torch.Tensor]

_THREADS = "Two threads called it at a time: give each a module of its own (copy.deepcopy)."
_ASSIGNED = (
    "It was assigned another tensor, which would be lost. Values that follow the batch are buffers: register_buffer, "
    "and return_buffers=True. Or assign it between two calls."
)


class Swap:
    """Replaces a module's tensors by others during a call. `tensors`: {name: tensor}, with all tied names. `first`: of
    each buffer among them that the call may write to the tensor, the count of writes to it, and the value given for it.
    """

    def __init__(self, members: Members, tensors: dict[str, torch.Tensor], first: dict[str, Kept]):
        self.members, self.tensors, self.first = members, tensors, first
        self.gone: dict[str, Any] = {}  # of tensors that nobody has kept since: where they were
        self._after: dict[str, Any] = {}  # what is in the places of `first` after the call
        self._values: dict[str, torch.Tensor | None] = {}  # as :func:`_value` of these
        self._own: dict[str, torch.Tensor] = {}
        # Tensors that are other attributes of the module aren't kept in a dict of it.
        self._others = {name: tensors[name] for name in others} if (others := tensors.keys() - members.slots) else {}
        self._kept = dict(first)  # as `first`, of the last checkpoint

    @classmethod
    def of_call(
        cls, module: nn.Module, given: dict[str, Any], what: str, tie_weights: bool = True, returns: bool = False
    ) -> Swap:
        """What a call puts into a module: the `given` tensors, and copies of those that are buffers."""
        members, copies, first = Members(module, what, given), dict[str, torch.Tensor](), dict[str, Kept]()
        copied: dict[int, torch.Tensor] = {}  # a buffer with several names has one copy
        for buffer in members.buffers:
            if isinstance(x := given.get(buffer.path), torch.Tensor):
                copies[buffer.path] = copy = copied.setdefault(id(x), _copied(x))
                first[buffer.path] = copy, version_of(copy), x
        swap = cls(members, members.untied({**given, **copies} if copies else given, tie_weights), first)
        for name, (copy, _, x) in {} if returns else first.items():
            swap._values[name] = _value(copy, x, module.training)
        for name in members.hooked:
            put, (kept_in, key) = swap.tensors.get(name), members.slots[name]
            if put is None or put is kept_in[key]:
                continue
            node: Any = put.grad_fn  # a train step differentiates with respect to nothing above its markers
            if put.is_leaf or (Marker.made(node) and not node.schedule.fenced):
                raise StepError(closure_check.hooked_text(f"{what}: parameter {name!r} of {type(module).__name__}"))
        return swap

    def done(self, returns: bool = False) -> dict[str, torch.Tensor]:
        """The values of the given buffers after the call. Raises if what it wrote to one would be lost."""
        after, self._after = self._after, {}  # one may be the output itself, whose graph mustn't hold it
        members, name = self.members, type(self.members.module).__name__
        if members.buffers:
            closure_check.own_written((b for b in members.buffers if b.path not in self.tensors), name)
        if not self.first:
            return {}
        if removed := next((at for at, x in after.items() if not isinstance(x, torch.Tensor)), None):
            raise StepError(
                f"{members.what}: {name} set {removed!r}, a buffer that it was given, to {brief(after[removed])}, "
                "which no next call could be given. Write a tensor to it, or keep such values outside of its buffers."
            )
        if returns:
            # If the module itself called requires_grad_() on a copy, that is a leaf, and no gradient may go on from it.
            return {name: x.detach() if x.is_leaf and x.requires_grad else x for name, x in after.items()}
        values = {name: (private.unwrapped(self.tensors[name]), x) for name, x in self._values.items() if x is not None}
        written = next((name for name, (x, version, _) in self.first.items() if version_of(x) != version), None)
        if written is None and values and not closure_check.same_values(*zip(*values.values(), strict=True)):
            written = next(name for name, (now, was) in values.items() if not closure_check.same_values([now], [was]))
        if written is not None:
            raise StepError(
                f"{members.what}: {name} wrote to {written!r}, a buffer that it was given, and what it wrote would "
                "be lost. Take it: output, buffers = ltx.functional_call(module, (params, buffers), inputs, "
                "return_buffers=True), and return the buffers from the step. Or leave them as they are: module.eval()."
            )
        return {}

    def put(self) -> None:
        if self._others:
            self._exchange()
        slots = self.members.slots
        for name, tensor in self.tensors.items():
            if name in slots:
                kept_in, key = slots[name]
                self._own[name], kept_in[key] = kept_in[key], tensor

    def take_out(self) -> dict[str, Any]:
        """Put the module's own tensors back. Returns what was there."""
        found: dict[str, Any] = {}
        for name, tensor in reversed(self._own.items()):  # a place with several names has its own at the first
            kept_in, key = self.members.slots[name]
            found[name] = kept_in.get(key)
            kept_in[key] = tensor
        if self._others:
            self._exchange()
        return found

    def _exchange(self) -> None:
        self._others, _ = NamedMemberAccessor(self.members.module).swap_tensors_dict(self._others)

    def given(self, name: str) -> torch.Tensor:
        """What the call was given; of a buffer the module got a copy."""
        return self.first[name][2] if name in self.first else self.tensors[name]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the tensors into the module for the block, then put its own tensors back."""
        token = placed.set((*placed.get(), self))
        try:
            self.put()
            yield
        finally:
            placed.reset(token)
            found = self.take_out()
            for name, (x, _, value) in self.first.items():
                self._after[name] = found.get(name)
                if found.get(name) is not x:  # it was replaced, which counts as a write
                    self.first[name] = x, -1, value
        for name, own in self._own.items():
            if found[name] is not self.tensors[name] and name not in self.first:
                raise StepError(
                    f"functional_call: {type(self.members.module).__name__} lost the {name!r} that it was given, "
                    f"during the call. {_THREADS if found[name] is own else _ASSIGNED}"
                )

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """A function that puts the tensors in again, to compute a part anew; buffers begin with their values of now."""
        if not self._kept:
            return self.in_place
        # Batch norm counts its calls in one buffer, and writes to its other buffers without torch counting it.
        found = {name: kept_in[key] for name in self._kept for kept_in, key in [self.members.slots[name]]}
        written = {
            _module_of(name)
            for name, (tensor, version, _) in self._kept.items()
            if found[name] is not tensor or version_of(tensor) != version
        }
        for name, tensor in found.items():
            if _module_of(name) in written:
                self._kept[name] = tensor, version_of(tensor), tensor.detach().clone()
        now = dict(self._kept)
        return lambda: self.anew(now).in_place()

    def anew(self, kept: dict[str, Kept]) -> Swap:
        """This swap with copies of the values in `kept` as buffers, or the buffers themselves if they are constant."""
        copies: dict[int, torch.Tensor] = {}
        buffers: dict[str, Kept] = {}
        for name, (tensor, version, value) in kept.items():
            constant = not tensor.is_floating_point() and version_of(tensor) == version
            x = tensor if constant else copies.setdefault(id(tensor), value.clone())
            buffers[name] = x, version_of(x), x
        return Swap(self.members, {**self.tensors, **{name: x for name, (x, _, _) in buffers.items()}}, buffers)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


# --- modules that the backward pass calls again -----------------------------------------------------------------------

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
            if not isinstance(whole.get_submodule(_module_of(name)), nn.modules.batchnorm._NormBase):
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


def _record(given: Mapping[str, torch.Tensor], make: Callable[..., Swap], output: Any = ()) -> Calls | None:
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

    _record(given, swap, output)
    return output


_call_of_torch = stateless._functional_call
stateless._functional_call = _torch_calls


# --- torch.utils.checkpoint, which calls them again too ---------------------------------------------------------------

# Torch has no hook for this, so subclasses of three of its classes, in place of these, note at a checkpoint's beginning
# which tensors are in modules. It begins in the midst of a call, so this is right where :class:`Calls` has to refuse:
# for several sets of tensors, for buffers that are half way (power iterations), and in whoever's backward pass.


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
    """torch's checkpoint for ``use_reentrant=True``, which would differentiate down to the step's parameters by itself,
    past the reduction. In functional calls and steps that for ``use_reentrant=False`` replaces it.
    """

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
